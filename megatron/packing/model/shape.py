"""pure. A model's shape as options, under Megatron's names: declared here once for trainer,
calibration and planner. See `options` for what else decides what is computed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from megatron.packing.flags import flag_of
from megatron.packing.layers import (
    EACH_LAYER,
    NO_LAYERS,
    ExpertsShape,
    LayerKind,
    flags_of_layers,
    options_of_each_layer,
)
from megatron.packing.model.parts import check_options, part_in
from megatron.packing.model.parts.delta_net import DeltaNetOptions
from megatron.packing.model.parts.global_attention import GlobalAttentionOptions
from megatron.packing.model.parts.latent_attention import LatentAttentionOptions
from megatron.packing.rules import Rule, at_least, check_rules, exclude, needs, rules_of


@dataclass(frozen=True, kw_only=True)
class TransformerShape:
    """Shape of a transformer of attention and MLPs or experts."""

    num_layers: int | None = None
    """Transformer layers."""
    hidden_size: int | None = None
    """Width of the model."""
    num_attention_heads: int | None = None
    """Attention heads."""
    num_query_groups: int | None = None
    """Groups of heads that share keys and values (default: as many as heads)."""
    kv_channels: int | None = None
    """Width of a head (default: hidden size / heads)."""
    ffn_hidden_size: int | None = None
    """Width of the MLP (default: 4 times the hidden size, with --swiglu or --geglu two thirds of
    that).
    """
    swiglu: bool = False
    """SwiGLU instead of GeLU."""
    geglu: bool = False
    """Gated GeLU, in its tanh approximation, instead of GeLU."""
    quick_geglu: bool = False
    """Gated x sigmoid(1.702 x) instead of GeLU."""
    num_experts: int | None = None
    """Experts of each MoE layer."""
    moe_layer_freq: tuple[int, ...] = field(default=(), metadata=EACH_LAYER)
    """1 for each layer with experts, else 0 (default: all have)."""
    moe_router_topk: int = field(default=2, metadata={"idle_without": "num_experts"})
    """Experts that each token goes to."""
    moe_ffn_hidden_size: int | None = field(default=None, metadata={"idle_without": "num_experts"})
    """Width of an expert's MLP (default: --ffn-hidden-size)."""
    moe_shared_expert_intermediate_size: int | None = None
    """FFN width of the shared expert."""
    mtp_num_layers: int | None = None
    """Layers of multi-token prediction."""
    window_size: tuple[int, ...] = field(default=(), metadata=NO_LAYERS)
    """Sliding attention window: tokens to the left, and 0 to the right. `1023 0` lets a token
    attend to itself and the 1,023 before it (default: no window).
    """
    window_attn_skip_freq: tuple[int, ...] = field(default=(), metadata=EACH_LAYER)
    """1 for each layer with the window of --window-size, else 0 (default: all have)."""
    attention_output_gate: bool = False
    """Multiply the attention's output by a sigmoid gate."""


def _wrong_value_of_layers(options: Any) -> dict[str, str]:
    for name in options_of_each_layer(options):
        values = getattr(options, name)
        is_known = bool(values) and options.num_layers is not None
        if is_known and (len(values) != options.num_layers or not set(values) <= {0, 1}):
            return {"flag": flag_of(name)}
    return {}


@dataclass(frozen=True, kw_only=True)
class ModelShape(GlobalAttentionOptions, LatentAttentionOptions, DeltaNetOptions, TransformerShape):
    """Model: what decides the FLOPs of a token, parts of layers included. What the planner may
    leave open is None.
    """

    rules: ClassVar[tuple[Rule, ...]] = (
        *at_least(1, "num_layers", "hidden_size", "num_attention_heads", "num_query_groups"),
        *at_least(1, "kv_channels", "ffn_hidden_size"),
        *at_least(1, "num_experts", "moe_router_topk", "moe_ffn_hidden_size"),
        *at_least(1, "moe_shared_expert_intermediate_size", "mtp_num_layers"),
        Rule(
            when=lambda options: (
                options.kv_channels is None
                and options.kv_lora_rank is None
                and options.hidden_size is not None
                and options.hidden_size % (options.num_attention_heads or 1)
            ),
            why="{hidden_size} must be a multiple of {num_attention_heads}, or pass "
            "{kv_channels.flag}",
        ),
        Rule(
            when=lambda options: (
                (options.num_attention_heads or 0) % (options.num_query_groups or 1)
            ),
            why="{num_attention_heads} must be a multiple of {num_query_groups}",
        ),
        exclude("swiglu", "geglu"),
        exclude("swiglu", "quick_geglu"),
        exclude("geglu", "quick_geglu"),
        Rule(
            when=lambda options: (
                options.num_experts is None
                and (options.moe_layer_freq or options.moe_shared_expert_intermediate_size)
            ),
            why="{moe_layer_freq.flag} and {moe_shared_expert_intermediate_size.flag} need "
            "{num_experts.flag}",
            way_out="pass it",
        ),
        Rule(
            when=lambda options: (
                options.num_experts is not None and options.moe_router_topk > options.num_experts
            ),
            why="{moe_router_topk} must be at most {num_experts}",
            way_out="lower it",
        ),
        Rule(
            when=lambda options: set(options.moe_layer_freq) == {0},
            why="{moe_layer_freq.flag} must be a 0 or 1 for each of {num_layers}, with a 1 among "
            "them",
        ),
        Rule(
            when=lambda options: (
                options.window_size and (len(options.window_size) != 2 or options.window_size[1])
            ),
            why="{window_size} must be tokens to the left and 0 to the right, such as 1023 0",
        ),
        Rule(
            when=lambda options: options.window_size and options.window_size[0] < 0,
            why="{window_size} must be at least 0 tokens to the left",
        ),
        *needs("window_attn_skip_freq", "window_size"),
        Rule(
            when=_wrong_value_of_layers,
            why="{flag} must be a 0 or 1 for each of {num_layers}",
        ),
    )

    def __post_init__(self) -> None:
        check_rules(rules_of(type(self)), options=self)
        check_options(self)

    @property
    def is_gated(self) -> bool:
        """Returns whether the MLP has a gate beside its first layer."""
        return self.swiglu or self.geglu or self.quick_geglu

    @property
    def resolved_kv_channels(self) -> int:
        """Width of a head, of a shape that is known; of latent attention its rotated part."""
        if self.kv_lora_rank is not None and self.qk_pos_emb_head_dim is not None:
            return self.qk_pos_emb_head_dim
        assert self.hidden_size is not None
        assert self.num_attention_heads is not None
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def resolved_ffn_hidden_size(self) -> int:
        """Width of the MLP, of a shape that is known."""
        assert self.hidden_size is not None
        return self.ffn_hidden_size or ffn_hidden_size(self.hidden_size, self.is_gated)

    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """Returns the layers of a shape that is known, from first to last."""
        assert self.num_layers is not None
        assert self.num_attention_heads is not None
        num_layers = self.num_layers
        has_experts = flags_of_layers(
            self.moe_layer_freq, num_layers, default=self.num_experts is not None
        )
        has_window = flags_of_layers(
            self.window_attn_skip_freq, num_layers, default=bool(self.window_size)
        )
        dense = LayerKind(
            num_attention_heads=self.num_attention_heads,
            num_query_groups=self.num_query_groups or self.num_attention_heads,
            kv_channels=self.resolved_kv_channels,
            ffn_hidden_size=self.resolved_ffn_hidden_size,
            has_output_gate=self.attention_output_gate,
        )
        with_experts = replace(dense, experts=self._experts_shape())
        kinds = []
        for layer in range(num_layers):
            kind = with_experts if has_experts[layer] else dense
            part = part_in(self, layer)
            if part is not None:
                kind = replace(kind, mixer=part.of(self), has_output_gate=False)
            elif has_window[layer]:
                kind = replace(kind, window=self.window_size[0] + 1)
            kinds.append(kind)
        return tuple(kinds)

    def _experts_shape(self) -> ExpertsShape | None:
        if self.num_experts is None:
            return None
        return ExpertsShape(
            num_experts=self.num_experts,
            topk=self.moe_router_topk,
            width=self.moe_ffn_hidden_size or self.resolved_ffn_hidden_size,
            shared_width=self.moe_shared_expert_intermediate_size or 0,
        )


def ffn_hidden_size(hidden_size: int, is_gated: bool) -> int:
    """Returns Megatron's width of the MLP where none is given: 4 times the hidden size; with a gate
    two thirds of that, down to a multiple of 64.
    """
    return int(4 * hidden_size * 2 / 3) // 64 * 64 or 64 if is_gated else 4 * hidden_size
