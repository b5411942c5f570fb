"""pure. gpt-oss: attention sinks, biases in all layers, experts whose gates and values alternate.

Files hold the experts as one stack per layer, each matrix transposed; released ones in MXFP4.
"""

from __future__ import annotations

from typing import Any

from megatron.sft.model.huggingface.families.config_fields import (
    ConfigFields,
    rope_fields,
    windows_config,
)
from megatron.sft.model.huggingface.families.family import Family
from megatron.sft.model.huggingface.families.mixture import num_experts
from megatron.sft.model.huggingface.rows import Row, Sizes, Source
from megatron.sft.model.huggingface.tensors import View
from megatron.sft.options.model import ModelConfig

_GATE = 1.702
"""The activation is x sigmoid(1.702 x)."""


_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""Default of transformers' class."""


def _gates_and_values(sizes: Sizes) -> tuple[Source, ...]:
    """Even columns are gates, odd ones values."""
    stored = (sizes["experts"], sizes["hidden"], 2 * sizes["expert_ffn"])
    return tuple(Source(View(offset, 1, 2, is_transposed=True), stored) for offset in (0, 1))


def _their_biases(sizes: Sizes) -> tuple[Source, ...]:
    stored = (sizes["experts"], 2 * sizes["expert_ffn"])
    return tuple(Source(View(offset, 1, 2), stored) for offset in (0, 1))


_ROWS = (
    Row("router.weight", "whole", ("experts", "hidden"), ("mlp.router.weight",), "experts"),
    Row("router.bias", "whole", ("experts",), ("mlp.router.bias",), "router_bias"),
    Row(
        "experts.fc1.weight",
        "sections",
        ("expert_ffn", "hidden"),
        ("mlp.experts.gate_up_proj",) * 2,
        "experts",
        _gates_and_values,
    ),
    Row(
        "experts.fc1.bias",
        "sections",
        ("expert_ffn",),
        ("mlp.experts.gate_up_proj_bias",) * 2,
        "experts_linear_bias",
        _their_biases,
    ),
    Row(
        "experts.fc2.weight",
        "columns",
        ("hidden", "expert_ffn"),
        ("mlp.experts.down_proj",),
        "experts",
        lambda s: (Source(View(is_transposed=True), (s["experts"], s["expert_ffn"], s["hidden"])),),
    ),
    Row(
        "experts.fc2.bias",
        "whole",
        ("hidden",),
        ("mlp.experts.down_proj_bias",),
        "experts_linear_bias",
        lambda s: (Source(View(), (s["experts"], s["hidden"])),),
    ),
)


def _options(config: ConfigFields) -> dict[str, Any]:
    config.require("attention_bias", True, default=True)
    config.require("swiglu_alpha", _GATE, default=_GATE)
    kinds = config.layers("layer_types", "sliding_attention")
    return {
        **config.with_rope(_ROPE).rope_options(150000.0),
        **num_experts(config, "num_local_experts"),
        **config.windows(
            config.values.get("sliding_window", 128), config.every(2) if kinds is None else kinds
        ),
        "moe_ffn_hidden_size": config.number("intermediate_size"),
        "moe_router_pre_softmax": False,
        "disable_bias_linear": False,
        "softmax_type": "learnable",
        "swiglu": False,
        "quick_geglu": True,
        "activation_func_clamp_value": config.positive("swiglu_limit", 7.0),
        "glu_linear_offset": 1.0,
    }


def _config(model: ModelConfig) -> dict[str, Any]:
    return {
        **windows_config(model),
        "num_local_experts": model.num_experts or 1,
        "num_experts_per_tok": model.moe_router_topk,
        "intermediate_size": model.moe_ffn_hidden_size or model.resolved_ffn_hidden_size,
        "swiglu_limit": model.activation_func_clamp_value or 7.0,
        "attention_bias": True,
        "rope_parameters": rope_fields(model) | {"rope_theta": model.rotary_base},
    }


GPT_OSS = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    norm_epsilon=1e-5,
    rope_theta=150000.0,
    head_dim=64,
    activation_field=None,
    has_router_loss=True,
    reads_mxfp4=True,
    options=_options,
    config=_config,
    rows=_ROWS,
)
