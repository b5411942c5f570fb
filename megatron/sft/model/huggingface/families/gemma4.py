"""pure. Gemma 4: dense (12B, 31B), and with experts beside a dense MLP (26B-A4B).

Layers with a window have plain attention, the others `parts.global_attention`. The edge models
(E2B, E4B) have embeddings of their own for each layer and are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron.packing.model.parts import global_attention
from megatron.packing.quoting import shown
from megatron.sft.model.huggingface.families.config_fields import (
    ConfigFields,
    rope_fields,
    windows_config,
)
from megatron.sft.model.huggingface.families.family import Family, Prefix
from megatron.sft.model.huggingface.families.mixture import STACKED_EXPERTS
from megatron.sft.model.huggingface.rows import Row
from megatron.sft.options.model import ModelConfig

_NEAREST = "the nearest supported models are gemma4_text without it (Gemma 4 31B, 26B-A4B)"
_EDGE = {
    "hidden_size_per_layer_input": "embeddings of each layer",
    "num_kv_shared_layers": "layers that take keys and values of earlier ones",
}
"""Keys that the edge models (E2B, E4B) have -> what they need."""
_GLOBAL = {"head_dim": "global_kv_channels", "num_key_value_heads": "global_num_query_groups"}
"""Keys of a layer in `per_layer_config` -> options."""
_HIDDEN = ("hidden",)


def _norm(name: str, tensor: str, when: str) -> Row:
    return Row(name, "whole", _HIDDEN, (f"{tensor}.weight",), when)


_ROWS = (
    _norm("mlp_norm.weight", "pre_feedforward_layernorm", "norm_before_mlp"),
    Row.of(global_attention.QK, ("self_attn.q_proj.weight", "self_attn.k_proj.weight")),
    Row("layer.scalar", "whole", ("one",), ("layer_scalar",), "layer_scalar"),
    _norm("shared_norm.weight", "pre_feedforward_layernorm", "branch_norms"),
    _norm("shared_norm_behind.weight", "post_feedforward_layernorm_1", "branch_norms"),
    _norm("experts_norm.weight", "pre_feedforward_layernorm_2", "branch_norms"),
    _norm("experts_norm_behind.weight", "post_feedforward_layernorm_2", "branch_norms"),
    Row("router.weight", "whole", ("experts", "hidden"), ("router.proj.weight",), "experts"),
    Row("router.scale", "whole", _HIDDEN, ("router.scale",), "branch_norms"),
    Row("router.expert_scale", "whole", ("experts",), ("router.per_expert_scale",), "branch_norms"),
    Row(
        "shared.fc1.weight",
        "sections",
        ("shared_ffn", "hidden"),
        ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        "shared",
    ),
    Row(
        "shared.fc2.weight",
        "columns",
        ("hidden", "shared_ffn"),
        ("mlp.down_proj.weight",),
        "shared",
    ),
    *STACKED_EXPERTS,
)


def _options(config: ConfigFields) -> dict[str, Any]:
    for name, need in _EDGE.items():
        if config.values.get(name):
            raise ValueError(
                f"{config.where} has {name} {shown(config.values[name])}, as Gemma 4's edge models "
                f"(E2B, E4B) have, which needs {need}, and that is not supported; {_NEAREST}"
            )
    config.require("attention_k_eq_v", True)
    config.require("use_bidirectional_attention", "vision", None)
    has_window = _has_window(config)
    windows = config.windows(config.number("sliding_window", 512), has_window)
    ropes = _ropes(config)
    if not windows:
        ropes["window_rotary_base"] = None
    return {
        "swiglu": False,
        "geglu": True,
        "scale_embeddings": True,
        "norm_position": "both",
        "qk_layernorm": True,
        "value_layernorm": True,
        "layer_scalar": True,
        "softmax_scale": 1.0,
        "final_logit_softcapping": config.get("final_logit_softcapping"),
        **windows,
        **ropes,
        **_global_heads(config, has_window),
        **_experts(config),
    }


def _unified_options(config: ConfigFields) -> dict[str, Any]:
    ignored = ("enable_moe_block", "hidden_size_per_layer_input")  # its class has neither
    values = {name: value for name, value in config.values.items() if name not in ignored}
    return _options(ConfigFields(values, config.where))


def _has_window(config: ConfigFields) -> tuple[int, ...]:
    """Returns 1 for each layer with a window; the last has none, whatever is written."""
    windows = config.layers("layer_types", "sliding_attention")
    return (*(config.every(6) if windows is None else windows)[:-1], 0)


def _global_heads(config: ConfigFields, has_window: tuple[int, ...]) -> dict[str, Any]:
    """Returns the heads of layers without a window: transformers 5 writes them for each layer,
    releases once.
    """
    by_layer = config.values.get("per_layer_config")
    if by_layer is None:
        return {
            "global_kv_channels": config.number("global_head_dim", 512),
            "global_num_query_groups": config.get("num_global_key_value_heads"),
        }
    wanted = {str(layer) for layer, is_windowed in enumerate(has_window) if not is_windowed}
    layers = by_layer if isinstance(by_layer, Mapping) else {}
    fields_of_layers = {str(layer): fields for layer, fields in layers.items()}
    first: Any = next(iter(fields_of_layers.values()), {})
    is_known = isinstance(first, Mapping) and not first.keys() - _GLOBAL.keys()
    if (
        fields_of_layers.keys() != wanted
        or not is_known
        or any(fields != first for fields in fields_of_layers.values())
    ):
        raise ValueError(
            f"{config.where} has a per_layer_config {shown(by_layer)}, but only one with equal "
            f"{' and '.join(_GLOBAL)} for each layer without a window is supported"
        )
    of_layer = ConfigFields(first, f"{config.where}: per_layer_config")
    groups = of_layer.get("num_key_value_heads")
    return {
        "global_kv_channels": of_layer.number("head_dim", config.number("head_dim")),
        "global_num_query_groups": groups,
    }


def _ropes(config: ConfigFields) -> dict[str, Any]:
    default = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 1e6,
        },
    }
    return config.with_rope(default).rope_per_kind(1e6, 1e4)


def _experts(config: ConfigFields) -> dict[str, Any]:
    if not config.get("enable_moe_block", False):
        return {}
    return {
        "num_experts": config.number("num_experts"),
        "moe_router_topk": config.number("top_k_experts"),
        "moe_ffn_hidden_size": config.number("moe_intermediate_size"),
        # Renormalised, the chosen shares of a softmax over all are a softmax over the chosen.
        "moe_router_pre_softmax": False,
        "moe_shared_expert_intermediate_size": config.number("intermediate_size"),
        "moe_branch_norms": True,
    }


def _config(model: ModelConfig) -> dict[str, Any]:
    return {
        **windows_config(model),
        "attention_bias": False,
        "attention_k_eq_v": True,
        "global_head_dim": model.global_kv_channels,
        "num_global_key_value_heads": model.global_num_query_groups,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "final_logit_softcapping": model.final_logit_softcapping,
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_parameters": {
            "full_attention": rope_fields(model) | {"rope_theta": model.rotary_base},
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": model.window_rotary_base or model.rotary_base,
            },
        },
        **_experts_config(model),
    }


def _experts_config(model: ModelConfig) -> dict[str, Any]:
    if model.num_experts is None:
        return {"enable_moe_block": False}
    return {
        "enable_moe_block": True,
        "num_experts": model.num_experts,
        "top_k_experts": model.moe_router_topk,
        "moe_intermediate_size": model.moe_ffn_hidden_size or model.resolved_ffn_hidden_size,
        "intermediate_size": model.moe_shared_expert_intermediate_size,
    }


_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
"""Released folders may leave these out of their text_config."""
GEMMA4 = Family(
    model_type="gemma4_text",
    architecture="Gemma4ForCausalLM",
    head_dim=256,
    ties_embeddings=True,
    activations=("gelu_pytorch_tanh", "gelu_new"),
    activation_field="hidden_activation",
    unsupported=("attention_bias", "rope_scaling"),
    reads_per_layer_config=True,
    defaults={**_DEFAULTS, "hidden_size_per_layer_input": 256},
    options=_options,
    config=_config,
    rows=_ROWS,
    names=(("mlp.experts.", "experts."),),
    within={"gemma4": Prefix("model.language_model.", "lm_head.")},
)
GEMMA4_UNIFIED = replace(
    GEMMA4,
    model_type="gemma4_unified_text",
    architecture="Gemma4UnifiedForCausalLM",
    defaults={**_DEFAULTS, "sliding_window": 1024},
    options=_unified_options,
    within={"gemma4_unified": Prefix("model.language_model.", "lm_head.")},
)
"""The 12B model, whose class has no experts and whose images and sounds have no towers."""
