"""pure. Qwen3, dense and with experts."""

from __future__ import annotations

from typing import Any

from megatron.sft.model.huggingface.families.config_fields import ConfigFields
from megatron.sft.model.huggingface.families.family import Family
from megatron.sft.model.huggingface.families.mixture import qwen_experts, qwen_experts_config
from megatron.sft.model.huggingface.families.qwen2 import (
    switched_windows,
    switched_windows_config,
)
from megatron.sft.options.model import ModelConfig


def _moe_options(config: ConfigFields) -> dict[str, Any]:
    return {"qk_layernorm": True, **qwen_experts(config), **switched_windows(config)}


def _moe_config(model: ModelConfig) -> dict[str, Any]:
    return qwen_experts_config(model) | switched_windows_config(model)


QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    head_dim=128,
    options=lambda config: {"qk_layernorm": True, **switched_windows(config)},
    config=switched_windows_config,
)
QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    options=_moe_options,
    config=_moe_config,
)
