"""pure. A model's layers as data: one `LayerKind` per layer says what is computed there and how
wide it is.

The assembler builds layers from it, the cost model counts their FLOPs from it, and the table of
weights asks it which tensors a layer has. Example: four layers, of which the last sees all tokens
and the others a window of 512:

    kinds = [replace(full, window=512)] * 3 + [full]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Mixer = Literal["attention", "delta_net"]


@dataclass(frozen=True, kw_only=True)
class DeltaNetShape:
    """Widths of a gated delta net (arXiv 2412.06464), under megatron-core's names."""

    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int = 4

    @property
    def key_size(self) -> int:
        """Channels of all query heads, and of all key heads."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_size(self) -> int:
        """Channels of all value heads."""
        return self.linear_num_value_heads * self.linear_value_head_dim


@dataclass(frozen=True, kw_only=True)
class ExpertsShape:
    """A mixture of experts in place of the MLP."""

    num_experts: int
    topk: int
    """Experts that each token goes to."""
    width: int
    """FFN width of an expert."""
    shared_width: int = 0
    """FFN width of the shared expert; 0 for none."""


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """One transformer layer."""

    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    """Width of a head."""
    window: int | None = None
    """Tokens that a token attends to, itself included; None for all before it."""
    has_rope: bool = True
    """True if queries and keys are rotated, in models with rotary embeddings."""
    has_output_gate: bool = False
    """True if a gate multiplies the attention's output."""
    delta_net: DeltaNetShape | None = None
    """Computed in place of attention."""
    ffn_hidden_size: int
    """Width of the MLP, in layers without experts."""
    experts: ExpertsShape | None = None

    @property
    def mixer(self) -> Mixer:
        """Layer that mixes tokens."""
        return "attention" if self.delta_net is None else "delta_net"

    def mixer_weights(self, hidden_size: int) -> int:
        """Weights of the projections in and out of the mixer: multiply-adds of each token."""
        if self.delta_net is not None:
            shape = self.delta_net
            inputs = 2 * shape.key_size + 2 * shape.value_size + 2 * shape.linear_num_value_heads
            return hidden_size * (inputs + shape.value_size)
        query_size = self.num_attention_heads * self.kv_channels
        key_value_size = 2 * self.num_query_groups * self.kv_channels
        gate_size = query_size if self.has_output_gate else 0
        return hidden_size * (query_size + key_value_size + gate_size) + query_size * hidden_size

    def recurrence(self) -> int:
        """Returns multiply-adds of each token in the recurrence of a delta net; 0 for attention.

        Per value head the state [d_k, d_v] is multiplied by the key, updated, and multiplied by
        the query; besides, each channel is convolved.
        """
        if self.delta_net is None:
            return 0
        shape = self.delta_net
        state = shape.linear_num_value_heads * (
            shape.linear_key_head_dim * shape.linear_value_head_dim
        )
        channels = 2 * shape.key_size + shape.value_size
        return 3 * state + shape.linear_conv_kernel_dim * channels

    def per_token(self, hidden_size: int, is_gated: bool) -> int:
        """Returns multiply-adds of each token, but for pairs of tokens."""
        used, _ = self.mlp_weights(hidden_size, is_gated)
        return self.mixer_weights(hidden_size) + self.recurrence() + used

    def per_square(self) -> int:
        """Returns multiply-adds of each squared token of a sequence within the window: scores and
        their product with the values, over half of the L^2 pairs.
        """
        return 0 if self.delta_net is not None else self.num_attention_heads * self.kv_channels

    def mlp_weights(self, hidden_size: int, is_gated: bool) -> tuple[int, int]:
        """Returns (multiply-adds of each token, weights) of the MLP or the experts."""
        matrices = 3 if is_gated else 2
        if self.experts is None:
            size = matrices * hidden_size * self.ffn_hidden_size
            return size, size
        experts = self.experts
        used = experts.topk * experts.width + experts.shared_width
        per_token = matrices * hidden_size * used + hidden_size * experts.num_experts
        idle = (experts.num_experts - experts.topk) * experts.width
        return per_token, per_token + matrices * hidden_size * idle


def flags_of_layers(flags: Sequence[int], num_layers: int, default: bool) -> list[bool]:
    """Returns one bool per layer: `flags` of 0 and 1, or `default` for all layers where there are
    none.
    """
    return [bool(flag) for flag in flags] or [default] * num_layers
