"""pure. Options that families with mixtures of experts share."""

from __future__ import annotations

from typing import Any

from megatron.sft.model.huggingface.families.config_fields import ConfigFields
from megatron.sft.model.huggingface.rows import Row, Source
from megatron.sft.model.huggingface.tensors import View
from megatron.sft.options.model import ModelConfig

BLOCK_SPARSE_NAMES = (
    ("mlp.gate.e_score", "block_sparse_moe.e_score"),
    ("mlp.gate.", "block_sparse_moe.gate."),
    ("mlp.experts.", "block_sparse_moe.experts."),
    (".gate_proj.", ".w1."),
    (".up_proj.", ".w3."),
    (".down_proj.", ".w2."),
)
"""Names of Mixtral's files, and of MiniMax's."""
SHARED_NAMES = ((".shared_expert.", ".shared_experts."),)
"""Names of files of DeepSeek, GLM and Mistral."""
STACKED_BLOCK_SPARSE_NAMES = (("mlp.gate.e_score", "mlp.e_score"),)
"""Their names where experts are stacked, as transformers has them in memory."""

STACKED_EXPERTS = (
    Row(
        "experts.fc1.weight",
        "sections",
        ("expert_ffn", "hidden"),
        ("mlp.experts.gate_up_proj",) * 2,
        "experts",
        lambda s: tuple(
            Source(View(offset), (s["experts"], 2 * s["expert_ffn"], s["hidden"]))
            for offset in (0, s["expert_ffn"])
        ),
    ),
    Row(
        "experts.fc2.weight",
        "columns",
        ("hidden", "expert_ffn"),
        ("mlp.experts.down_proj",),
        "experts",
        lambda s: (Source(View(), (s["experts"], s["hidden"], s["expert_ffn"])),),
    ),
)
"""Experts of a layer as one tensor, as some releases of Qwen3.5 have them, and transformers has all
of them in memory.
"""

TRANSPOSED_STACKED_EXPERTS = (
    Row(
        "experts.fc1.weight",
        "sections",
        ("expert_ffn", "hidden"),
        ("mlp.experts.gate_up_proj",) * 2,
        "experts",
        lambda s: tuple(
            Source(
                View(offset, is_transposed=True),
                (s["experts"], s["hidden"], 2 * s["expert_ffn"]),
            )
            for offset in (0, s["expert_ffn"])
        ),
    ),
    Row(
        "experts.fc2.weight",
        "columns",
        ("hidden", "expert_ffn"),
        ("mlp.experts.down_proj",),
        "experts",
        lambda s: (Source(View(is_transposed=True), (s["experts"], s["expert_ffn"], s["hidden"])),),
    ),
)
"""The same with inputs in front of outputs, as the files of Qwen3-VL have them."""


def num_experts(config: ConfigFields, name: str, other_name: str | None = None) -> dict[str, Any]:
    """Returns experts, and how many of them a token goes to.

    name: the key of experts. other_name: another that transformers knows for it, and takes where
        both are written.
    """
    key = other_name if other_name is not None and other_name in config.values else name
    return {
        "num_experts": config.number(key),
        "moe_router_topk": config.number("num_experts_per_tok"),
    }


def dense_first_experts(
    config: ConfigFields, has_experts: tuple[int, ...] | None = None
) -> dict[str, Any]:
    """Returns the options of experts behind a few dense layers, with shared ones beside them.

    has_experts: 1 for each layer that has them; None for those from `first_k_dense_replace` on.
    """
    if has_experts is None:
        first = config.get("first_k_dense_replace", 0)
        layers = range(config.number("num_hidden_layers"))
        has_experts = tuple(int(layer >= first) for layer in layers)
        if not any(has_experts):
            raise ValueError(
                f"{config.where} leaves no layer with experts; check first_k_dense_replace {first}"
            )
    width = config.number("moe_intermediate_size")
    return {
        **num_experts(config, "n_routed_experts", "num_local_experts"),
        "moe_ffn_hidden_size": width,
        "moe_layer_freq": () if all(has_experts) else has_experts,
        "moe_shared_expert_intermediate_size": config.get("n_shared_experts", 1) * width or None,
    }


def dense_first_experts_config(model: ModelConfig) -> dict[str, Any]:
    """Returns the keys of config.json that say the same."""
    width = model.moe_ffn_hidden_size or model.resolved_ffn_hidden_size
    return {
        "n_routed_experts": model.num_experts or 1,
        "num_experts_per_tok": model.moe_router_topk,
        "moe_intermediate_size": width,
        "first_k_dense_replace": model.moe_layer_freq.count(0),
        "n_shared_experts": (model.moe_shared_expert_intermediate_size or 0) // width,
    }


def qwen_experts(config: ConfigFields, other_name: str | None = None) -> dict[str, Any]:
    """Returns the options of Qwen's experts; see `num_experts`."""
    step, dense = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or ()
    layers = range(config.number("num_hidden_layers"))
    has_experts = tuple(int(i not in dense and (i + 1) % step == 0) for i in layers)
    if not any(has_experts):
        raise ValueError(
            f"{config.where} leaves no layer with experts; check decoder_sparse_step and "
            "mlp_only_layers"
        )
    return {
        **num_experts(config, "num_experts", other_name),
        # Renormalised, the chosen shares of a softmax over all are a softmax over the chosen.
        "moe_router_pre_softmax": not config.get("norm_topk_prob", False),
        "moe_ffn_hidden_size": config.number("moe_intermediate_size"),
        "moe_layer_freq": () if all(has_experts) else has_experts,
    }


def qwen_experts_config(model: ModelConfig) -> dict[str, Any]:
    """Returns the keys of config.json that say the same."""
    return {
        "num_experts": model.num_experts or 1,
        "num_experts_per_tok": model.moe_router_topk,
        "moe_intermediate_size": model.moe_ffn_hidden_size or model.resolved_ffn_hidden_size,
        "norm_topk_prob": not model.moe_router_pre_softmax,
        "mlp_only_layers": [
            i for i, has_experts in enumerate(model.moe_layer_freq) if not has_experts
        ],
        "decoder_sparse_step": 1,
    }


def sigmoid_router() -> dict[str, Any]:
    """Returns the options of a router that adds a bias to sigmoids for the choice of experts."""
    return {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_pre_softmax": False,
    }


def grouped_router(config: ConfigFields) -> dict[str, Any]:
    """Returns the options of such a router that chooses groups of experts first, and multiplies
    the shares by a factor.
    """
    num_groups, group_topk = config.get("n_group", 1), config.get("topk_group", 1)
    if group_topk >= num_groups:
        num_groups = 1  # all groups are chosen
    if num_groups > 1 and config.number("num_experts_per_tok") // group_topk != 2:
        raise ValueError(
            f"{config.where} chooses num_experts_per_tok "
            f"{config.get('num_experts_per_tok')} of topk_group {group_topk} groups, but only two "
            "per group are supported: megatron-core rates groups by as many"
        )
    normalises = bool(config.values.get("norm_topk_prob", True))  # null is false in transformers
    if not normalises and config.number("num_experts_per_tok") > 1:
        config.require("norm_topk_prob", True)
    scale = config.positive("routed_scaling_factor", 1.0)
    return {
        **sigmoid_router(),
        "moe_router_pre_softmax": not normalises,
        "moe_router_topk_scaling_factor": None if scale == 1.0 else scale,
        "moe_router_num_groups": num_groups if num_groups > 1 else None,
        "moe_router_group_topk": group_topk if num_groups > 1 else None,
    }


def grouped_router_config(model: ModelConfig) -> dict[str, Any]:
    """Returns the keys of config.json that say the same."""
    return {
        "n_group": model.moe_router_num_groups or 1,
        "topk_group": model.moe_router_group_topk or 1,
        "norm_topk_prob": not model.moe_router_pre_softmax,
        "routed_scaling_factor": model.moe_router_topk_scaling_factor or 1.0,
    }
