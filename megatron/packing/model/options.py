"""pure. Options that decide what a model computes, as options under Megatron's names where it has
them.

An option that megatron-core's TransformerConfig has under the same name needs nothing else (see
`architecture`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from megatron.packing.layers import EACH_LAYER
from megatron.packing.model.shape import ModelShape
from megatron.packing.rules import Rule, above_zero, at_least, belong_together, needs

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
_DEFAULT_RECOMPUTED = ("core_attn",)
_NEEDS_EXPERTS = Rule(
    lambda options: options.num_experts is None, "needs {num_experts.flag}", "drop it"
)


def _recomputable(options: Any) -> dict[str, bool]:
    """Returns whether any layer has each of megatron-core's parts that may be recomputed."""
    return {
        "core_attn": True,
        "layernorm": True,
        "mlp": 0 in options.moe_layer_freq or options.num_experts is None,
        "moe": options.num_experts is not None,
        "shared_experts": options.moe_shared_expert_intermediate_size is not None,
    }


def _unknown_recomputed_module(options: Any) -> dict[str, str]:
    known = _recomputable(options)
    unknown = [name for name in options.recompute_modules if name not in known]
    return {"module": unknown[0], "known": ", ".join(known)} if unknown else {}


def _absent_recomputed_module(options: Any) -> dict[str, str]:
    known = _recomputable(options)
    absent = [name for name in options.recompute_modules if not known[name]]
    return {"module": absent[0]} if absent else {}


def _unsupported_branches(options: Any) -> dict[str, str]:
    reasons = {
        "needs experts in all layers": 0 in options.moe_layer_freq,
        "needs norms before and behind (norm_position both)": options.norm_position != "both",
        "is not supported with a gate of the shared expert": options.moe_shared_expert_gate,
        "needs shares of a softmax": options.moe_router_score_function != "softmax",
        "is not supported with biases": not options.disable_bias_linear,
        "is not supported with multi-token prediction": options.mtp_num_layers is not None,
    }
    broken = [reason for reason, holds in reasons.items() if holds]
    return {"reason": broken[0]} if options.moe_branch_norms and broken else {}


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
    value_layernorm: bool = False
    """Norms of values, which have no weights."""
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
    layer_scalar: bool = False
    """Multiply the residual stream behind each layer by a number of the layer's, which is not
    trained.
    """
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
    moe_branch_norms: bool = False
    """Give the shared expert and the routed ones norms of their own, before and behind, and the
    router the layer's input, normed and scaled, and a factor per expert.
    """
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
        default=_DEFAULT_RECOMPUTED,
        metadata={"idle_without": "recompute_granularity=selective"},
    )
    """Parts that --recompute-granularity selective recomputes: any of core_attn, layernorm, mlp,
    moe, shared_experts."""

    rules: ClassVar[tuple[Rule, ...]] = (
        *at_least(1, "make_vocab_size_divisible_by"),
        *at_least(1, "moe_router_num_groups", "moe_router_group_topk"),
        *above_zero(*_ABOVE_ZERO),
        Rule(
            when=_unknown_recomputed_module,
            why="{recompute_modules.flag} knows {known}, but not {module}",
            way_out="leave it out",
        ),
        Rule(
            when=_absent_recomputed_module,
            why="{recompute_modules.flag} {module} is of no layer of this model",
            way_out="leave it out",
        ),
        # megatron-core returns the bias from the recomputed part, which autograd then takes for a
        # result of it: the backward pass never ends.
        Rule(
            when=lambda options: (
                "mlp" in options.recompute_modules and not options.disable_bias_linear
            ),
            why="{recompute_modules.flag} mlp needs {disable_bias_linear.flag}",
            way_out="leave mlp out",
        ),
        Rule(
            when=lambda options: (
                options.recompute_modules != _DEFAULT_RECOMPUTED
                and options.recompute_granularity != "selective"
            ),
            why="{recompute_modules.flag} needs {recompute_granularity.flag} selective",
            way_out="pass it",
        ),
        *needs("window_rotary_base", "window_size"),
        *needs("add_proj_bias", "add_qkv_bias"),
        *needs("qk_layernorm_over_heads", "qk_layernorm"),
        Rule(
            when=lambda options: (
                options.moe_router_enable_expert_bias
                and options.moe_router_score_function != "sigmoid"
            ),
            why="{moe_router_enable_expert_bias.flag} needs {moe_router_score_function.flag} "
            "sigmoid",
            way_out="pass it",
        ),
        belong_together("moe_router_num_groups", "moe_router_group_topk", "pass both"),
        *needs("moe_shared_expert_gate", "moe_shared_expert_intermediate_size"),
        *needs("moe_branch_norms", "moe_shared_expert_intermediate_size"),
        Rule(
            when=_unsupported_branches,
            why="{moe_branch_norms.flag} {reason}",
            way_out="drop it, or change that",
        ),
    )
    kernel_rules: ClassVar[Mapping[str, tuple[Rule, ...]]] = {
        "bias_swiglu_fusion": (
            Rule(lambda options: not options.swiglu, "needs {swiglu.flag}", "drop it"),
            Rule(
                when=lambda options: (
                    options.activation_func_clamp_value is not None or options.glu_linear_offset
                ),
                why="leaves out {activation_func_clamp_value.flag} and {glu_linear_offset.flag}",
                way_out="drop it",
            ),
            Rule(
                when=lambda options: (
                    options.num_experts is not None and not options.disable_bias_linear
                ),
                why="of experts needs {disable_bias_linear.flag}",
                way_out="drop it",
            ),
        ),
        "cross_entropy_loss_fusion": (
            Rule(
                when=lambda options: (
                    options.final_logit_softcapping is not None or options.logits_scaling != 1
                ),
                why="leaves out {final_logit_softcapping.flag} and {logits_scaling.flag}",
                way_out="drop it",
            ),
        ),
        "moe_grouped_gemm": (_NEEDS_EXPERTS,),
        "moe_permute_fusion": (_NEEDS_EXPERTS,),
    }
    """Fused kernel -> rules under which it does not compute the model; `why` goes on behind its
    flag.
    """

    def refused_kernels(self) -> dict[str, str]:
        """Returns why the fused kernels that do not compute this model do not, by their option."""
        return refused_kernels(self.kernel_rules, self)


def refused_kernels(rules: Mapping[str, tuple[Rule, ...]], options: object) -> dict[str, str]:
    """Returns why kernels are refused, by their option.

    rules: as those of `Architecture.kernel_rules`.
    """
    known = {"options": options}
    return {
        kernel: why
        for kernel, of_kernel in rules.items()
        if (why := next(filter(None, (rule.refusal(known) for rule in of_kernel)), None))
    }
