"""pure. Renames tensors of a HuggingFace folder from any spelling that transformers loads to that
of released files.

    model.language_model.layers.0.mlp.up_proj.weight -> language_model.model.layers.0. ... (Gemma 3)
    layers.0.mlp.up_proj.weight -> model.layers.0.mlp.up_proj.weight (a model without a head)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from megatron.sft.model.huggingface.families.family import Family, Prefix
from megatron.sft.model.huggingface.families.mixture import (
    BLOCK_SPARSE_NAMES,
    STACKED_BLOCK_SPARSE_NAMES,
    STACKED_EXPERTS,
    TRANSPOSED_STACKED_EXPERTS,
)
from megatron.sft.model.huggingface.families.registry import language_model
from megatron.sft.model.huggingface.headers import Stored

_BODY = r"(?=(?:embed_tokens|layers|norm)\.)"
_ONCE_MORE = (r"^model\.(?=model\.)", "")
_RULES: Mapping[str, tuple[tuple[str, str], ...]] = {
    "model.": (
        _ONCE_MORE,
        (rf"^{_BODY}", "model."),
        (r"^model\.lm_head\.", "lm_head."),
    ),
    "language_model.model.": (
        _ONCE_MORE,
        (rf"^(?:model\.)?language_model\.(?:model\.){{0,2}}{_BODY}", "language_model.model."),
        (r"^(?:model\.|language_model\.)?lm_head\.", "language_model.lm_head."),
        (r"^model\.(?=(?:vision_tower|multi_modal_projector)\.)", ""),
    ),
    "model.language_model.": (
        _ONCE_MORE,
        (rf"^(?:language_model|model\.language_model\.model)\.{_BODY}", "model.language_model."),
        (r"^model\.lm_head\.", "lm_head."),
        (r"^visual\.", "model.visual."),
    ),
}
"""Prefix of a language model in released files -> (pattern, replacement), applied in this order."""
_NO_WEIGHT = re.compile(r"(?:^|\.)rotary_emb\.\w+$|(?:^|\.)_extra_state$")
"""Tensors in files that are not weights: buffers of old releases, state of Transformer Engine."""
_WRAPPERS: Mapping[str, tuple[str, str]] = {
    "_orig_mod.": ("torch.compile", "model._orig_mod.save_pretrained(OTHER)"),
    "_fsdp_wrapped_module.": ("FSDP", "trainer.save_model(OTHER) with a full state dict"),
    "_checkpoint_wrapped_module.": (
        "activation checkpointing",
        "save_pretrained(OTHER) of the model before it was wrapped",
    ),
    "base_model.model.": ("peft", "model.merge_and_unload().save_pretrained(OTHER)"),
    "module.": ("DistributedDataParallel or DeepSpeed", "model.module.save_pretrained(OTHER)"),
}
"""Text in the names of tensors -> what put it there, and the call that saves without it."""


class Naming(NamedTuple):
    """The names of a model's tensors by its config.json."""

    rename: Callable[[str], str]
    """Function from any spelling that transformers loads to the released one."""
    in_memory: Callable[[str], str]
    """Function from the same to the one in memory, which PEFT writes."""
    tied: tuple[str, str] | None
    """Head and embedding if they are one tensor, of which a folder may lack either."""


def naming(config: Mapping[str, Any], names: Iterable[str]) -> Naming:
    """Returns the naming of a folder's tensors. A model of an unknown family has Llama's.

    names: all tensors of the folder: whether experts are stacked decides on other names.
    """
    family, prefix, is_tied = None, Prefix(), False
    try:
        family, text, prefix = language_model(config)
        is_tied = bool(text.get("tie_word_embeddings", family.ties_embeddings))
    except ValueError:
        pass
    rules = [*_own_rules(family, prefix, names), *_RULES[prefix.body]]
    compiled = [(re.compile(pattern), replacement) for pattern, replacement in rules]

    def rename(name: str) -> str:
        for pattern, replacement in compiled:
            name = pattern.sub(replacement, name, count=1)
        return name

    tied = (f"{prefix.head}weight", f"{prefix.body}embed_tokens.weight")
    return Naming(rename, lambda name: prefix.in_memory(rename(name)), tied if is_tied else None)


def _own_rules(
    family: Family | None, prefix: Prefix, names: Iterable[str]
) -> list[tuple[str, str]]:
    """Returns the rules of one family beside those of its prefix."""
    rules: list[tuple[str, str]] = []
    if family is None:
        return rules
    if family.within and prefix == Prefix():
        # The config of the language model alone, beside files of the whole model.
        rules.append((rf"^(?:model\.)?language_model\.(?:model\.)?{_BODY}", "model."))
        rules.append((r"^language_model\.lm_head\.", "lm_head."))
    if "qwen2_5_vl" in family.within:
        rules.append((rf"^(?:model\.)?language_model\.(?:model\.)?{_BODY}", "model."))
        rules.append((r"^model\.visual\.", "visual."))
    if family.names == BLOCK_SPARSE_NAMES:
        # Stacked experts are named as in memory, and with them the rest of their module.
        to_memory = (r"\.block_sparse_moe\.", ".mlp.")
        to_files = (r"\.mlp\.", ".block_sparse_moe.")
        rules.append(to_memory if are_stacked(names) else to_files)
    return rules


def are_stacked(names: Iterable[str]) -> bool:
    """Returns whether the experts of a layer are one tensor."""
    return any(name.endswith(".experts.gate_up_proj") for name in names)


def with_stacked_experts(family: Family, tensors: Mapping[str, Stored], hidden: int) -> Family:
    """Returns a family for a folder in which the experts of a layer are one tensor.

    tensors: those of the folder, whose shapes tell whether Qwen3-VL's are turned, as released, or
    not, as transformers 5 writes them. hidden: the model's width.
    """
    if family.rows == TRANSPOSED_STACKED_EXPERTS:
        down = next(one for name, one in tensors.items() if name.endswith(".experts.down_proj"))
        is_turned = len(down.shape) != 3 or down.shape[1] != hidden or down.shape[2] == hidden
        return family if is_turned else replace(family, rows=STACKED_EXPERTS)
    return stacked_family(family)


def stacked_family(family: Family) -> Family:
    """Returns a family with the experts of a layer as one tensor, as transformers has them."""
    if any(row.part == STACKED_EXPERTS[0].part for row in family.rows):
        return family  # gpt-oss, whose released files have them so
    is_sparse = family.names == BLOCK_SPARSE_NAMES
    names = STACKED_BLOCK_SPARSE_NAMES if is_sparse else family.names
    return replace(family, rows=(*family.rows, *STACKED_EXPERTS), names=names)


def is_no_weight(name: str) -> bool:
    """Returns whether transformers ignores a tensor, because it can be computed."""
    return _NO_WEIGHT.search(name) is not None


def is_of_language_model(name: str) -> bool:
    """Returns whether the name of a tensor in a multimodal folder says that it belongs to the
    language model, in whatever spelling.
    """
    parts = name.split(".")
    begin = parts[1] if parts[0] == "model" and len(parts) > 1 else parts[0]
    return bool({"language_model", "lm_head", "text_model"} & set(parts)) or begin in (
        "embed_tokens",
        "layers",
        "norm",
    )


def wrapper_message(names: Iterable[str], missing: Iterable[str]) -> str:
    """Returns what put more into the names of tensors, and the way out; "" if nothing did.

    `module.model.norm.weight` is there, and `model.norm.weight` missing.
    """
    # Without its prefix a name is the same in every spelling.
    missing = list(missing)
    tails = {name.rpartition("model.")[2] for name in missing}
    for text, (what, call) in _WRAPPERS.items():
        if any(text in name for name in missing):
            continue  # an adapter, whose names have it
        for name in names:
            if text in name and name.replace(text, "").rpartition("model.")[2] in tails:
                return (
                    f"names its tensors with {text!r} ({name}), which {what} put there; save the "
                    f"model inside it, {call}, or take {text!r} out of the names"
                )
    return ""
