"""pure. Mistral 7B to Small 3, whose first release attends to a window, Ministral 3, and Mistral
Small 4 with latent attention.
"""

from __future__ import annotations

from typing import Any

from megatron.sft.model.huggingface.families.config_fields import (
    ConfigFields,
    rope_fields,
    windows_config,
)
from megatron.sft.model.huggingface.families.family import Family, Prefix
from megatron.sft.model.huggingface.families.latent import (
    LATENT_DEFAULTS,
    LATENT_ROWS,
    latent_config,
    latent_options,
)
from megatron.sft.model.huggingface.families.mixture import (
    SHARED_NAMES,
    STACKED_EXPERTS,
    dense_first_experts,
    dense_first_experts_config,
)
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
_ROPE4 = {
    **_ROPE,
    "rope_theta": 1e4,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
}
"""That of Mistral 4."""
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


def _mistral4_options(config: ConfigFields) -> dict[str, Any]:
    config = config.with_rope(_ROPE4)
    latent = latent_options(config)
    rotated, width = latent["qk_pos_emb_head_dim"], config.number("qk_nope_head_dim")
    is_written = "partial_rotary_factor" in config.rope()
    share = config.rotary_percent(1.0) if is_written else rotated / (rotated + width)
    if config.number("head_dim", rotated + width) * share != rotated:
        raise ValueError(
            f"{config.where} has a head_dim and a partial_rotary_factor by which others than the "
            f"{rotated} channels of qk_rope_head_dim are rotated, which is not supported"
        )
    config.require("n_group", 1, default=1)
    if "norm_topk_prob" in config.values:  # null is false in transformers
        config.require("norm_topk_prob", True)
    scale = config.positive("routed_scaling_factor", 1.0)
    return {
        **latent,
        **config.rope_options(1e4),
        "query_scale_beta": config.rope().get("llama_4_scaling_beta"),
        **dense_first_experts(config),
        "moe_router_pre_softmax": False,
        "moe_router_topk_scaling_factor": None if scale == 1.0 else scale,
    }


def _mistral4_config(model: ModelConfig) -> dict[str, Any]:
    latent = latent_config(model)
    rope = latent.get("rope_scaling", rope_fields(model))
    width = latent["qk_nope_head_dim"] + latent["qk_rope_head_dim"]
    share = {"partial_rotary_factor": latent["qk_rope_head_dim"] / width} if width else {}
    return {
        **latent,
        **dense_first_experts_config(model),
        "head_dim": width,
        "rope_scaling": {**rope, **share, "llama_4_scaling_beta": model.query_scale_beta},
        "norm_topk_prob": True,
        "routed_scaling_factor": model.moe_router_topk_scaling_factor or 1.0,
    }


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
MISTRAL4 = Family(
    model_type="mistral4",
    architecture="Mistral4ForCausalLM",
    needs_key_value_heads=False,
    partial_rotary_factor=1.0,
    unsupported=("attention_bias",),
    defaults={
        **LATENT_DEFAULTS,
        "q_lora_rank": 1024,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "n_routed_experts": 128,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 2048,
    },
    options=_mistral4_options,
    config=_mistral4_config,
    rows=(*LATENT_ROWS, *STACKED_EXPERTS),
    names=SHARED_NAMES,
    within=_WITHIN,
)
