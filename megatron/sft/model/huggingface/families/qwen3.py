"""pure. Qwen3, dense and with experts."""

from __future__ import annotations

from typing import Any

from megatron.sft.model.huggingface.families.biases import (
    attention_biases,
    attention_biases_config,
)
from megatron.sft.model.huggingface.families.config_fields import ConfigFields
from megatron.sft.model.huggingface.families.family import Family
from megatron.sft.model.huggingface.families.mixture import qwen_experts, qwen_experts_config
from megatron.sft.model.huggingface.families.qwen2 import (
    switched_windows,
    switched_windows_config,
)
from megatron.sft.options.model import ModelConfig


def _options(config: ConfigFields) -> dict[str, Any]:
    return {"qk_layernorm": True, **attention_biases(config), **switched_windows(config)}


def _config(model: ModelConfig) -> dict[str, Any]:
    return attention_biases_config(model) | switched_windows_config(model)


def _moe_options(config: ConfigFields) -> dict[str, Any]:
    window = config.values.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    return {
        "qk_layernorm": True,
        **attention_biases(config),
        **qwen_experts(config, "num_local_experts"),
        **config.windows(window, (1,)),  # of all layers, whatever other keys say
    }


def _moe_config(model: ModelConfig) -> dict[str, Any]:
    return {
        **attention_biases_config(model),
        **qwen_experts_config(model),
        **switched_windows_config(model),
    }


QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    head_dim=128,
    options=_options,
    config=_config,
)
QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    options=_moe_options,
    config=_moe_config,
    has_router_loss=True,
)
