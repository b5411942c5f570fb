"""pure. Options that decide what a model computes, as options under Megatron's names where it has
them.

An option that megatron-core's TransformerConfig has under the same name needs nothing else (see
`architecture`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from megatron.packing.flags import check_range, flag_of
from megatron.packing.layers import EACH_LAYER
from megatron.packing.model.shape import ModelShape

_ABOVE_ZERO = (
    "softmax_scale",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "embedding_multiplier",
    "residual_multiplier",
    "logits_scaling",
    "activation_func_clamp_value",
    "moe_router_topk_scaling_factor",
    "window_rotary_base",
)


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
    add_proj_bias: bool = False
    """Biases in attention's output projection all the same."""
    qk_layernorm: bool = False
    """Norms of queries and keys."""
    qk_layernorm_over_heads: bool = False
    """Let --qk-layernorm take the channels of all heads together, instead of each head's."""
    norm_position: Literal["before", "behind", "both"] = "before"
    """Norms before attention and MLP, behind them (before their output is added), or both."""
    no_rope_freq: tuple[int, ...] = field(
        default=(), metadata={**EACH_LAYER, "idle_without": "position_embedding_type=rope"}
    )
    """1 for each layer whose queries and keys are not rotated, else 0 (default: all are)."""
    window_rotary_base: float | None = None
    """Base period of rotary embeddings in layers with a window, which --rope-scaling does not
    stretch (default: they have those of the other layers).
    """
    rotary_interleaved: bool = field(
        default=False, metadata={"idle_without": "position_embedding_type=rope"}
    )
    """Rotate pairs of neighbouring channels, instead of one channel of each half of a head."""
    softmax_scale: float | None = None
    """Factor of attention scores (default: 1 / sqrt(width of a head))."""
    softmax_type: Literal["vanilla", "learnable"] = "vanilla"
    """learnable: attention sinks, a learned score per head that takes part in the softmax."""
    attn_logit_softcapping: float | None = None
    """Cap attention scores x at C: C tanh(x / C)."""
    final_logit_softcapping: float | None = None
    """Cap logits x at C: C tanh(x / C)."""
    query_scale_beta: float | None = None
    """Multiply queries by 1 + B ln(1 + floor(position / original length of --rope-scaling))."""
    embedding_multiplier: float = 1.0
    """Multiply embeddings by this."""
    residual_multiplier: float = 1.0
    """Multiply what attention and MLP add to the residual stream by this."""
    logits_scaling: float = 1.0
    """Divide logits by this."""
    activation_func_clamp_value: float | None = field(
        default=None, metadata={"idle_without": "swiglu|geglu|quick_geglu"}
    )
    """Clamp the MLP's gate above, and what it multiplies at both sides."""
    glu_linear_offset: float = field(
        default=0.0, metadata={"idle_without": "swiglu|geglu|quick_geglu"}
    )
    """Added to what the MLP's gate multiplies."""
    make_vocab_size_divisible_by: int = 128
    """The vocabulary is padded to a multiple of this; the same for every layout whose
    tensor-parallel size divides it.
    """
    moe_router_pre_softmax: bool = field(default=False, metadata={"idle_without": "num_experts"})
    """Softmax over all experts, before the choice of the best, instead of over the chosen ones."""
    moe_shared_expert_gate: bool = False
    """Gate the shared expert's output per token."""
    moe_router_score_function: Literal["softmax", "sigmoid"] = field(
        default="softmax", metadata={"idle_without": "num_experts"}
    )
    """Function of the router's logits."""
    moe_router_enable_expert_bias: bool = False
    """Add a bias per expert to the router's scores for the choice of experts; it is not trained."""
    moe_router_topk_scaling_factor: float | None = field(
        default=None, metadata={"idle_without": "num_experts"}
    )
    """Factor of the chosen experts' shares."""
    moe_router_num_groups: int | None = field(
        default=None, metadata={"idle_without": "num_experts"}
    )
    """Groups of experts, of which --moe-router-group-topk are chosen first."""
    moe_router_group_topk: int | None = field(
        default=None, metadata={"idle_without": "num_experts"}
    )
    """Groups of experts that each token goes to."""
    recompute_granularity: Literal["full", "selective"] | None = None
    """Recompute activations in the backward pass: whole layers, or --recompute-modules only."""
    recompute_modules: tuple[str, ...] = field(
        default=("core_attn",), metadata={"idle_without": "recompute_granularity=selective"}
    )
    """Parts that --recompute-granularity selective recomputes: any of core_attn, layernorm, mlp,
    moe, shared_experts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, 1, None, "make_vocab_size_divisible_by")
        check_range(self, 1, None, "moe_router_num_groups", "moe_router_group_topk")
        for name in _ABOVE_ZERO:
            if getattr(self, name) is not None and not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{flag_of(name)} must be above 0, but is {getattr(self, name)}")
        self._check_recompute_modules()
        if self.window_rotary_base is not None and not self.window_size:
            raise ValueError("--window-rotary-base needs --window-size; pass it")
        if self.add_proj_bias and not self.add_qkv_bias:
            raise ValueError("--add-proj-bias needs --add-qkv-bias; pass it")
        if self.qk_layernorm_over_heads and not self.qk_layernorm:
            raise ValueError("--qk-layernorm-over-heads needs --qk-layernorm; pass it")
        if self.moe_router_enable_expert_bias and self.moe_router_score_function != "sigmoid":
            raise ValueError(
                "--moe-router-enable-expert-bias needs --moe-router-score-function sigmoid; pass it"
            )
        if (self.moe_router_num_groups is None) != (self.moe_router_group_topk is None):
            raise ValueError(
                "--moe-router-num-groups and --moe-router-group-topk belong together; pass both"
            )
        if self.moe_shared_expert_gate and self.moe_shared_expert_intermediate_size is None:
            raise ValueError(
                "--moe-shared-expert-gate needs --moe-shared-expert-intermediate-size; pass it"
            )

    def _check_recompute_modules(self) -> None:
        chosen = self.recompute_modules
        if chosen == ("core_attn",):
            return
        needs = {
            "core_attn": True,
            "layernorm": True,
            "mlp": 0 in self.moe_layer_freq or self.num_experts is None,
            "moe": self.num_experts is not None,
            "shared_experts": self.moe_shared_expert_intermediate_size is not None,
        }
        for name in chosen:
            if name not in needs:
                raise ValueError(
                    f"--recompute-modules knows {', '.join(needs)}, but not {name}; leave it out"
                )
            if not needs[name]:
                raise ValueError(
                    f"--recompute-modules {name} is of no layer of this model; leave it out"
                )
        if "mlp" in chosen and not self.disable_bias_linear:
            # megatron-core returns the bias from the recomputed part, which autograd then takes for
            # a result of it: the backward pass never ends.
            raise ValueError("--recompute-modules mlp needs --disable-bias-linear; leave mlp out")
        if self.recompute_granularity != "selective":
            raise ValueError("--recompute-modules needs --recompute-granularity selective; pass it")

    def refused_kernels(self) -> dict[str, str]:
        """Returns why the fused kernels that do not compute this model do not, by their option."""
        why = {}
        if not self.swiglu:
            why["bias_swiglu_fusion"] = "needs --swiglu; drop it"
        elif self.activation_func_clamp_value is not None or self.glu_linear_offset:
            why["bias_swiglu_fusion"] = (
                "leaves out --activation-func-clamp-value and --glu-linear-offset; drop it"
            )
        elif self.num_experts is not None and not self.disable_bias_linear:
            why["bias_swiglu_fusion"] = "of experts needs --disable-bias-linear; drop it"
        if self.final_logit_softcapping is not None or self.logits_scaling != 1:
            why["cross_entropy_loss_fusion"] = (
                "leaves out --final-logit-softcapping and --logits-scaling; drop it"
            )
        if self.num_experts is None:
            why["moe_grouped_gemm"] = why["moe_permute_fusion"] = "needs --num-experts; drop it"
        return why
