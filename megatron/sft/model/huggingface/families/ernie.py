"""pure. ERNIE 4.5, dense."""

from __future__ import annotations

from typing import Any

from megatron.sft.model.huggingface.families.config_fields import ConfigFields
from megatron.sft.model.huggingface.families.family import Family
from megatron.sft.options.model import ModelConfig


def _options(config: ConfigFields) -> dict[str, Any]:
    return {"disable_bias_linear": not config.get("use_bias"), "rotary_interleaved": True}


def _config(model: ModelConfig) -> dict[str, Any]:
    return {"use_bias": not model.disable_bias_linear}


ERNIE4_5 = Family(
    model_type="ernie4_5",
    architecture="Ernie4_5ForCausalLM",
    norm_epsilon=1e-5,
    rope_theta=5e5,
    head_dim=128,
    reads_attention_dropout=False,
    ties_embeddings=True,
    options=_options,
    config=_config,
)
