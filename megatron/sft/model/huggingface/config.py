"""pure. A HuggingFace config.json <-> the options of the same model; what cannot be computed
exactly is refused.

Keys that a file leaves out have the family's defaults, as in transformers' own classes. Both
spellings of a key are
read: those of transformers 4 and of 5.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from megatron.packing.user_files import shown
from megatron.sft.options.model import ModelConfig
from megatron.sft.options.rope_scaling import is_positive, parse_rope_scaling, rope_scaling_of


class Family(NamedTuple):
    """What the files of a family (`model_type`) leave unsaid."""

    architecture: str
    norm_epsilon: float = 1e-6
    rope_theta: float = 10000.0
    window: int | None = None
    """The sliding window where `sliding_window` is missing."""
    has_window_switch: bool = False
    """Whether the window only counts where `use_sliding_window` says so."""
    head_dim: int | None = None
    num_experts_key: str | None = None
    options: Mapping[str, Any] = {}
    """Options that all models of the family have and no key tells."""


FAMILIES = {
    "llama": Family("LlamaForCausalLM"),
    "mistral": Family("MistralForCausalLM", window=4096),
    "qwen2": Family(
        "Qwen2ForCausalLM", window=4096, has_window_switch=True, options={"add_qkv_bias": True}
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        window=4096,
        has_window_switch=True,
        head_dim=128,
        options={"qk_layernorm": True},
    ),
    "gemma": Family(
        "GemmaForCausalLM",
        head_dim=256,
        options={
            "swiglu": False,
            "geglu": True,
            "apply_layernorm_1p": True,
            "scale_embeddings": True,
        },
    ),
    "mixtral": Family(
        "MixtralForCausalLM", norm_epsilon=1e-5, rope_theta=1e6, num_experts_key="num_local_experts"
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        window=4096,
        has_window_switch=True,
        num_experts_key="num_experts",
        options={"add_qkv_bias": True, "moe_shared_expert_gate": True},
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        window=4096,
        has_window_switch=True,
        num_experts_key="num_experts",
        options={"qk_layernorm": True},
    ),
}
# What all families share, and what those have that do not say otherwise.
_COMMON: dict[str, Any] = {
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "rotary_percent": 1.0,
    "swiglu": True,
    "geglu": False,
    "apply_layernorm_1p": False,
    "scale_embeddings": False,
    "add_qkv_bias": False,
    "qk_layernorm": False,
    "num_experts": None,
    "moe_layer_freq": (),
    "moe_shared_expert_intermediate_size": None,
    "moe_shared_expert_gate": False,
    "mtp_num_layers": None,
}
_MOST = 1 << 24
_MAX_LAYERS = 10_000


def options_of(config: Mapping[str, Any], where: str = "config.json") -> dict[str, Any]:
    """The fields of `ModelConfig` that a config.json decides, all that say what is computed, and
    `vocab_size`.

    ValueError, naming `where`, for other families and for what cannot be computed exactly.
    """
    family = _family_of(config, where)
    _refuse(config, family, where)
    heads = _number(config, "num_attention_heads", where)
    groups = config.get("num_key_value_heads") or heads
    hidden = _number(config, "hidden_size", where)
    base, scaling = _rope(config, family, where)
    tied, epsilon = config.get("tie_word_embeddings"), config.get("rms_norm_eps")
    return {
        **_COMMON,
        "num_layers": _number(config, "num_hidden_layers", where),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "group_query_attention": groups != heads,
        "num_query_groups": groups if groups != heads else None,
        "kv_channels": config.get("head_dim") or family.head_dim or hidden // heads,
        "ffn_hidden_size": _number(config, "intermediate_size", where),
        "norm_epsilon": float(family.norm_epsilon if epsilon is None else epsilon),
        "rotary_base": base,
        "rope_scaling": scaling,
        "untie_embeddings_and_output_weights": not (
            config["model_type"] == "gemma" if tied is None else tied
        ),
        "disable_bias_linear": not _has_biases(config, where),
        "vocab_size": _number(config, "vocab_size", where),
        **family.options,
        **_experts(config, family, where),
    }


def _family_of(config: Mapping[str, Any], where: str) -> Family:
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise ValueError(
            f"{where} has model_type {shown(kind)}, but only {', '.join(FAMILIES)} are supported"
        )
    return FAMILIES[kind]


def _refuse(config: Mapping[str, Any], family: Family, where: str) -> None:
    if config.get("quantization_config"):
        raise ValueError(
            f"{where} has a quantization_config; give the folder of the model before quantization"
        )
    wanted = "gelu_pytorch_tanh" if family.options.get("geglu") else "silu"
    activation = config.get("hidden_activation") or config.get("hidden_act", wanted)
    if activation != wanted:
        raise ValueError(
            f"{where} has hidden_act {shown(activation)}, but only {wanted!r} is supported for "
            "this model_type"
        )
    if family is not FAMILIES["llama"] and "num_key_value_heads" not in config:
        raise ValueError(f"{where} lacks num_key_value_heads; add it")
    for name in ("router_jitter_noise", "use_bidirectional_attention"):
        if config.get(name):
            raise ValueError(f"{where} has {name} {config[name]!r}, which is not supported")


def _number(config: Mapping[str, Any], name: str, where: str) -> int:
    value = config.get(name)
    if type(value) is not int or not 1 <= value <= (
        _MAX_LAYERS if name == "num_hidden_layers" else _MOST
    ):
        raise ValueError(
            f"{where} must have {name}, a whole number of at least 1, but has {shown(value)}"
        )
    return value


def _rope(config: Mapping[str, Any], family: Family, where: str) -> tuple[float, str | None]:
    """Base and scaling of rotary embeddings."""
    fields = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    base = fields.pop("rope_theta", None) or config.get("rope_theta") or family.rope_theta
    if not is_positive(base):
        raise ValueError(f"{where} has rope_theta {shown(base)}, but it must be a number above 0")
    if (fields.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1) != 1:
        raise ValueError(
            f"{where} has a partial_rotary_factor, which is not supported for this model_type"
        )
    if fields.get("rope_type", fields.get("type")) in ("llama3", "yarn"):
        # As transformers fills it in.
        fields.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
    scaling = rope_scaling_of(fields, f"{where}: rope_scaling")
    return float(base), None if scaling is None else scaling.to_json()


def _has_biases(config: Mapping[str, Any], where: str) -> bool:
    """Whether all linear layers have biases; megatron-core has no switch for those of attention or
    MLP alone.
    """
    attention = bool(config.get("attention_bias"))
    mlp = bool(config.get("mlp_bias")) if config["model_type"] == "llama" else False
    if attention != mlp:
        raise ValueError(
            f"{where} has biases in attention or MLP alone; attention_bias and mlp_bias must be "
            "equal"
        )
    return attention


def _experts(config: Mapping[str, Any], family: Family, where: str) -> dict[str, Any]:
    if family.num_experts_key is None:
        return {}
    # transformers 5 writes the one name for what it reads under the other.
    key = next(
        (name for name in ("num_experts", "num_local_experts") if name in config),
        family.num_experts_key,
    )
    found: dict[str, Any] = {
        "num_experts": _number(config, key, where),
        "moe_router_topk": _number(config, "num_experts_per_tok", where),
    }
    if family is FAMILIES["mixtral"]:
        return {
            **found,
            "moe_router_pre_softmax": False,
            "moe_ffn_hidden_size": config["intermediate_size"],
        }
    step, dense = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or ()
    layers = range(_number(config, "num_hidden_layers", where))
    has_experts = tuple(int(i not in dense and (i + 1) % step == 0) for i in layers)
    if not any(has_experts):
        raise ValueError(
            f"{where} leaves no layer with experts; check decoder_sparse_step and mlp_only_layers"
        )
    found |= {
        # Renormalised, the chosen shares of a softmax over all are a softmax over the chosen.
        "moe_router_pre_softmax": not config.get("norm_topk_prob", False),
        "moe_ffn_hidden_size": _number(config, "moe_intermediate_size", where),
        "moe_layer_freq": () if all(has_experts) else has_experts,
    }
    if family is FAMILIES["qwen2_moe"]:
        found["moe_shared_expert_intermediate_size"] = _number(
            config, "shared_expert_intermediate_size", where
        )
        found["add_qkv_bias"] = config.get("qkv_bias", True)
    return found


def window_of(config: Mapping[str, Any]) -> int | None:
    """Tokens that a token sees, itself included; None where it sees all before it."""
    family = FAMILIES[config["model_type"]]
    if family.has_window_switch and not config.get("use_sliding_window"):
        return None
    kinds = config.get("layer_types")
    if kinds and "sliding_attention" not in kinds:
        return None
    return config.get("sliding_window", family.window)


def identity_of(model: ModelConfig, vocab_size: int) -> dict[str, Any]:
    """The options of a model as `options_of` would tell them, defaults resolved: equal for equal
    models.
    """
    options = {name: getattr(model, name) for name in _COMMON}
    groups = model.num_query_groups
    if model.num_experts is not None:
        options |= {
            "moe_router_topk": model.moe_router_topk,
            "moe_router_pre_softmax": model.moe_router_pre_softmax,
            "moe_ffn_hidden_size": model.moe_ffn_hidden_size or model.resolved_ffn_hidden_size,
            "moe_layer_freq": () if all(model.moe_layer_freq) else model.moe_layer_freq,
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
        "disable_bias_linear": model.disable_bias_linear,
        "vocab_size": vocab_size,
    }


def config_of(model: ModelConfig, vocab_size: int) -> dict[str, Any]:
    """The config.json of a model that was trained from nothing: of the first family that computes
    the same.

    ValueError where no family does.
    """
    wanted = identity_of(model, vocab_size)
    differing: dict[str, list[str]] = {}
    for kind, family in FAMILIES.items():
        config = _as_family(kind, family, model, vocab_size)
        found = options_of(config)
        if found == wanted:
            return config
        differing[kind] = [
            f"--{name.replace('_', '-')}" for name in wanted if found.get(name) != wanted[name]
        ]
    nearest = min(differing, key=lambda kind: len(differing[kind]))
    raise ValueError(
        f"no HuggingFace family computes what these options say; the nearest, {nearest}, differs "
        f"in {', '.join(differing[nearest])}"
    )


def _as_family(kind: str, family: Family, model: ModelConfig, vocab_size: int) -> dict[str, Any]:
    expert_width = model.moe_ffn_hidden_size or model.resolved_ffn_hidden_size
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": kind,
        "vocab_size": vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.resolved_ffn_hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_query_groups or model.num_attention_heads,
        "head_dim": model.resolved_kv_channels,
        "hidden_act": "gelu_pytorch_tanh" if kind == "gemma" else "silu",
        "max_position_embeddings": max(model.max_position_embeddings or 0, model.seq_length),
        "rms_norm_eps": model.norm_epsilon,
        "rope_theta": model.rotary_base,
        "rope_scaling": None if model.rope_scaling is None else json.loads(model.rope_scaling),
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        "sliding_window": None,
        "attention_dropout": 0.0,
    }
    if kind == "llama":
        config |= dict.fromkeys(("attention_bias", "mlp_bias"), not model.disable_bias_linear)
    if family.num_experts_key is not None:
        config |= {
            family.num_experts_key: model.num_experts or 1,
            "num_experts_per_tok": model.moe_router_topk,
            "moe_intermediate_size": expert_width,
            "norm_topk_prob": not model.moe_router_pre_softmax,
            "mlp_only_layers": [
                i for i, has_experts in enumerate(model.moe_layer_freq) if not has_experts
            ],
            "decoder_sparse_step": 1,
        }
    if kind == "mixtral":
        config["intermediate_size"] = expert_width
    if kind == "qwen2_moe":
        config["shared_expert_intermediate_size"] = model.moe_shared_expert_intermediate_size or 1
    return config
