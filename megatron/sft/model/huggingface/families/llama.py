"""pure. Llama 2 to 3.3, and what is saved under its name."""

from __future__ import annotations

from typing import Any

from megatron.sft.model.huggingface.families.config_fields import ConfigFields
from megatron.sft.model.huggingface.families.family import Family
from megatron.sft.options.model import ModelConfig


def biases(config: ConfigFields) -> dict[str, Any]:
    """Returns whether all linear layers have biases, or none; ValueError where some have."""
    attention, mlp = bool(config.get("attention_bias")), bool(config.get("mlp_bias"))
    if attention != mlp:
        # megatron-core has no switch for those of attention or MLP alone.
        raise ValueError(
            f"{config.where} has biases in attention or MLP alone; attention_bias and mlp_bias "
            "must be equal"
        )
    return {"disable_bias_linear": not attention}


def biases_config(model: ModelConfig) -> dict[str, Any]:
    """Returns the keys of config.json that say the same."""
    return dict.fromkeys(("attention_bias", "mlp_bias"), not model.disable_bias_linear)


LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    needs_key_value_heads=False,
    has_attention_bias=True,
    options=biases,
    config=biases_config,
)
