"""tensor. A transformers model of any type, so small that an examination takes a second.

What is kept of a configuration is what decides about packing: the kinds of layers, position
embeddings, experts. Sizes, and weights, are not.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from megatron.packing.doctor.subject import draw_weights
from megatron.packing.doctor.unusable import Unusable, reason_of

VOCABULARY = 101
MAX_LAYERS = 6
MAX_PARAMETERS = 20_000_000
WINDOW = 6
"""Tokens that windowed layers see; less than any of the doctor's sequences has."""
_SIZES: dict[str, int | None] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(
        ("hidden_size", "embedding_size", "embedding_dim", "word_embed_proj_dim", "lru_width"), 32
    ),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "n_inner", "dff", "shared_expert_intermediate_size"), 48
    ),
    **dict.fromkeys(("intermediate_size_mlp", "mlp_hidden_size", "d_ff"), 48),
    **dict.fromkeys(("num_attention_heads", "linear_num_value_heads"), 4),
    **dict.fromkeys(
        ("num_key_value_heads", "num_kv_heads", "linear_num_key_heads", "num_attention_groups"), 2
    ),
    **dict.fromkeys(
        (
            "head_dim",
            "kv_channels",
            "v_head_dim",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "linear_key_head_dim",
            "linear_value_head_dim",
            "rotary_dim",
            "hidden_size_per_layer_input",
        ),
        8,
    ),
    "qk_head_dim": 16,
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank"), 16),
    **dict.fromkeys(("moe_intermediate_size", "moe_ffn_hidden_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "attention_window_size"), WINDOW),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size"), 8),
}
"""Field of a configuration -> its small value, where it has that field and a number in it."""
_KINDS = {name: ["conv", "full_attention"] for name in ("lfm2", "lfm2_moe")}
"""Model type -> its kinds of layers, where the default configuration has not all of them."""
_STATE_WIDTH = 8
_STATE_HEADS = (
    ("num_heads", "head_dim", "expand"),
    ("mamba_n_heads", "mamba_d_head", "mamba_expand"),
    ("n_mamba_heads", "mamba_headdim", "mamba_expand"),
)
"""Fields of state-space layers: heads times their width is the hidden size times a factor."""
_RATES = ("dropout", "pdrop", "drop")


def small_config(source: str, **changes: Any) -> Any:
    """Returns the configuration of a small model.

    Args:
        source: a folder with config.json, or a `model_type` of transformers.
        changes: fields to set at last.

    Raises:
        Unusable: if it is neither, or cannot be read.
    """
    from pathlib import Path

    import transformers
    from transformers import AutoConfig

    if (Path(source) / "config.json").is_file():
        try:
            config = AutoConfig.from_pretrained(source, local_files_only=True)
        except Exception as error:  # of transformers, and of a folder's own code
            raise Unusable(
                f"--model {source}: transformers {transformers.__version__} does not read its "
                f"config.json: {reason_of(error)}; correct it, install another transformers, or "
                "examine your own model by --subject"
            ) from error
    else:
        try:
            config = AutoConfig.for_model(source)
            if source in _KINDS:
                config.layer_types = list(_KINDS[source])
                config.num_hidden_layers = len(_KINDS[source])
        except ValueError as error:
            raise Unusable(
                f"--model {source}: neither a folder with config.json nor a model type of the "
                "installed transformers; pass one of both"
            ) from error
    config = _alike_in_all_layers(config.get_text_config())
    _shrink(config)
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def _alike_in_all_layers(config: Any) -> Any:
    """Returns a configuration without fields that differ by layer.

    Such a field (`head_dim` of Gemma 4) cannot be read for the whole model: even `getattr` with a
    default raises RuntimeError in transformers 5.24.
    """
    fields = config.to_dict()
    if not fields.get("per_layer_config"):
        return config
    return type(config).from_dict({**fields, "per_layer_config": {}})


def _shrink(config: Any) -> None:
    fields = {*vars(config), *getattr(config, "attribute_map", {})}
    heads, kv_heads = (
        getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads")
    )
    for name in fields:
        value = getattr(config, name, None)
        if any(part in name for part in _RATES) and isinstance(value, float):
            _set(config, name, 0.0)
        if name in _SIZES and isinstance(value, int) and not isinstance(value, bool):
            _set(config, name, _SIZES[name])
    if heads == kv_heads and isinstance(kv_heads, int):  # some attention allows no groups
        _set(config, "num_key_value_heads", _SIZES["num_attention_heads"])
    for count, width, factor in _STATE_HEADS:
        if all(isinstance(getattr(config, name, None), int) for name in (count, width, factor)):
            _set(config, width, _STATE_WIDTH)
            _set(config, count, getattr(config, factor) * config.hidden_size // _STATE_WIDTH)
            if isinstance(getattr(config, "mamba_d_ssm", None), int):  # of falcon_h1
                _set(config, "mamba_d_ssm", getattr(config, factor) * config.hidden_size)
            if getattr(config, "attention_hidden_size", None) is not None:  # of zamba2
                _set(config, "attention_hidden_size", 2 * config.hidden_size)
                _set(
                    config,
                    "attention_head_dim",
                    2 * config.hidden_size // config.num_attention_heads,
                )
    if getattr(config, "num_experts_per_tok", 0) is None:
        _set(config, "num_experts_per_tok", _SIZES["num_experts_per_tok"])
    if getattr(config, "languages", None) and hasattr(config, "default_language"):  # of xmod
        _set(config, "default_language", config.languages[0])
    _shorten(config, fields)


def _set(config: Any, name: str, value: Any) -> None:
    with suppress(AttributeError):  # computed from other fields
        setattr(config, name, value)


def _shorten(config: Any, fields: set[str]) -> None:
    """Keeps the first layers, with each kind of layer among them."""
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    count = getattr(config, "num_hidden_layers", None)
    if not isinstance(count, int):
        return
    keep = list(range(min(count, 4)))
    if isinstance(kinds, Sequence) and len(kinds) == count:
        firsts = [list(kinds).index(kind) for kind in dict.fromkeys(kinds)]
        keep = sorted({0, 1, *firsts} & set(range(count)))[:MAX_LAYERS]
    for name in fields:
        value = getattr(config, name, None)
        if isinstance(value, (list, tuple)) and len(value) == count and count > 1:
            _set(config, name, [value[index] for index in keep])
    config.num_hidden_layers = len(keep)
    if isinstance(getattr(config, "num_blocks", None), int):  # of xlstm, the same number
        _set(config, "num_blocks", len(keep))
    if isinstance(getattr(config, "hybrid_layer_ids", None), list):  # of zamba2
        hybrids = [place for place, old in enumerate(keep) if kinds and kinds[old] == "hybrid"]
        _set(config, "hybrid_layer_ids", hybrids)


def _build(config: Any, options: dict[str, Any]) -> nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(copy.deepcopy(config), **options)


def small_model(config: Any, attention: str = "", dtype: torch.dtype = torch.float32) -> nn.Module:
    """Returns a causal language model of random weights, in the mode of training.

    Args:
        config: of the model.
        attention: a name for `attn_implementation`; "" leaves the choice to transformers.
        dtype: of weights.

    Raises:
        Unusable: if transformers has no such model or attention, with its reason.
    """
    torch.manual_seed(0)
    options: dict[str, Any] = {"attn_implementation": attention} if attention else {}
    if dtype == torch.float64:  # the grouped product of experts has no float64
        options["experts_implementation"] = "eager"
    try:
        with torch.device("meta"):
            size = sum(weight.numel() for weight in _build(config, options).parameters())
        model = _build(config, options) if size <= MAX_PARAMETERS else None
    except Exception as error:  # of hundreds of models' own code
        if "AutoModelForCausalLM" in str(error):
            raise Unusable(
                f"{config.model_type} is no causal language model of transformers; examine your "
                "own model by --subject or --script"
            ) from error
        raise Unusable(
            f"{config.model_type} with attention {attention or 'of its own'} cannot be built by "
            f"transformers: {reason_of(error)}"
            + "; pass --attention eager or sdpa, or install what it needs"
            * bool(attention)
        ) from error
    if model is None:
        raise Unusable(
            f"{config.model_type} has {size:,} parameters although its known sizes were reduced; "
            "build a small one yourself and pass --subject"
        )
    draw_weights(model)
    return model.to(dtype).train()
