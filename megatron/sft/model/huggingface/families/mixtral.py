"""pure. Mixtral."""

from __future__ import annotations

from typing import Any

from megatron.sft.model.huggingface.families.config_fields import ConfigFields
from megatron.sft.model.huggingface.families.family import Family
from megatron.sft.model.huggingface.families.mixture import BLOCK_SPARSE_NAMES, num_experts
from megatron.sft.options.model import ModelConfig


def _options(config: ConfigFields) -> dict[str, Any]:
    return {
        **num_experts(config, "num_local_experts", "num_experts"),
        "moe_router_pre_softmax": False,
        "moe_ffn_hidden_size": config.number("intermediate_size"),
        **config.windows(config.get("sliding_window"), (1,)),
    }


def _config(model: ModelConfig) -> dict[str, Any]:
    return {
        "sliding_window": model.window_size[0] + 1 if model.window_size else None,
        "num_local_experts": model.num_experts or 1,
        "num_experts_per_tok": model.moe_router_topk,
        "intermediate_size": model.moe_ffn_hidden_size or model.resolved_ffn_hidden_size,
    }


MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    norm_epsilon=1e-5,
    rope_theta=1e6,
    options=_options,
    config=_config,
    unsupported=("router_jitter_noise",),
    has_router_loss=True,
    names=BLOCK_SPARSE_NAMES,
)
