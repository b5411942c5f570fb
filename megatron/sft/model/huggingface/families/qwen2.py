"""pure. Qwen 1.5 to 2.5, dense and with experts."""

from __future__ import annotations

from typing import Any

from megatron.sft.model.huggingface.families.config_fields import ConfigFields
from megatron.sft.model.huggingface.families.family import Family
from megatron.sft.model.huggingface.families.mixture import qwen_experts, qwen_experts_config
from megatron.sft.options.model import ModelConfig


def _moe_options(config: ConfigFields) -> dict[str, Any]:
    return {
        **qwen_experts(config),
        "moe_shared_expert_gate": True,
        "moe_shared_expert_intermediate_size": config.number("shared_expert_intermediate_size"),
        "add_qkv_bias": config.get("qkv_bias", True),
    }


def _moe_config(model: ModelConfig) -> dict[str, Any]:
    shared = model.moe_shared_expert_intermediate_size or 1
    return qwen_experts_config(model) | {"shared_expert_intermediate_size": shared}


QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    window=4096,
    has_window_switch=True,
    options=lambda _: {"add_qkv_bias": True},
)
QWEN2_MOE = Family(
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    window=4096,
    has_window_switch=True,
    options=_moe_options,
    config=_moe_config,
)
