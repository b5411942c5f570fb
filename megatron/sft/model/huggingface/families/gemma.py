"""pure. Gemma 1, 2 and 3."""

from __future__ import annotations

from typing import Any

from megatron.packing.user_files import shown
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
_SOFTCAPS = ("attn_logit_softcapping", "final_logit_softcapping")
_NORM_BEFORE_MLP = Row(
    "mlp_norm.weight", "whole", ("hidden",), ("pre_feedforward_layernorm.weight",)
)


def _options2(config: ConfigFields) -> dict[str, Any]:
    kinds = config.layers("layer_types", "sliding_attention")
    return {
        **_GEMMA,
        "norm_position": "both",
        "softmax_scale": config.positive("query_pre_attn_scalar", 256) ** -0.5,
        **{name: config.get(name) for name in _SOFTCAPS},
        **config.windows(
            config.values.get("sliding_window", 4096), config.every(2) if kinds is None else kinds
        ),
    }


def _config2(model: ModelConfig) -> dict[str, Any]:
    scale = model.softmax_scale or model.resolved_kv_channels**-0.5
    return {
        **windows_config(model),
        **{name: getattr(model, name) for name in _SOFTCAPS},
        "query_pre_attn_scalar": round(scale**-2, 6),
        "hidden_activation": "gelu_pytorch_tanh",
    }


def _options3(config: ConfigFields) -> dict[str, Any]:
    kinds = config.layers("layer_types", "sliding_attention")
    pattern = config.number("sliding_window_pattern", 6)
    windows = config.windows(
        config.values.get("sliding_window", 4096),
        config.every(pattern) if kinds is None else kinds,
    )
    local = config.rope("sliding_attention") if "rope_parameters" in config.values else {}
    if local.get("rope_type", "default") != "default":
        raise ValueError(
            f"{config.where} stretches rotary embeddings of layers with a window "
            f"(rope_type {shown(local['rope_type'])}), which is not supported"
        )
    base = config.rope_base(local.get("rope_theta") or config.get("rope_local_base_freq", 1e4), 1e4)
    return {
        **_options2(config),
        **windows,
        "qk_layernorm": True,
        **config.rope_options(1e6, "full_attention"),
        "window_rotary_base": base if windows else None,
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
    activation="gelu_pytorch_tanh",
    options=lambda _: _GEMMA,
)
GEMMA2 = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    head_dim=256,
    ties_embeddings=True,
    activation="gelu_pytorch_tanh",
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
    activation="gelu_pytorch_tanh",
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
    within={"gemma3": Prefix("language_model.model.", "language_model.lm_head.")},
)
