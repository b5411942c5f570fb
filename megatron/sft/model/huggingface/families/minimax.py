"""pure. MiniMax-M2 to 2.7."""

from __future__ import annotations

from typing import Any

from megatron.sft.model.huggingface.families.config_fields import ConfigFields
from megatron.sft.model.huggingface.families.family import Family
from megatron.sft.model.huggingface.families.mixture import (
    BLOCK_SPARSE_NAMES,
    num_experts,
    sigmoid_router,
)
from megatron.sft.options.model import ModelConfig


def _options(config: ConfigFields) -> dict[str, Any]:
    head_dim = config.number("head_dim", 128)
    percent = {}
    share = config.rope().get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if share is None and config.get("rotary_dim") is not None:
        percent = {"rotary_percent": min(config.number("rotary_dim"), head_dim) / head_dim}
    return {
        **num_experts(config, "num_local_experts", "num_experts"),
        "moe_ffn_hidden_size": config.number("intermediate_size"),
        "qk_layernorm": True,
        "qk_layernorm_over_heads": True,
        **sigmoid_router(),
        **percent,
    }


def _config(model: ModelConfig) -> dict[str, Any]:
    return {
        "num_local_experts": model.num_experts or 1,
        "num_experts_per_tok": model.moe_router_topk,
        "intermediate_size": model.moe_ffn_hidden_size or model.resolved_ffn_hidden_size,
        "rotary_dim": int(model.resolved_kv_channels * model.rotary_percent),
    }


MINIMAX_M2 = Family(
    model_type="minimax_m2",
    architecture="MiniMaxM2ForCausalLM",
    rope_theta=5e6,
    head_dim=128,
    partial_rotary_factor=1.0,
    options=_options,
    config=_config,
    unsupported=("router_jitter_noise",),
    has_router_loss=True,
    names=BLOCK_SPARSE_NAMES,
    carries_further_layers=True,
)
