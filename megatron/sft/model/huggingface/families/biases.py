"""pure. Biases of linear layers, as several families switch them."""

from __future__ import annotations

from typing import Any

from megatron.sft.model.huggingface.families.config_fields import ConfigFields
from megatron.sft.options.model import ModelConfig


def attention_biases(config: ConfigFields) -> dict[str, Any]:
    """Returns the options of `attention_bias`, which is of queries, keys, values and output."""
    has_biases = bool(config.get("attention_bias"))
    return {"add_qkv_bias": has_biases, "add_proj_bias": has_biases}


def attention_biases_config(model: ModelConfig) -> dict[str, Any]:
    """Returns the keys of config.json that say the same."""
    return {"attention_bias": model.add_qkv_bias and model.add_proj_bias}


def biases(config: ConfigFields) -> dict[str, Any]:
    """Returns the options of `attention_bias` and `mlp_bias`; ValueError for biases of the MLP
    alone.
    """
    if not config.get("mlp_bias"):
        return attention_biases(config)
    if not config.get("attention_bias"):
        # megatron-core has one switch for all layers, and others for those of attention.
        raise ValueError(
            f"{config.where} has mlp_bias without attention_bias, which is not supported"
        )
    return {"disable_bias_linear": False}


def biases_config(model: ModelConfig) -> dict[str, Any]:
    """Returns the keys of config.json that say the same."""
    if not model.disable_bias_linear:
        return {"attention_bias": True, "mlp_bias": True}
    return attention_biases_config(model) | {"mlp_bias": False}
