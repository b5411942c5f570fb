"""pure. Seed-OSS."""

from __future__ import annotations

from typing import Any

from megatron.sft.model.huggingface.families.config_fields import ConfigFields
from megatron.sft.model.huggingface.families.family import Family
from megatron.sft.options.model import ModelConfig


def _options(config: ConfigFields) -> dict[str, Any]:
    config.refuse("attention_out_bias", "mlp_bias")
    return {"add_qkv_bias": config.get("attention_bias", True)}


def _config(model: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": model.add_qkv_bias, "attention_out_bias": False}


SEED_OSS = Family(
    model_type="seed_oss",
    architecture="SeedOssForCausalLM",
    head_dim=128,
    has_attention_bias=True,
    options=_options,
    config=_config,
)
