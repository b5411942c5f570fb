"""pure. Seed-OSS."""

from __future__ import annotations

from typing import Any

from megatron.sft.model.huggingface.families.config_fields import ConfigFields
from megatron.sft.model.huggingface.families.family import Family
from megatron.sft.options.model import ModelConfig


def _options(config: ConfigFields) -> dict[str, Any]:
    if config.get("mlp_bias"):
        config.require("attention_out_bias", True)
    if config.get("attention_out_bias"):
        config.require("attention_bias", True, default=True)
    if config.get("mlp_bias"):
        return {"disable_bias_linear": False}
    return {
        "add_qkv_bias": bool(config.get("attention_bias", True)),
        "add_proj_bias": bool(config.get("attention_out_bias")),
    }


def _config(model: ModelConfig) -> dict[str, Any]:
    is_biased = not model.disable_bias_linear
    return {
        "attention_bias": model.add_qkv_bias or is_biased,
        "attention_out_bias": model.add_proj_bias or is_biased,
        "mlp_bias": is_biased,
    }


SEED_OSS = Family(
    model_type="seed_oss",
    architecture="SeedOssForCausalLM",
    head_dim=128,
    defaults={"attention_dropout": 0.1, "residual_dropout": 0.1},
    residual_dropout="residual_dropout",
    options=_options,
    config=_config,
)
