"""pure. DeepSeek-V2-Lite, V3, V3.1 and R1, Kimi K2, and Moonlight."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.sft.model.huggingface.families.config_fields import ConfigFields
from megatron.sft.model.huggingface.families.family import Family
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
from megatron.sft.options.model import ModelConfig


def _options(config: ConfigFields) -> dict[str, Any]:
    return {
        **latent_options(config),
        **dense_first_experts(config),
        **grouped_router(config),
    }


def _config(model: ModelConfig) -> dict[str, Any]:
    return {
        **latent_config(model),
        **dense_first_experts_config(model),
        **grouped_router_config(model),
    }


def _v2_options(config: ConfigFields) -> dict[str, Any]:
    config.require("topk_method", "greedy", default="greedy")
    scale = config.positive("routed_scaling_factor", 1.0)
    return {
        **latent_options(config),
        **dense_first_experts(config),
        "moe_router_pre_softmax": True,
        "moe_router_topk_scaling_factor": None if scale == 1.0 else scale,
    }


def _v2_config(model: ModelConfig) -> dict[str, Any]:
    return {
        **latent_config(model),
        **dense_first_experts_config(model),
        "topk_method": "greedy",
        "routed_scaling_factor": model.moe_router_topk_scaling_factor or 1.0,
        "norm_topk_prob": False,
    }


DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    needs_key_value_heads=False,
    unsupported=("attention_bias",),
    defaults={
        **LATENT_DEFAULTS,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5,
    },
    run_defaults={"moe_router_dtype": "fp32"},
    options=_options,
    config=_config,
    rows=LATENT_ROWS,
    names=SHARED_NAMES,
    carries_further_layers=True,
)
DEEPSEEK_V2 = replace(
    DEEPSEEK_V3,
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    unsupported=("attention_bias", "mlp_bias"),
    defaults={
        **LATENT_DEFAULTS,
        "n_routed_experts": 64,
        "moe_intermediate_size": 1407,
        "n_shared_experts": 2,
    },
    options=_v2_options,
    config=_v2_config,
)
