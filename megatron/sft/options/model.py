"""pure. Options of the model: its shape, and what a checkpoint shares with the run that loads it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from megatron.packing.model.widths import ffn_hidden_size
from megatron.sft.options.ranges import check_range
from megatron.sft.options.rope_scaling import parse_rope_scaling


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Model."""

    num_layers: int
    """Transformer layers."""
    hidden_size: int
    """Width of the model."""
    num_attention_heads: int
    """Attention heads."""
    seq_length: int
    """Most tokens of one sequence; without packing, what each sequence is padded to."""
    max_position_embeddings: int | None = None
    """Positions that learned embeddings know (default: --seq-length)."""
    ffn_hidden_size: int | None = None
    """Width of the MLP (default: 4 times the hidden size, with a gate two thirds of that)."""
    kv_channels: int | None = None
    """Width of a head (default: hidden size / heads)."""
    group_query_attention: bool = False
    """Share keys and values between heads; see --num-query-groups."""
    num_query_groups: int | None = None
    """Groups of heads that share keys and values."""
    swiglu: bool = False
    """SwiGLU instead of GeLU."""
    geglu: bool = False
    """Gated GeLU, in its tanh approximation, instead of GeLU."""
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    """Kind of norm."""
    norm_epsilon: float = 1e-5
    """Added to the variance in norms."""
    apply_layernorm_1p: bool = False
    """Norms multiply by one plus their weight, which starts at zero."""
    scale_embeddings: bool = False
    """Multiply embeddings by the square root of the hidden size."""
    position_embedding_type: Literal["learned_absolute", "rope", "none"] = "learned_absolute"
    """Kind of position embedding."""
    rotary_base: float = 10000.0
    """Base period of rotary embeddings."""
    rope_scaling: str | None = None
    """Rotary embeddings for longer contexts, as in a HuggingFace config.json, such as
    {"rope_type": "linear", "factor": 2}; of types linear, llama3 and yarn."""
    rotary_percent: float = 1.0
    """Share of a head's channels that are rotated."""
    untie_embeddings_and_output_weights: bool = False
    """Give the output layer weights of its own."""
    disable_bias_linear: bool = False
    """No biases in linear layers."""
    add_qkv_bias: bool = False
    """Biases in the QKV projection all the same."""
    qk_layernorm: bool = False
    """Norms of queries and keys."""
    hidden_dropout: float = 0.0
    """Dropout after attention and MLP."""
    attention_dropout: float = 0.0
    """Dropout of attention weights; needs Transformer Engine."""
    init_method_std: float = 0.02
    """Standard deviation of the initial weights."""
    make_vocab_size_divisible_by: int = 128
    """The vocabulary is padded to a multiple of this; the same for every layout whose tensor-parallel size divides
    it.
    """
    mask_vocab_padding: bool = False
    """Keep the padding out of the softmax, as if it were not there."""
    num_experts: int | None = None
    """Experts of each MoE layer."""
    moe_layer_freq: tuple[int, ...] = ()
    """For each layer 1 if it has experts, else 0 (default: all have)."""
    moe_router_topk: int = 2
    """Experts that each token goes to."""
    moe_router_pre_softmax: bool = False
    """Softmax over all experts, before the choice of the best, instead of over the chosen ones."""
    moe_ffn_hidden_size: int | None = None
    """Width of an expert's MLP (default: --ffn-hidden-size)."""
    moe_shared_expert_intermediate_size: int | None = None
    """Width of an MLP beside the experts that all tokens go through."""
    moe_shared_expert_gate: bool = False
    """Let each token weigh what comes from it."""
    moe_aux_loss_coeff: float = 0.0
    """Weight of the router's load-balancing loss."""
    mtp_num_layers: int | None = None
    """Layers of multi-token prediction."""
    mtp_loss_scaling_factor: float = 0.1
    """Weight of their loss."""
    recompute_granularity: Literal["full", "selective"] | None = None
    """Recompute activations in the backward pass: whole layers, or the core attention only."""

    def __post_init__(self) -> None:
        check_range(self, 1, None, "num_layers", "hidden_size", "num_attention_heads", "seq_length", "moe_router_topk")
        check_range(
            self, 1, None, "ffn_hidden_size", "kv_channels", "num_query_groups", "num_experts", "mtp_num_layers"
        )
        check_range(self, 1, None, "moe_ffn_hidden_size", "make_vocab_size_divisible_by", "rotary_base")
        check_range(self, 1, None, "moe_shared_expert_intermediate_size")
        check_range(self, 0, 1, "hidden_dropout", "attention_dropout", "rotary_percent")
        check_range(self, 0, None, "norm_epsilon", "init_method_std", "moe_aux_loss_coeff", "mtp_loss_scaling_factor")
        if self.kv_channels is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"--hidden-size {self.hidden_size} must be a multiple of --num-attention-heads "
                f"{self.num_attention_heads}, or pass --kv-channels"
            )
        if self.group_query_attention != (self.num_query_groups is not None):
            raise ValueError("--group-query-attention and --num-query-groups belong together; pass both or none")
        if self.num_query_groups is not None and self.num_attention_heads % self.num_query_groups:
            raise ValueError(
                f"--num-attention-heads {self.num_attention_heads} must be a multiple of --num-query-groups "
                f"{self.num_query_groups}"
            )
        if self.max_position_embeddings is not None and self.max_position_embeddings < self.seq_length:
            raise ValueError(
                f"--max-position-embeddings {self.max_position_embeddings} must be at least "
                f"--seq-length {self.seq_length}"
            )
        if self.mtp_num_layers is not None and self.position_embedding_type == "learned_absolute":
            raise ValueError("--mtp-num-layers needs --position-embedding-type rope; stages do not share learned ones")
        if self.swiglu and self.geglu:
            raise ValueError("--swiglu and --geglu exclude one another; drop one")
        if self.rope_scaling is not None:
            parse_rope_scaling(self.rope_scaling)
        if self.num_experts is not None:
            self._check_experts(self.num_experts)
        elif self.moe_layer_freq or self.moe_shared_expert_intermediate_size or self.moe_shared_expert_gate:
            raise ValueError("--moe-layer-freq and --moe-shared-expert-... need --num-experts")

    def _check_experts(self, num_experts: int) -> None:
        if not self.disable_bias_linear:
            raise ValueError("--num-experts needs --disable-bias-linear: megatron-core's experts fail with biases")
        if self.moe_layer_freq and (len(self.moe_layer_freq) != self.num_layers or set(self.moe_layer_freq) - {0, 1}):
            raise ValueError(f"--moe-layer-freq must be a 0 or 1 for each of --num-layers {self.num_layers}")
        if self.moe_shared_expert_gate and self.moe_shared_expert_intermediate_size is None:
            raise ValueError("--moe-shared-expert-gate needs --moe-shared-expert-intermediate-size")
        if self.moe_router_topk > num_experts:
            raise ValueError(f"--moe-router-topk {self.moe_router_topk} must be at most --num-experts {num_experts}")
        if self.moe_router_topk == 1 and not self.moe_router_pre_softmax:
            raise ValueError(
                "--moe-router-topk 1 needs --moe-router-pre-softmax: a softmax over one expert is constant"
            )
        if self.mtp_num_layers is not None and self.moe_aux_loss_coeff:
            raise ValueError(
                f"--moe-aux-loss-coeff must be 0 with --mtp-num-layers, but is {self.moe_aux_loss_coeff}: "
                "megatron-core's layers of multi-token prediction would balance padding, too"
            )

    @property
    def is_gated(self) -> bool:
        """Whether the MLP has a gate beside its first layer."""
        return self.swiglu or self.geglu

    @property
    def resolved_kv_channels(self) -> int:
        """Width of a head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def resolved_ffn_hidden_size(self) -> int:
        """Width of the MLP."""
        return self.ffn_hidden_size or ffn_hidden_size(self.hidden_size, self.is_gated)

    def identity(self) -> dict[str, Any]:
        """What a checkpoint must share with the run that loads it, defaults resolved."""
        learned = self.position_embedding_type == "learned_absolute"
        resolved = {
            "ffn_hidden_size": self.resolved_ffn_hidden_size,
            "kv_channels": self.resolved_kv_channels,
            "max_position_embeddings": (self.max_position_embeddings or self.seq_length) if learned else None,
        }
        changeable = {
            "seq_length",
            "hidden_dropout",
            "attention_dropout",
            "recompute_granularity",
            "moe_aux_loss_coeff",
            "mtp_loss_scaling_factor",
        }
        return {name: value for name, value in (asdict(self) | resolved).items() if name not in changeable}
