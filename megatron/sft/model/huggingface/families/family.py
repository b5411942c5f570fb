"""pure. A family of HuggingFace models (`model_type`), described by its differences from Llama.

To add a family, write a file beside this one that makes a `Family`, and add it to `registry`. Tests
take it from lists: a released config.json in tests/fixtures/released/configs, and in
tests/functional_tests `hf_models.FAMILY_MODELS`, `family_cases.EXAMPLES` and `config_fields`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megatron.sft.model.huggingface.families.config_fields import ConfigFields
from megatron.sft.model.huggingface.rows import Row
from megatron.sft.options.model import ModelConfig


class Prefix(NamedTuple):
    """Prefixes of the tensor names of a language model."""

    body: str = "model."
    head: str = "lm_head."
    memory: str = ""
    """The body's prefix in memory, which PEFT writes and alone reads for `modules_to_save`; empty
    where it is that of files.
    """

    def in_memory(self, name: str) -> str:
        """Returns the name in memory of a tensor with its name in files."""
        if name.startswith(self.body):
            return (self.memory or self.body) + name.removeprefix(self.body)
        return f"lm_head.{name.removeprefix(self.head)}" if name.startswith(self.head) else name


def _nothing(*_: object) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, kw_only=True)
class Family:
    """One `model_type`. The defaults of all fields are Llama's."""

    model_type: str
    architecture: str
    """Name of its class in transformers."""
    norm_epsilon: float = 1e-6
    """Value of `rms_norm_eps` if config.json lacks it. The next three fields are such defaults,
    too.
    """
    rope_theta: float = 10000.0
    head_dim: int | None = None
    """None for hidden_size / num_attention_heads."""
    ties_embeddings: bool = False
    activations: tuple[str, ...] = ("silu", "swish")
    """Supported values of `activation_field`, which are names of one function. The first is the
    default.
    """
    activation_field: str | None = "hidden_act"
    """Key of config.json that transformers reads it from; None if it reads none."""
    partial_rotary_factor: float | None = None
    """Default share of rotated channels; None if the family always rotates all of them."""
    needs_key_value_heads: bool = True
    """True if config.json must have `num_key_value_heads`."""
    reads_mxfp4: bool = False
    """True if released files have experts in MXFP4. They are exported in the type of the other
    weights.
    """
    reads_per_layer_config: bool = False
    """True if `options` reads `per_layer_config`: sizes of single layers. Others refuse it."""
    unsupported: tuple[str, ...] = ()
    """Keys that transformers reads and the product does not. They must be missing, null or off."""
    reads_attention_dropout: bool = True
    """True if transformers reads `attention_dropout`."""
    residual_dropout: str | None = None
    """Key of a dropout that transformers applies to what a branch adds, while it trains."""
    has_router_loss: bool = False
    """True if transformers adds a load-balancing loss where `output_router_logits` asks for it."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of config.json that may be missing -> their values in transformers."""
    run_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Options of a run that are not part of the model -> their defaults for this family."""
    options: Callable[[ConfigFields], dict[str, Any]] = _nothing
    """Function from config.json to the options that differ from Llama's. It raises ValueError for a
    model that cannot be computed exactly.
    """
    config: Callable[[ModelConfig], dict[str, Any]] = _nothing
    """Function from options to the keys of config.json that differ from Llama's."""
    rows: tuple[Row, ...] = ()
    """Rows that replace those of `rows.LAYER_ROWS` for the same parameter, or add a parameter."""
    names: tuple[tuple[str, str], ...] = ()
    """(text in Llama's tensor names, this family's text), replaced in this order."""
    carried: tuple[str, ...] = ()
    """Prefixes of tensors that are not part of the model. An export copies them."""
    carries_further_layers: bool = False
    """True if an export also copies layers beyond `num_hidden_layers`, which predict further
    tokens.
    """
    within: Mapping[str, Prefix] = field(default_factory=dict)
    """`model_type` of a multimodal model that has this one as `text_config` -> prefixes of its
    tensors there.
    """
    ignored_within: tuple[str, ...] = ()
    """Keys that transformers reads of this model, and not of one that is a `text_config`."""

    def renamed(self, tensor: str) -> str:
        """Returns this family's name of one of Llama's tensors."""
        for ours, theirs in self.names:
            tensor = tensor.replace(ours, theirs)
        return tensor
