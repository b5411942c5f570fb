"""pure. The model as options, under Megatron's names: declared here once for trainer, calibration
and planner.

An option of `Architecture` that megatron-core's TransformerConfig has under the same name needs
nothing else (see `architecture`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple

from megatron.packing.flags import check_range, flag_of


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Model: what decides the FLOPs of a token. What the planner may leave open is None."""

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
    num_experts: int | None = None
    """Experts of each MoE layer."""
    moe_layer_freq: tuple[int, ...] = ()
    """For each layer 1 if it has experts, else 0 (default: all have)."""
    moe_router_topk: int = 2
    """Experts that each token goes to."""
    moe_ffn_hidden_size: int | None = None
    """Width of an expert's MLP (default: --ffn-hidden-size)."""
    moe_shared_expert_intermediate_size: int | None = None
    """Width of an MLP beside the experts that all tokens go through."""
    mtp_num_layers: int | None = None
    """Layers of multi-token prediction."""

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
        if self.swiglu and self.geglu:
            raise ValueError("--swiglu and --geglu exclude one another; drop one")
        self._check_expert_shape()

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
        if not self.moe_layer_freq or self.num_layers is None:
            return
        if len(self.moe_layer_freq) != self.num_layers or set(self.moe_layer_freq) not in (
            {1},
            {0, 1},
        ):
            raise ValueError(
                f"--moe-layer-freq must be a 0 or 1 for each of --num-layers {self.num_layers}, "
                "with a 1 among them"
            )

    @property
    def is_gated(self) -> bool:
        """Whether the MLP has a gate beside its first layer."""
        return self.swiglu or self.geglu

    @property
    def num_dense_layers(self) -> int:
        """Layers without experts, of a model of experts."""
        return self.moe_layer_freq.count(0)

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

    def resolved(self) -> dict[str, Any]:
        """Returns a shape that is known with its defaults, as arguments of `gpt_pack_cost`."""
        written_out = {"geglu", "moe_layer_freq"}
        return {
            **{
                field.name: getattr(self, field.name)
                for field in fields(ModelShape)
                if field.name not in written_out
            },
            "swiglu": self.is_gated,
            "num_dense_layers": self.num_dense_layers,
            "num_query_groups": self.num_query_groups or self.num_attention_heads,
            "kv_channels": self.resolved_kv_channels,
            "ffn_hidden_size": self.resolved_ffn_hidden_size,
        }


@dataclass(frozen=True, kw_only=True)
class Architecture(ModelShape):
    """Model: all that decides what is computed for a token, and how."""

    num_layers: int = field()
    hidden_size: int = field()
    num_attention_heads: int = field()
    group_query_attention: bool = False
    """Share keys and values between heads; see --num-query-groups."""
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    """Kind of norm."""
    apply_layernorm_1p: bool = False
    """Norms multiply by one plus their weight, which starts at zero."""
    position_embedding_type: Literal["learned_absolute", "rope", "none"] = "learned_absolute"
    """Kind of position embedding."""
    disable_bias_linear: bool = False
    """No biases in linear layers."""
    add_qkv_bias: bool = False
    """Biases in the QKV projection all the same."""
    qk_layernorm: bool = False
    """Norms of queries and keys."""
    make_vocab_size_divisible_by: int = 128
    """The vocabulary is padded to a multiple of this; the same for every layout whose
    tensor-parallel size divides it.
    """
    moe_router_pre_softmax: bool = False
    """Softmax over all experts, before the choice of the best, instead of over the chosen ones."""
    moe_shared_expert_gate: bool = False
    """Let each token weigh what comes from it."""
    recompute_granularity: Literal["full", "selective"] | None = None
    """Recompute activations in the backward pass: whole layers, or the core attention only."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, 1, None, "make_vocab_size_divisible_by")
        if self.moe_shared_expert_gate and self.moe_shared_expert_intermediate_size is None:
            raise ValueError(
                "--moe-shared-expert-gate needs --moe-shared-expert-intermediate-size; pass it"
            )


class Split(NamedTuple):
    """A flag of the parallel layout, and over how many the model is split by it."""

    flag: str
    size: int


def check_splits(
    shape: ModelShape,
    *,
    stages: Split,
    virtual: Split,
    tensor: Split,
    experts: Split,
    sequence_parallel: bool,
    origin: str = "",
) -> None:
    """Raises ValueError for a layout that does not divide `shape`; what the shape leaves open is
    taken to fit.

    origin: where the shape is from but from flags, as in " (the default model's)".
    """

    layers = shape.num_layers or 0
    if layers % (stages.size * virtual.size):
        units = f"{stages.flag} {stages.size}"
        if layers % stages.size == 0:
            units = f"{units} times {virtual.flag} {virtual.size}"
        raise ValueError(
            f"--num-layers {layers}{origin} must be a multiple of {units}: stages are alike; "
            "change one"
        )
    widths = {
        "num_attention_heads": shape.num_attention_heads,
        "moe_shared_expert_intermediate_size": shape.moe_shared_expert_intermediate_size,
    }
    if tensor.size % (
        shape.num_query_groups or 1
    ):  # ranks may share a group, if it is the same number for each
        widths["num_query_groups"] = shape.num_query_groups
    if shape.num_experts is None or shape.num_dense_layers:
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


def ffn_hidden_size(hidden_size: int, is_gated: bool) -> int:
    """Returns Megatron's width of the MLP where none is given: 4 times the hidden size; with a gate
    two thirds of that, down to a multiple of 64.
    """
    return int(4 * hidden_size * 2 / 3) // 64 * 64 or 64 if is_gated else 4 * hidden_size
