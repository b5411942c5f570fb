"""pure. Gated delta net: linear attention with a state per head, in place of self-attention
(Qwen3-Next, Qwen3.5; arXiv 2412.06464).

`delta_net_module` computes it, `delta_rule` its two steps over tokens; `delta_kernels` says what
flash-linear-attention's kernels keep. Options have megatron-core's names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from types import SimpleNamespace
from typing import Any, ClassVar

from megatron.packing.layers import EACH_LAYER, Parameter, Part, Sharding, Work
from megatron.packing.rules import Rule, at_least, needs

_OWN = {"idle_without": "linear_attention_freq"}
_WIDTHS = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
)
"""Options without which there is no gated delta net."""


@dataclass(frozen=True, kw_only=True)
class DeltaNetOptions:
    """Options of a model's gated delta nets."""

    linear_attention_freq: tuple[int, ...] = field(default=(), metadata=EACH_LAYER)
    """1 for each layer with a gated delta net in place of attention, else 0 (default: none)."""
    linear_num_key_heads: int | None = field(default=None, metadata=_OWN)
    """Key heads of the gated delta net."""
    linear_num_value_heads: int | None = field(default=None, metadata=_OWN)
    """Value heads of the gated delta net."""
    linear_key_head_dim: int | None = field(default=None, metadata=_OWN)
    """Width of a key head of the gated delta net."""
    linear_value_head_dim: int | None = field(default=None, metadata=_OWN)
    """Width of a value head of the gated delta net."""
    linear_conv_kernel_dim: int = field(default=4, metadata=_OWN)
    """Tokens that the gated delta net's convolution sees."""


def _parameter(
    name: str, sharding: Sharding, *shape: str, takes_adapter: bool = False
) -> Parameter:
    return Parameter(f"delta_net.{name}", f"self_attention.{name}", sharding, shape, takes_adapter)


def _heads_do_not_divide(options: Any) -> bool:
    keys, values = options.linear_num_key_heads, options.linear_num_value_heads
    return None not in (keys, values) and values % keys != 0


@dataclass(frozen=True, kw_only=True)
class DeltaNet(Part):
    """The gated delta net of a layer."""

    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int = 4

    name: ClassVar[str] = "delta_net"
    title: ClassVar[str] = "delta nets"
    layers_option: ClassVar[str] = "linear_attention_freq"
    why_paths_apart: ClassVar[str] = (
        "a recurrent layer would have to begin a node with its parent's state"
    )
    described_kernels: ClassVar[str] = "delta nets by flash-linear-attention"
    parameters: ClassVar[tuple[Parameter, ...]] = (
        _parameter(
            "in_proj.weight",
            "sections",  # queries, keys, values, gates (z), betas, alphas
            "dn_key,dn_key,dn_value,dn_value,dn_value_heads,dn_value_heads",
            "hidden",
            takes_adapter=True,
        ),
        _parameter("conv1d.weight", "sections", "dn_key,dn_key,dn_value", "one", "dn_kernel"),
        _parameter("A_log", "rows", "dn_value_heads"),
        _parameter("dt_bias", "rows", "dn_value_heads"),
        _parameter("out_norm.weight", "whole", "dn_value_head"),
        _parameter("out_proj.weight", "columns", "hidden", "dn_value", takes_adapter=True),
    )
    rules: ClassVar[tuple[Rule, ...]] = (
        *at_least(1, *_WIDTHS, "linear_conv_kernel_dim"),
        *needs("linear_attention_freq", *_WIDTHS),
        Rule(
            when=_heads_do_not_divide,
            why="{linear_num_value_heads} must be a multiple of {linear_num_key_heads}",
            way_out="change one",
        ),
        Rule(
            when=lambda options, layout: (
                options.linear_num_key_heads % (layout.tensor * layout.context)
            ),
            why="{linear_num_key_heads} must be a multiple of {tensor} times {context}, whose "
            "ranks share the heads",
            way_out="lower one",
        ),
        Rule(
            when=lambda options: (
                options.mtp_num_layers
                and options.linear_attention_freq
                and options.linear_attention_freq[-1]
            ),
            why="{mtp_num_layers} repeats the last layer, which must be attention, but "
            "{linear_attention_freq.flag} has a gated delta net there",
            way_out="drop {mtp_num_layers.flag}",
        ),
    )

    @property
    def key_size(self) -> int:
        """Channels of all query heads, and of all key heads."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_size(self) -> int:
        """Channels of all value heads."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    def sizes(self) -> dict[str, int]:
        """See `Part`."""
        return {
            "dn_key": self.key_size,
            "dn_value": self.value_size,
            "dn_key_heads": self.linear_num_key_heads,
            "dn_value_heads": self.linear_num_value_heads,
            "dn_value_head": self.linear_value_head_dim,
            "dn_kernel": self.linear_conv_kernel_dim,
        }

    def work(self, hidden_size: int) -> Work:
        """Projections in and out; and the recurrence. Per value head the state [d_k, d_v] is
        multiplied by the key, updated, and multiplied by the query. Each channel is convolved.
        """
        heads, state = self.linear_num_value_heads, self.linear_key_head_dim * self.value_size
        weights = hidden_size * (2 * self.key_size + 3 * self.value_size + 2 * heads)
        convolved = self.linear_conv_kernel_dim * (2 * self.key_size + self.value_size)
        return Work(weights + 3 * state + convolved, weights)

    def exchanged_channels(self, tensor: int, context: int) -> float:
        """See `Part`. Of all tokens a rank gets its share of heads: queries, keys, values, betas
        and alphas; and of its own tokens the values of all heads.
        """
        channels = 2 * self.key_size + 2 * self.value_size + 2 * self.linear_num_value_heads
        return channels / (tensor * context)

    @staticmethod
    def module() -> type:
        """See `Part`."""
        return _beside("delta_net_module").GatedDeltaNet

    @staticmethod
    def kernel_stand_ins() -> Mapping[str, Any]:
        """See `Part`."""
        described = _beside("delta_kernels")
        return {
            "fla.ops.gated_delta_rule": SimpleNamespace(chunk_gated_delta_rule=described.rule),
            "fla.modules.convolution": SimpleNamespace(causal_conv1d=described.convolution),
        }


def _beside(name: str) -> Any:
    return import_module(f"{__package__}.{name}")
