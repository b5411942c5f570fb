"""pure. Gemma 1, 2 and 3."""

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
from megatron.sft.model.huggingface.families.family import Family, Prefix
from megatron.sft.model.huggingface.rows import Row
from megatron.sft.options.model import ModelConfig

_GEMMA: dict[str, Any] = {
    "swiglu": False,
    "geglu": True,
    "apply_layernorm_1p": True,
    "scale_embeddings": True,
}
"""Gated GeLU; norms that multiply by one plus their weight; embeddings times sqrt(hidden size)."""
_TANH_GELU = ("gelu_pytorch_tanh", "gelu_new")
_BIDIRECTIONAL = ("use_bidirectional_attention",)
_NORM_BEFORE_MLP = Row(
    "mlp_norm.weight", "whole", ("hidden",), ("pre_feedforward_layernorm.weight",)
)


def _options1(config: ConfigFields) -> dict[str, Any]:
    return _GEMMA | attention_biases(config)


def _options2(config: ConfigFields) -> dict[str, Any]:
    kinds = config.layers("layer_types", "sliding_attention")
    return {
        **_options1(config),
        "norm_position": "both",
        "softmax_scale": config.positive("query_pre_attn_scalar", 256) ** -0.5,
        "attn_logit_softcapping": config.get("attn_logit_softcapping"),
        "final_logit_softcapping": config.get("final_logit_softcapping"),
        **config.windows(
            config.values.get("sliding_window", 4096), config.every(2) if kinds is None else kinds
        ),
    }


def _config2(model: ModelConfig) -> dict[str, Any]:
    scale = model.softmax_scale or model.resolved_kv_channels**-0.5
    return {
        **windows_config(model),
        **attention_biases_config(model),
        "attn_logit_softcapping": model.attn_logit_softcapping,
        "final_logit_softcapping": model.final_logit_softcapping,
        "query_pre_attn_scalar": round(scale**-2, 6),
        "hidden_activation": "gelu_pytorch_tanh",
    }


def _options3(config: ConfigFields) -> dict[str, Any]:
    kinds = config.layers("layer_types", "sliding_attention")
    if kinds is None:
        kinds = config.every(config.number("sliding_window_pattern", 6))
    windows = config.windows(config.values.get("sliding_window", 4096), kinds)
    ropes = config.rope_per_kind(1e6, config.get("rope_local_base_freq", 1e4))
    if not windows:
        ropes["window_rotary_base"] = None
    return {
        **_options2(config),
        "attn_logit_softcapping": None,  # transformers' attention has no place for it
        **windows,
        "qk_layernorm": True,
        **ropes,
    }


def _config3(model: ModelConfig) -> dict[str, Any]:
    return {
        **_config2(model),
        "rope_parameters": {
            "full_attention": rope_fields(model) | {"rope_theta": model.rotary_base},
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": model.window_rotary_base or model.rotary_base,
            },
        },
    }


GEMMA = Family(
    model_type="gemma",
    architecture="GemmaForCausalLM",
    head_dim=256,
    ties_embeddings=True,
    activations=(*_TANH_GELU, "gelu"),  # a name that early releases have
    unsupported=_BIDIRECTIONAL,
    options=_options1,
    config=attention_biases_config,
)
GEMMA2 = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    head_dim=256,
    ties_embeddings=True,
    activations=_TANH_GELU,
    activation_field="hidden_activation",
    unsupported=_BIDIRECTIONAL,
    defaults={"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    options=_options2,
    config=_config2,
    rows=(_NORM_BEFORE_MLP,),
)
GEMMA3 = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    head_dim=256,
    ties_embeddings=True,
    activations=_TANH_GELU,
    activation_field="hidden_activation",
    unsupported=_BIDIRECTIONAL,
    # Released folders leave these out of their text_config.
    defaults={
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    options=_options3,
    config=_config3,
    rows=(_NORM_BEFORE_MLP,),
    ignored_within=("final_logit_softcapping",),
    within={
        "gemma3": Prefix(
            "language_model.model.", "language_model.lm_head.", "model.language_model."
        )
    },
)
