"""pure. Qwen3-Next, and Qwen3.5 to 3.8 (dense and with experts): most layers mix tokens by a gated
delta net, the others have a gate on the attention's output.
"""

from __future__ import annotations

from typing import Any

from megatron.packing.model.parts import attention
from megatron.packing.model.parts.delta_net import DeltaNet
from megatron.sft.model.huggingface.families.config_fields import ConfigFields
from megatron.sft.model.huggingface.families.family import Family, Prefix
from megatron.sft.model.huggingface.families.mixture import (
    num_experts,
    qwen_experts,
    qwen_experts_config,
)
from megatron.sft.model.huggingface.rows import Row, Sizes, Source, alternating, joined
from megatron.sft.options.model import ModelConfig

_NET = {parameter.name: parameter for parameter in DeltaNet.parameters}


def _gated_queries(sizes: Sizes) -> tuple[Source, ...]:
    """Queries and gates alternate by head in q_proj."""
    head, columns = sizes["head"], (sizes["hidden"],)
    both = alternating(head, head, groups=sizes["query_heads"], columns=columns)
    return (*both, Source(), Source())


def _three_projections(sizes: Sizes) -> tuple[Source, ...]:
    key, value = sizes["dn_key"], sizes["dn_value"]
    return (*joined(key, key, value, columns=(sizes["hidden"],)), Source(), Source(), Source())


def _two_projections(sizes: Sizes) -> tuple[Source, ...]:
    """Qwen3-Next: for each key head its query, its key, values and gates of its value heads; and
    betas and alphas of them.
    """
    groups, columns = sizes["dn_key_heads"], (sizes["hidden"],)
    key, value = sizes["dn_key"] // groups, sizes["dn_value"] // groups
    heads = sizes["dn_value_heads"] // groups
    return (
        *alternating(key, key, value, value, groups=groups, columns=columns),
        *alternating(heads, heads, groups=groups, columns=columns),
    )


def _convolution(sizes: Sizes) -> tuple[Source, ...]:
    key, value = sizes["dn_key"], sizes["dn_value"]
    return joined(key, key, value, columns=(1, sizes["dn_kernel"]))


_QKV = Row.of(
    attention.GATED_QKV,
    (
        *("self_attn.q_proj.weight",) * 2,
        "self_attn.k_proj.weight",
        "self_attn.v_proj.weight",
    ),
    _gated_queries,
)
_OTHERS = (
    Row.of(_NET["delta_net.conv1d.weight"], ("linear_attn.conv1d.weight",) * 3, _convolution),
    Row.of(_NET["delta_net.A_log"], ("linear_attn.A_log",)),
    Row.of(_NET["delta_net.dt_bias"], ("linear_attn.dt_bias",)),
    Row.of(_NET["delta_net.out_norm.weight"], ("linear_attn.norm.weight",)),
    Row.of(_NET["delta_net.out_proj.weight"], ("linear_attn.out_proj.weight",)),
)
_ROWS_NEXT = (
    _QKV,
    Row.of(
        _NET["delta_net.in_proj.weight"],
        (
            *("linear_attn.in_proj_qkvz.weight",) * 4,
            *("linear_attn.in_proj_ba.weight",) * 2,
        ),
        _two_projections,
    ),
    *_OTHERS,
)
_ROWS = (
    _QKV,
    Row.of(
        _NET["delta_net.in_proj.weight"],
        (
            *("linear_attn.in_proj_qkv.weight",) * 3,
            "linear_attn.in_proj_z.weight",
            "linear_attn.in_proj_b.weight",
            "linear_attn.in_proj_a.weight",
        ),
        _three_projections,
    ),
    *_OTHERS,
)
# transformers has megatron-core's names for the sizes of a delta net.
_SIZES = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}


def _options(config: ConfigFields) -> dict[str, Any]:
    is_linear = config.layers("layer_types", "linear_attention")
    if is_linear is None:
        is_linear = config.every(config.number("full_attention_interval", 4))
    return {
        "qk_layernorm": True,
        "apply_layernorm_1p": True,
        "attention_output_gate": True,
        "linear_attention_freq": is_linear if any(is_linear) else (),
        **{name: config.number(name) for name in _SIZES},
    }


def _config(model: ModelConfig) -> dict[str, Any]:
    linear = model.linear_attention_freq or (0,) * model.num_layers
    return {
        "layer_types": ["linear_attention" if one else "full_attention" for one in linear],
        "partial_rotary_factor": model.rotary_percent,
        **{name: getattr(model, name) or 1 for name in _SIZES},
    }


def _shared(config: ConfigFields) -> dict[str, Any]:
    return {
        "moe_shared_expert_gate": True,
        "moe_shared_expert_intermediate_size": config.number("shared_expert_intermediate_size"),
    }


def _moe_options(config: ConfigFields) -> dict[str, Any]:
    return {
        **_options(config),
        **num_experts(config, "num_experts"),
        **_shared(config),
        "moe_router_pre_softmax": False,
        "moe_ffn_hidden_size": config.number("moe_intermediate_size"),
    }


def _next_options(config: ConfigFields) -> dict[str, Any]:
    config = ConfigFields({"norm_topk_prob": True, **config.values}, config.where)
    return {**_options(config), **qwen_experts(config), **_shared(config)}


def _moe_config(model: ModelConfig) -> dict[str, Any]:
    shared = model.moe_shared_expert_intermediate_size or 1
    return {
        **_config(model),
        **qwen_experts_config(model),
        "shared_expert_intermediate_size": shared,
    }


_PREFIX = Prefix("model.language_model.", "lm_head.")
QWEN3_NEXT = Family(
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    head_dim=256,
    partial_rotary_factor=0.25,
    unsupported=("attention_bias",),
    defaults=_SIZES,
    options=_next_options,
    has_router_loss=True,
    config=_moe_config,
    rows=_ROWS_NEXT,
    carried=("mtp.",),
)
QWEN3_5 = Family(
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    head_dim=256,
    partial_rotary_factor=0.25,
    unsupported=("attention_bias",),
    defaults=_SIZES,
    options=_options,
    config=_config,
    rows=_ROWS,
    carried=("mtp.", "model.visual."),
    within={"qwen3_5": _PREFIX},
)
QWEN3_5_MOE = Family(
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    head_dim=256,
    partial_rotary_factor=0.25,
    unsupported=("attention_bias",),
    defaults=_SIZES,
    options=_moe_options,
    has_router_loss=True,
    config=_moe_config,
    rows=_ROWS,
    carried=("mtp.", "model.visual."),
    within={"qwen3_5_moe": _PREFIX},
)
