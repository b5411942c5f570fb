"""pure. Granite 3 and 4, dense: Llama with four multipliers."""

from __future__ import annotations

from typing import Any

from megatron.sft.model.huggingface.families.biases import biases, biases_config
from megatron.sft.model.huggingface.families.config_fields import ConfigFields
from megatron.sft.model.huggingface.families.family import Family
from megatron.sft.options.model import ModelConfig

_SAME_NAMES = ("embedding_multiplier", "residual_multiplier", "logits_scaling")


def _options(config: ConfigFields) -> dict[str, Any]:
    return {
        **biases(config),
        **{name: config.positive(name, 1.0) for name in _SAME_NAMES},
        "softmax_scale": config.positive("attention_multiplier", 1.0),
    }


def _config(model: ModelConfig) -> dict[str, Any]:
    scale = model.softmax_scale or model.resolved_kv_channels**-0.5
    return {
        **biases_config(model),
        **{name: getattr(model, name) for name in _SAME_NAMES},
        "attention_multiplier": scale,
    }


GRANITE = Family(
    model_type="granite",
    architecture="GraniteForCausalLM",
    needs_key_value_heads=False,
    options=_options,
    config=_config,
)
