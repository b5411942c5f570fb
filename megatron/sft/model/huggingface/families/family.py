"""pure. A family of HuggingFace models (`model_type`) as data: its differences from Llama.

A new family is a file beside this one that makes a `Family`, and a line in `registry`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megatron.sft.model.huggingface.families.config_fields import ConfigFields
from megatron.sft.model.huggingface.rows import Row
from megatron.sft.options.model import ModelConfig


class Prefix(NamedTuple):
    """Beginnings of the names of a language model's tensors."""

    body: str = "model."
    head: str = "lm_head."


def _nothing(*_: object) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, kw_only=True)
class Family:
    """One `model_type`."""

    model_type: str
    architecture: str
    """transformers' class."""
    norm_epsilon: float = 1e-6
    """`rms_norm_eps` where a config.json lacks it; the next ones likewise."""
    rope_theta: float = 10000.0
    head_dim: int | None = None
    ties_embeddings: bool = False
    activation: str = "silu"
    """The only `hidden_act` that is computed."""
    partial_rotary_factor: float | None = None
    """Default of the share of rotated channels; None where the family rotates all of them."""
    needs_key_value_heads: bool = True
    """True if `num_key_value_heads` must be there."""
    reads_mxfp4: bool = False
    """True if released files hold experts in MXFP4; they are exported in the model's type."""
    has_attention_bias: bool = False
    """True if `options` reads `attention_bias`; else it must be off."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Other keys of config.json that transformers fills in where they are missing."""
    run_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Options that are no part of the model, and their defaults for this family."""
    options: Callable[[ConfigFields], dict[str, Any]] = _nothing
    """config.json -> the options that differ from Llama's; ValueError for what cannot be computed.
    """
    config: Callable[[ModelConfig], dict[str, Any]] = _nothing
    """Options -> the keys of config.json that differ from Llama's."""
    rows: tuple[Row, ...] = ()
    """Rows that take the place of Llama's of the same parameters, and further ones."""
    stacked_rows: tuple[Row, ...] = ()
    """Rows for folders that hold the experts of a layer as one tensor, in place of `rows`'."""
    names: tuple[tuple[str, str], ...] = ()
    """Texts in the names of Llama's tensors, and this family's, replaced in this order."""
    carried: tuple[str, ...] = ()
    """Beginnings of the names of tensors that are no part of the model, and kept as they are."""
    carries_further_layers: bool = False
    """True if layers beyond `num_hidden_layers`, which predict further tokens, are kept as well."""
    within: Mapping[str, Prefix] = field(default_factory=dict)
    """`model_type` of models that have this one as `text_config` -> names of its tensors there."""

    def renamed(self, tensor: str) -> str:
        """Returns this family's name of one of Llama's tensors."""
        for ours, theirs in self.names:
            tensor = tensor.replace(ours, theirs)
        return tensor
