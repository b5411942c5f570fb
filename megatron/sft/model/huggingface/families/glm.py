"""pure. GLM-4-0414, Z1 (dense), GLM-4.5 to 4.7 (experts), GLM-4.7-Flash (latent attention)."""

from __future__ import annotations

from typing import Any

from megatron.packing.quoting import shown
from megatron.sft.model.huggingface.families.config_fields import ConfigFields
from megatron.sft.model.huggingface.families.family import Family
from megatron.sft.model.huggingface.families.fused import GATE_UP
from megatron.sft.model.huggingface.families.latent import (
    LATENT_DEFAULTS,
    LATENT_ROWS,
    latent_config,
    latent_options,
)
from megatron.sft.model.huggingface.families.mixture import (
    SHARED_NAMES,
    dense_first_experts,
    dense_first_experts_config,
    grouped_router,
    grouped_router_config,
)
from megatron.sft.model.huggingface.rows import Row
from megatron.sft.options.model import ModelConfig


def _options(config: ConfigFields) -> dict[str, Any]:
    return {
        "add_qkv_bias": config.get("attention_bias", True),
        "rotary_interleaved": True,
        "norm_position": "both",
    }


def _config(model: ModelConfig) -> dict[str, Any]:
    return {
        "attention_bias": model.add_qkv_bias,
        "partial_rotary_factor": model.rotary_percent,
    }


def _moe_options(config: ConfigFields) -> dict[str, Any]:
    config = ConfigFields({"first_k_dense_replace": 1, **config.values}, config.where)
    return {
        "add_qkv_bias": bool(config.get("attention_bias", False)),
        "qk_layernorm": bool(config.get("use_qk_norm", False)),
        **dense_first_experts(config),
        **grouped_router(config),
    }


def _moe_config(model: ModelConfig) -> dict[str, Any]:
    return {
        "attention_bias": model.add_qkv_bias,
        "partial_rotary_factor": model.rotary_percent,
        "use_qk_norm": model.qk_layernorm,
        **dense_first_experts_config(model),
        **grouped_router_config(model),
    }


def _lite_options(config: ConfigFields) -> dict[str, Any]:
    # transformers' class does not read first_k_dense_replace, which files have, too
    for share in (config.rope().get("partial_rotary_factor"), config.get("partial_rotary_factor")):
        if share not in (None, 1):  # of qk_rope_head_dim, in transformers
            raise ValueError(
                f"{config.where} has partial_rotary_factor {shown(share)}, but only 1 is supported "
                "for this model_type"
            )
    dense_first = (0,) + (1,) * (config.number("num_hidden_layers") - 1)
    has_experts = config.layers("mlp_layer_types", "sparse") or dense_first
    return {
        **latent_options(config),
        **dense_first_experts(config, has_experts),
        **grouped_router(config),
    }


def _lite_config(model: ModelConfig) -> dict[str, Any]:
    has_experts = model.moe_layer_freq or (1,) * model.num_layers
    return {
        **latent_config(model),
        **dense_first_experts_config(model),
        **grouped_router_config(model),
        "mlp_layer_types": ["sparse" if one else "dense" for one in has_experts],
    }


GLM4 = Family(
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    norm_epsilon=1.5625e-07,
    head_dim=128,
    partial_rotary_factor=0.5,
    options=_options,
    config=_config,
    rows=(
        Row(
            "mixer_norm_behind.weight",
            "whole",
            ("hidden",),
            ("post_self_attn_layernorm.weight",),
        ),
        Row("mlp_norm_behind.weight", "whole", ("hidden",), ("post_mlp_layernorm.weight",)),
        GATE_UP,
    ),
)
GLM4_MOE = Family(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    norm_epsilon=1e-5,
    partial_rotary_factor=0.5,
    run_defaults={"moe_router_dtype": "fp32"},
    options=_moe_options,
    config=_moe_config,
    names=SHARED_NAMES,
    carries_further_layers=True,
)
GLM4_MOE_LITE = Family(
    model_type="glm4_moe_lite",
    architecture="Glm4MoeLiteForCausalLM",
    norm_epsilon=1e-5,
    unsupported=("attention_bias",),
    run_defaults={"moe_router_dtype": "fp32"},
    defaults={
        **LATENT_DEFAULTS,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1536,
        "routed_scaling_factor": 1.8,
    },
    options=_lite_options,
    config=_lite_config,
    rows=LATENT_ROWS,
    names=SHARED_NAMES,
    carries_further_layers=True,
)
