"""pure. OLMo 2 and 3: norms behind attention and MLP, and over all heads of queries and keys."""

from __future__ import annotations

from typing import Any

from megatron.sft.model.huggingface.families.biases import (
    attention_biases,
    attention_biases_config,
)
from megatron.sft.model.huggingface.families.config_fields import (
    ConfigFields,
    rope_fields,
    windows_config,
)
from megatron.sft.model.huggingface.families.family import Family
from megatron.sft.options.model import ModelConfig

_BASE = 5e5
_NORMS = {"norm_position": "behind", "qk_layernorm": True, "qk_layernorm_over_heads": True}


def _options3(config: ConfigFields) -> dict[str, Any]:
    kinds = config.layers("layer_types", "sliding_attention")
    windows = config.windows(
        config.values.get("sliding_window", 4096), config.every(4) if kinds is None else kinds
    )
    # transformers takes rope_theta for layers that see all tokens alone.
    ropes = config.rope_per_kind(_BASE, _BASE)
    if not windows:
        ropes["window_rotary_base"] = None
    return {
        **_NORMS,
        **attention_biases(config),
        **windows,
        **ropes,
    }


def _config3(model: ModelConfig) -> dict[str, Any]:
    scaling = rope_fields(model)
    local = model.window_rotary_base or model.rotary_base
    return (
        windows_config(model)
        | attention_biases_config(model)
        | {
            "rope_parameters": {
                "full_attention": scaling | {"rope_theta": model.rotary_base},
                "sliding_attention": {"rope_type": "default", "rope_theta": local},
            }
        }
    )


OLMO2 = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    norm_epsilon=1e-5,
    needs_key_value_heads=False,
    options=lambda config: _NORMS | attention_biases(config),
    config=attention_biases_config,
)
OLMO3 = Family(
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    norm_epsilon=1e-5,
    rope_theta=5e5,
    needs_key_value_heads=False,
    options=_options3,
    config=_config3,
)
