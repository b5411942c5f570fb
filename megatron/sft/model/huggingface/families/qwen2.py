"""pure. Qwen 1.5 to 2.5, dense and with experts."""

from __future__ import annotations

from typing import Any

from megatron.sft.model.huggingface.families.config_fields import ConfigFields, windows_config
from megatron.sft.model.huggingface.families.family import Family
from megatron.sft.model.huggingface.families.mixture import qwen_experts, qwen_experts_config
from megatron.sft.options.model import ModelConfig


def switched_windows(config: ConfigFields) -> dict[str, Any]:
    """Returns the windows of Qwen's layers, which only count where `use_sliding_window` says so."""
    if not config.get("use_sliding_window"):
        return {}
    num_layers, full = config.number("num_hidden_layers"), config.get("max_window_layers", 28)
    kinds = config.layers("layer_types", "sliding_attention")
    if kinds is None:
        kinds = tuple(int(layer >= full) for layer in range(num_layers))
    return config.windows(config.values.get("sliding_window", 4096), kinds)


def _alternating_windows(config: ConfigFields) -> dict[str, Any]:
    """Returns the windows of Qwen2-MoE: of every other of the first `max_window_layers` layers."""
    if not config.get("use_sliding_window"):
        return {}
    num_layers, first = config.number("num_hidden_layers"), config.get("max_window_layers", 28)
    kinds = config.layers("layer_types", "sliding_attention")
    if kinds is None:
        kinds = tuple(int(layer % 2 == 0 and layer < first) for layer in range(num_layers))
    return config.windows(config.values.get("sliding_window", 4096), kinds)


def switched_windows_config(model: ModelConfig) -> dict[str, Any]:
    """Returns the keys of config.json that say the same."""
    if not model.window_size:
        return {}
    return windows_config(model) | {"use_sliding_window": True}


def _moe_options(config: ConfigFields) -> dict[str, Any]:
    return {
        **qwen_experts(config),
        **_alternating_windows(config),
        "moe_shared_expert_gate": True,
        "moe_shared_expert_intermediate_size": config.number("shared_expert_intermediate_size"),
        "add_qkv_bias": config.get("qkv_bias", True),
    }


def _moe_config(model: ModelConfig) -> dict[str, Any]:
    shared = model.moe_shared_expert_intermediate_size or 1
    return {
        **qwen_experts_config(model),
        **switched_windows_config(model),
        "shared_expert_intermediate_size": shared,
    }


QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    options=lambda config: {"add_qkv_bias": True, **switched_windows(config)},
    config=switched_windows_config,
)
QWEN2_MOE = Family(
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    options=_moe_options,
    has_router_loss=True,
    config=_moe_config,
)
