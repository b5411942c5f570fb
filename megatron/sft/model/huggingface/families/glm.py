"""pure. GLM-4-0414 and Z1 (dense), and GLM-4.5 to 4.7 (experts)."""

from __future__ import annotations

from typing import Any

from megatron.sft.model.huggingface.families.config_fields import ConfigFields
from megatron.sft.model.huggingface.families.family import Family
from megatron.sft.model.huggingface.families.fused import GATE_UP
from megatron.sft.model.huggingface.families.mixture import (
    grouped_router,
    grouped_router_config,
    num_experts,
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
    num_layers = config.number("num_hidden_layers")
    first = config.get("first_k_dense_replace", 1)
    has_experts = tuple(int(layer >= first) for layer in range(num_layers))
    width = config.number("moe_intermediate_size")
    num_shared = config.get("n_shared_experts", 1)
    normalises = bool(config.get("norm_topk_prob", True))
    if not normalises and config.number("num_experts_per_tok") > 1:
        config.require("norm_topk_prob", True)
    if not any(has_experts):
        raise ValueError(
            f"{config.where} leaves no layer with experts; check first_k_dense_replace {first}"
        )
    return {
        "add_qkv_bias": bool(config.get("attention_bias", False)),
        "qk_layernorm": bool(config.get("use_qk_norm", False)),
        **num_experts(config, "n_routed_experts", "num_local_experts"),
        "moe_ffn_hidden_size": width,
        "moe_layer_freq": () if all(has_experts) else has_experts,
        "moe_shared_expert_intermediate_size": num_shared * width or None,
        **grouped_router(config),
        "moe_router_pre_softmax": not normalises,
    }


def _moe_config(model: ModelConfig) -> dict[str, Any]:
    width = model.moe_ffn_hidden_size or model.resolved_ffn_hidden_size
    return {
        "attention_bias": model.add_qkv_bias,
        "partial_rotary_factor": model.rotary_percent,
        "use_qk_norm": model.qk_layernorm,
        "n_routed_experts": model.num_experts or 1,
        "num_experts_per_tok": model.moe_router_topk,
        "moe_intermediate_size": width,
        "first_k_dense_replace": model.moe_layer_freq.count(0),
        "n_shared_experts": (model.moe_shared_expert_intermediate_size or 0) // width,
        "norm_topk_prob": not model.moe_router_pre_softmax,
        **grouped_router_config(model),
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
    names=((".shared_expert.", ".shared_experts."),),
    carries_further_layers=True,
)
