"""pure. Mistral 7B to Small 3, whose first release attends to a window, and Ministral 3."""

from __future__ import annotations

from typing import Any

from megatron.sft.model.huggingface.families.config_fields import (
    ConfigFields,
    rope_fields,
    windows_config,
)
from megatron.sft.model.huggingface.families.family import Family, Prefix
from megatron.sft.options.model import ModelConfig

_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""Default of transformers' class."""
_WITHIN = {
    "mistral3": Prefix("language_model.model.", "language_model.lm_head.", "model.language_model.")
}


def _options(config: ConfigFields) -> dict[str, Any]:
    # Where there are layer_types, AutoConfig takes the class of Ministral, which reads them.
    return config.windows(config.values.get("sliding_window", 4096))


def _config(model: ModelConfig) -> dict[str, Any]:
    if model.window_attn_skip_freq:
        return windows_config(model)
    return {"sliding_window": model.window_size[0] + 1 if model.window_size else None}


def _ministral_options(config: ConfigFields) -> dict[str, Any]:
    config = config.with_rope(_ROPE)
    return {
        **config.rope_options(1e4),
        "query_scale_beta": config.rope().get("llama_4_scaling_beta"),
        **config.windows(config.values.get("sliding_window"), (1,)),
    }


def _ministral_config(model: ModelConfig) -> dict[str, Any]:
    rope = rope_fields(model) | {"llama_4_scaling_beta": model.query_scale_beta}
    return _config(model) | {"rope_scaling": rope}


MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    options=_options,
    config=_config,
    within=_WITHIN,
    ignored_within=("layer_types",),
)
MINISTRAL3 = Family(
    model_type="ministral3",
    architecture="Ministral3ForCausalLM",
    norm_epsilon=1e-5,
    head_dim=128,
    options=_ministral_options,
    config=_ministral_config,
    within=_WITHIN,
)
