"""pure. Options and tensors that families with latent attention share."""

from __future__ import annotations

from typing import Any

from megatron.packing.model.parts import latent_attention as latent
from megatron.sft.model.huggingface.families.config_fields import ConfigFields
from megatron.sft.model.huggingface.rows import Row
from megatron.sft.options.model import ModelConfig
from megatron.sft.options.rope_scaling import mscale

LATENT_ROWS = (
    Row.of(latent.Q_DOWN, ("self_attn.q_a_proj.weight",)),
    Row.of(latent.Q_NORM, ("self_attn.q_a_layernorm.weight",)),
    Row.of(latent.Q_UP, ("self_attn.q_b_proj.weight",)),
    Row.of(latent.Q, ("self_attn.q_proj.weight",)),
    Row.of(latent.KV_DOWN, ("self_attn.kv_a_proj_with_mqa.weight",)),
    Row.of(latent.KV_NORM, ("self_attn.kv_a_layernorm.weight",)),
    Row.of(latent.KV_UP, ("self_attn.kv_b_proj.weight",)),
)
LATENT_DEFAULTS = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
"""Keys of config.json that may be missing, and DeepSeek's values of them."""
_WIDTHS = {
    "kv_lora_rank": "kv_lora_rank",
    "qk_head_dim": "qk_nope_head_dim",
    "qk_pos_emb_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
}
"""Option -> key of config.json."""


def latent_options(config: ConfigFields) -> dict[str, Any]:
    """Returns the options of latent attention. ValueError for keys and values of fewer heads than
    queries, which no release has.
    """
    heads = config.number("num_attention_heads")
    config.require("num_key_value_heads", heads, default=heads)
    widths = {option: config.number(key) for option, key in _WIDTHS.items()}
    has_query_latent = config.values.get("q_lora_rank") is not None
    return {
        **widths,
        "q_lora_rank": config.number("q_lora_rank") if has_query_latent else None,
        "kv_channels": widths["qk_pos_emb_head_dim"],
        "rotary_percent": 1.0,
        # null is false in transformers
        "rotary_interleaved": bool(config.values.get("rope_interleave", True)),
        "softmax_scale": _softmax_scale(
            widths["qk_head_dim"] + widths["qk_pos_emb_head_dim"], config.rope()
        ),
    }


def _softmax_scale(width: int, rope: dict[str, Any]) -> float | None:
    """Returns the factor of scores under a stretched rope with `mscale_all_dim`; None for that of
    the width alone.
    """
    kind, scale = rope.get("rope_type", rope.get("type", "default")), rope.get("mscale_all_dim")
    if kind == "default" or not scale:
        return None
    return float(width**-0.5 * mscale(rope["factor"], scale) ** 2)


def latent_config(model: ModelConfig) -> dict[str, Any]:
    """Returns the keys of config.json that say the same."""
    found = {key: getattr(model, option) or 0 for option, key in _WIDTHS.items()}
    return {
        **found,
        "q_lora_rank": model.q_lora_rank,
        "head_dim": found["qk_rope_head_dim"],
        "rope_interleave": model.rotary_interleaved,
        "attention_bias": False,
        **_rope_with_scale(model, found["qk_nope_head_dim"] + found["qk_rope_head_dim"]),
    }


def _rope_with_scale(model: ModelConfig, width: int) -> dict[str, Any]:
    """Returns `rope_scaling` with the `mscale_all_dim` that a factor of scores stands for; {} for
    models without one.
    """
    if model.softmax_scale is None or model.rope is None or model.rope.factor <= 1:
        return {}
    root = (model.softmax_scale * width**0.5) ** 0.5
    # (1 + 0.1 m ln(factor))^2 / sqrt(width), rounded, since roots are not exact
    all_dim = round((root - 1.0) / (mscale(model.rope.factor) - 1.0), 6)
    return {"rope_scaling": model.rope.huggingface_fields() | {"mscale_all_dim": all_dim}}
