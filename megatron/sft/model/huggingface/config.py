"""pure. Translates between a HuggingFace config.json and the options of the same model.

A model that cannot be computed exactly is refused. Missing keys have the family's defaults, as in
transformers' own classes. The spellings of transformers 4 and of 5 are both read. `families` has
the differences between families.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import MISSING, fields
from functools import lru_cache
from typing import Any

from megatron.packing.model.options import Architecture
from megatron.packing.quoting import shown
from megatron.sft.model.huggingface.families.config_fields import ConfigFields
from megatron.sft.model.huggingface.families.family import Family
from megatron.sft.model.huggingface.families.registry import FAMILIES, language_model
from megatron.sft.model.huggingface.quantized.methods import read_method
from megatron.sft.options.model import ModelConfig
from megatron.sft.options.rope_scaling import parse_rope_scaling

_OF_RUN = {"make_vocab_size_divisible_by", "recompute_granularity", "recompute_modules"}
"""Options of `Architecture` that do not change what the model computes."""
_UNSUPPORTED = ("per_layer_config",)
"""Keys that transformers reads of every family: sizes that differ between layers, and another name
of the file of weights.
"""
_EXPERTS_ONLY = {"moe_router_topk", "moe_router_pre_softmax", "moe_ffn_hidden_size"}
"""Options without effect on a model without experts."""
# Options of all families, and the defaults of those that families may change.
_COMMON: dict[str, Any] = {
    **{
        field.name: field.default
        for field in fields(Architecture)
        if field.name not in _OF_RUN | _EXPERTS_ONLY and field.default is not MISSING
    },
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "rotary_percent": 1.0,
    "swiglu": True,
    "scale_embeddings": False,
    "disable_bias_linear": True,
}


def options_of(config: Mapping[str, Any], where: str = "config.json") -> dict[str, Any]:
    """Returns the options of a model by its config.json: `vocab_size`, and all fields of
    `ModelConfig` that change what is computed.

    Raises ValueError, naming `where`, for an unknown family, and for a model that cannot be
    computed exactly.
    """
    family, text, _ = language_model(config, where)
    method = read_method(config, where)
    if method is not None and method.name == "mxfp4" and not family.reads_mxfp4:
        raise ValueError(
            f"{where} has a quantization_config of MXFP4, which is read for gpt-oss alone; give "
            "the folder of the model before quantization"
        )
    _refuse(text.values, family, where)
    heads = text.number("num_attention_heads")
    # Megatron's options have no groups if each head has keys and values of its own.
    groups = text.get("num_key_value_heads") or heads
    hidden = text.number("hidden_size")
    tied = text.get("tie_word_embeddings", family.ties_embeddings)
    options = {
        **_COMMON,
        "num_layers": text.number("num_hidden_layers"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "group_query_attention": groups != heads,
        "num_query_groups": groups if groups != heads else None,
        "kv_channels": text.get("head_dim") or family.head_dim or hidden // heads,
        "norm_epsilon": float(text.get("rms_norm_eps", family.norm_epsilon)),
        "rotary_percent": text.rotary_percent(family.partial_rotary_factor),
        "untie_embeddings_and_output_weights": not tied,
        "vocab_size": text.number("vocab_size"),
        **family.options(text),
    }
    if "rotary_base" not in options:
        options |= text.rope_options(family.rope_theta)
    # Where all layers have experts, no layer has this width, and files may leave it out.
    width = None if options["moe_layer_freq"] else options.get("moe_ffn_hidden_size")
    options["ffn_hidden_size"] = text.number("intermediate_size", width)
    return options


def _refuse(config: Mapping[str, Any], family: Family, where: str) -> None:
    """Raises ValueError for a value of config.json that is not supported."""
    fields = ConfigFields(config, where)
    if family.activation_field is not None:
        fields.require(family.activation_field, *family.activations, default=family.activations[0])
    if family.needs_key_value_heads and "num_key_value_heads" not in config:
        raise ValueError(f"{where} lacks num_key_value_heads; add it")
    fields.refuse(*family.unsupported, *(() if family.reads_per_layer_config else _UNSUPPORTED))
    if config.get("is_causal", True) is not True:
        raise ValueError(
            f"{where} has is_causal {shown(config['is_causal'])}, with which transformers lets "
            "tokens attend to later ones, which is not supported"
        )


def identity_of(model: ModelConfig, vocab_size: int) -> dict[str, Any]:
    """Returns the options of a model in the form of `options_of`, with defaults filled in. Two
    models that compute the same have equal ones.
    """
    options = {name: getattr(model, name) for name in _COMMON}
    groups = model.num_query_groups
    options["moe_layer_freq"] = () if all(model.moe_layer_freq) else model.moe_layer_freq
    if model.num_experts is not None:
        options |= {
            "moe_router_topk": model.moe_router_topk,
            "moe_router_pre_softmax": model.moe_router_pre_softmax,
            "moe_ffn_hidden_size": model.moe_ffn_hidden_size or model.resolved_ffn_hidden_size,
        }
    return options | {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "group_query_attention": groups not in (None, model.num_attention_heads),
        "num_query_groups": None if groups == model.num_attention_heads else groups,
        "kv_channels": model.resolved_kv_channels,
        "ffn_hidden_size": model.resolved_ffn_hidden_size,
        "norm_epsilon": model.norm_epsilon,
        "rotary_base": model.rotary_base,
        "rope_scaling": None
        if model.rope_scaling is None
        else parse_rope_scaling(model.rope_scaling).to_json(),
        "untie_embeddings_and_output_weights": model.untie_embeddings_and_output_weights,
        "vocab_size": vocab_size,
    }


def with_rope_scaling(config: Mapping[str, Any], text: str) -> dict[str, Any] | None:
    """Returns a config.json of plain rotary embeddings with those of --rope-scaling `text`; None
    where its family does not read them back so, as of layers with several kinds.
    """
    before = options_of(config)
    if before["rope_scaling"] is not None or before["position_embedding_type"] != "rope":
        return None
    changed = deepcopy(dict(config))
    inner = changed.get("text_config")
    inner = inner if isinstance(inner, dict) else changed
    fields = parse_rope_scaling(text).huggingface_fields()
    if isinstance(inner.get("rope_parameters"), dict):
        inner["rope_parameters"] |= fields
    if "rope_scaling" in inner or "rope_parameters" not in inner:
        inner["rope_scaling"] = fields
    wanted = before | {"rope_scaling": parse_rope_scaling(text).to_json()}
    try:
        return changed if options_of(changed) == wanted else None
    except ValueError:
        return None


def config_of(model: ModelConfig, vocab_size: int) -> dict[str, Any]:
    """Returns a config.json for a model that was trained from scratch. It is that of the first
    family that computes the same model.

    Raises ValueError if there is no such family; the message names the closest one and the options
    that differ.
    """
    found = _found(model, vocab_size)
    if isinstance(found, str):
        raise ValueError(found)
    return deepcopy(found)


@lru_cache(maxsize=4)  # each save of a run asks, and thirty families answer
def _found(model: ModelConfig, vocab_size: int) -> dict[str, Any] | str:
    """Returns what `config_of` returns, or what it raises."""
    # Each family writes its config.json, which is read back. If that gives the same options, the
    # family computes the same model.
    wanted = identity_of(model, vocab_size)
    differing: dict[str, list[str]] = {}
    for kind, family in FAMILIES.items():
        config = _as_family(family, model, vocab_size)
        try:
            found = options_of(config)
        except ValueError:
            continue  # this family has no model of this kind
        if model.num_experts is not None and 0 not in model.moe_layer_freq:
            found["ffn_hidden_size"] = wanted["ffn_hidden_size"]  # no layer has it
        if found == wanted:
            return config
        differing[kind] = [
            f"--{name.replace('_', '-')} (there {shown(found.get(name))})"
            for name in wanted
            if found.get(name) != wanted[name]
        ]
    nearest = min(differing, key=lambda kind: len(differing[kind]))
    return (
        f"no HuggingFace family computes what these options say; the nearest, {nearest}, differs "
        f"in {', '.join(differing[nearest])}"
    )


def _as_family(family: Family, model: ModelConfig, vocab_size: int) -> dict[str, Any]:
    of_family = family.config(model)
    # Where layers have different ropes (Gemma 3), `rope_parameters` has one for each kind of layer.
    # A rope_scaling beside it would take their place in transformers.
    has_ropes = any(isinstance(one, dict) for one in of_family.get("rope_parameters", {}).values())
    scaling = None if has_ropes else model.rope_scaling
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.resolved_ffn_hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_query_groups or model.num_attention_heads,
        "head_dim": model.resolved_kv_channels,
        "hidden_act": family.activations[0],
        "max_position_embeddings": max(model.max_position_embeddings or 0, model.seq_length),
        "rms_norm_eps": model.norm_epsilon,
        "rope_theta": model.rotary_base,
        "rope_scaling": None
        if scaling is None
        else parse_rope_scaling(scaling).huggingface_fields(),
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        "sliding_window": None,
        "attention_dropout": 0.0,
        **of_family,
    }
