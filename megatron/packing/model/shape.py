"""pure. A model's shape as options, under Megatron's names: declared here once for trainer,
calibration and planner. See `options` for what else decides what is computed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from megatron.packing.flags import check_range, flag_of
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
from megatron.packing.stages import StageLayers


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


@dataclass(frozen=True, kw_only=True)
class ModelShape(DeltaNetOptions, TransformerShape):
    """Model: what decides the FLOPs of a token, parts of layers included. What the planner may
    leave open is None.
    """

    def __post_init__(self) -> None:
        check_range(
            self, 1, None, "num_layers", "hidden_size", "num_attention_heads", "num_query_groups"
        )
        check_range(self, 1, None, "kv_channels", "ffn_hidden_size")
        check_range(self, 1, None, "num_experts", "moe_router_topk", "moe_ffn_hidden_size")
        check_range(self, 1, None, "moe_shared_expert_intermediate_size", "mtp_num_layers")
        heads = self.num_attention_heads or 1
        if self.kv_channels is None and self.hidden_size is not None and self.hidden_size % heads:
            raise ValueError(
                f"--hidden-size {self.hidden_size} must be a multiple of --num-attention-heads "
                f"{heads}, or pass --kv-channels"
            )
        if self.num_attention_heads is not None and heads % (self.num_query_groups or 1):
            raise ValueError(
                f"--num-attention-heads {heads} must be a multiple of --num-query-groups "
                f"{self.num_query_groups}"
            )
        gates = [name for name in ("swiglu", "geglu", "quick_geglu") if getattr(self, name)]
        if len(gates) > 1:
            raise ValueError(
                f"{flag_of(gates[0])} and {flag_of(gates[1])} exclude one another; drop one"
            )
        self._check_expert_shape()
        self._check_layers()
        check_options(self)

    def _check_layers(self) -> None:
        """Checks the options that have a number for each layer, and what they need."""
        if self.window_size and (len(self.window_size) != 2 or self.window_size[1] != 0):
            raise ValueError(
                f"--window-size {' '.join(map(str, self.window_size))} must be tokens to the left "
                "and 0 to the right, such as 1023 0"
            )
        if self.window_size and self.window_size[0] < 0:
            raise ValueError(
                f"--window-size {self.window_size[0]} 0 must be at least 0 tokens to the left"
            )
        if self.window_attn_skip_freq and not self.window_size:
            raise ValueError("--window-attn-skip-freq needs --window-size; pass it")
        for name in options_of_each_layer(self):
            flags = getattr(self, name)
            is_known = bool(flags) and self.num_layers is not None
            if is_known and (len(flags) != self.num_layers or not set(flags) <= {0, 1}):
                raise ValueError(
                    f"{flag_of(name)} must be a 0 or 1 for each of --num-layers {self.num_layers}"
                )

    def _check_expert_shape(self) -> None:
        if self.num_experts is None and (
            self.moe_layer_freq or self.moe_shared_expert_intermediate_size
        ):
            raise ValueError(
                "--moe-layer-freq and --moe-shared-expert-intermediate-size need --num-experts; "
                "pass it"
            )
        if self.num_experts is not None and self.moe_router_topk > self.num_experts:
            raise ValueError(
                f"--moe-router-topk {self.moe_router_topk} must be at most --num-experts "
                f"{self.num_experts}; lower it"
            )
        if set(self.moe_layer_freq) == {0}:
            raise ValueError(
                f"--moe-layer-freq must be a 0 or 1 for each of --num-layers {self.num_layers}, "
                "with a 1 among them"
            )

    @property
    def is_gated(self) -> bool:
        """Returns whether the MLP has a gate beside its first layer."""
        return self.swiglu or self.geglu or self.quick_geglu

    @property
    def resolved_kv_channels(self) -> int:
        """Width of a head, of a shape that is known."""
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


class Split(NamedTuple):
    """A flag of the parallel layout, and over how many the model is split by it."""

    flag: str
    size: int


def check_splits(
    shape: ModelShape,
    *,
    stages: StageLayers,
    stages_flag: str,
    virtual: Split,
    tensor: Split,
    experts: Split,
    sequence_parallel: bool,
    origin: str = "",
) -> None:
    """Raises ValueError for a layout that does not divide `shape`; what the shape leaves open is
    taken to fit.

    stages_flag: of the number of stages.
    virtual: the flag of virtual stages, by their number or their layers.
    origin: where the shape is from but from flags, as in " (the default model's)".
    """
    if shape.num_layers is not None:
        _check_stages(
            shape.num_layers, stages, Split(stages_flag, stages.num_stages), virtual, origin
        )
    widths = {
        "num_attention_heads": shape.num_attention_heads,
        "moe_shared_expert_intermediate_size": shape.moe_shared_expert_intermediate_size,
    }
    # More ranks than groups may share them, if each group has equally many ranks.
    if tensor.size % (shape.num_query_groups or 1):
        widths["num_query_groups"] = shape.num_query_groups
    if shape.num_experts is None or 0 in shape.moe_layer_freq:
        is_known = shape.hidden_size is not None
        widths["ffn_hidden_size"] = (
            shape.resolved_ffn_hidden_size if is_known else shape.ffn_hidden_size
        )
    for name, width in widths.items():
        if width is not None and width % tensor.size:
            raise ValueError(
                f"{flag_of(name)} {width}{origin} must be a multiple of {tensor.flag} "
                f"{tensor.size}; lower {tensor.flag}"
            )
    if shape.num_experts is None:
        return
    if tensor.size > 1 and not sequence_parallel:
        raise ValueError(
            f"--num-experts with {tensor.flag} {tensor.size} needs --sequence-parallel; pass it"
        )
    if shape.num_experts % experts.size:
        raise ValueError(
            f"--num-experts {shape.num_experts} must be a multiple of {experts.flag} "
            f"{experts.size}; lower {experts.flag}"
        )


def _check_stages(
    num_layers: int, stages: StageLayers, number: Split, virtual: Split, origin: str
) -> None:
    layers, counted = f"--num-layers {num_layers}{origin}", stages.num_counted(num_layers)
    ends = {
        "--decoder-first-pipeline-num-layers": stages.first,
        "--decoder-last-pipeline-num-layers": stages.last,
    }
    counts = {
        "--account-for-embedding-in-pipeline-split": stages.counts_embedding,
        "--account-for-loss-in-pipeline-split": stages.counts_loss,
    }
    of_ends = [f"{flag} {end}" for flag, end in ends.items() if end is not None]
    of_counts = [flag for flag, is_given in counts.items() if is_given]
    if of_ends and of_counts:
        raise ValueError(f"{of_ends[0]} and {of_counts[0]} exclude one another; drop one")
    if not of_ends and counted % (number.size * virtual.size):
        units = f"{number.flag} {number.size}"
        if counted % number.size == 0:
            units = f"{units} times {virtual.flag} {virtual.size}"
        if of_counts:
            layers = f"{layers} and {' and '.join(of_counts)}, {counted} together,"
        raise ValueError(
            f"{layers} must be a multiple of {units}: stages are alike; change one, or pass "
            "--decoder-first-pipeline-num-layers or --decoder-last-pipeline-num-layers"
        )
    try:
        stages.of_parts(num_layers)
    except ValueError as failure:
        given = " and ".join(of_ends or of_counts)
        raise ValueError(
            f"{given} with {layers} and {number.flag} {number.size} {failure}; change one"
        ) from None


def ffn_hidden_size(hidden_size: int, is_gated: bool) -> int:
    """Returns Megatron's width of the MLP where none is given: 4 times the hidden size; with a gate
    two thirds of that, down to a multiple of 64.
    """
    return int(4 * hidden_size * 2 / 3) // 64 * 64 or 64 if is_gated else 4 * hidden_size
