"""pure. The supported families, by `model_type`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from megatron.packing.quoting import shown
from megatron.sft.model.huggingface.families.config_fields import ConfigFields
from megatron.sft.model.huggingface.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from megatron.sft.model.huggingface.families.ernie import ERNIE4_5
from megatron.sft.model.huggingface.families.exaone4 import EXAONE4
from megatron.sft.model.huggingface.families.family import Family, Prefix
from megatron.sft.model.huggingface.families.gemma import GEMMA, GEMMA2, GEMMA3
from megatron.sft.model.huggingface.families.gemma4 import GEMMA4, GEMMA4_UNIFIED
from megatron.sft.model.huggingface.families.glm import GLM4, GLM4_MOE, GLM4_MOE_LITE
from megatron.sft.model.huggingface.families.gpt_oss import GPT_OSS
from megatron.sft.model.huggingface.families.granite import GRANITE
from megatron.sft.model.huggingface.families.llama import LLAMA
from megatron.sft.model.huggingface.families.minimax import MINIMAX_M2
from megatron.sft.model.huggingface.families.mistral import MINISTRAL3, MISTRAL, MISTRAL4
from megatron.sft.model.huggingface.families.mixtral import MIXTRAL
from megatron.sft.model.huggingface.families.olmo import OLMO2, OLMO3
from megatron.sft.model.huggingface.families.phi3 import PHI3
from megatron.sft.model.huggingface.families.qwen2 import QWEN2, QWEN2_MOE
from megatron.sft.model.huggingface.families.qwen3 import QWEN3, QWEN3_MOE
from megatron.sft.model.huggingface.families.qwen3_next import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from megatron.sft.model.huggingface.families.qwen_vl import QWEN2_5_VL, QWEN3_VL, QWEN3_VL_MOE
from megatron.sft.model.huggingface.families.seed_oss import SEED_OSS
from megatron.sft.model.huggingface.families.smollm3 import SMOLLM3
from megatron.sft.model.huggingface.families.unsupported import why_unsupported

_ALL = (
    *(LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA, MIXTRAL, QWEN2_MOE, QWEN3_MOE),
    *(SEED_OSS, SMOLLM3, ERNIE4_5, GLM4_MOE, PHI3, GRANITE, OLMO2, GLM4),
    *(DEEPSEEK_V3, GLM4_MOE_LITE, MISTRAL4, DEEPSEEK_V2),
    *(GEMMA2, GEMMA3, GEMMA4, GEMMA4_UNIFIED, OLMO3, EXAONE4, MINISTRAL3, MINIMAX_M2),
    *(QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT, GPT_OSS),
    *(QWEN2_5_VL, QWEN3_VL, QWEN3_VL_MOE),
)
"""All families. The order matters for a model that was trained from scratch: it is exported as the
first family here that computes the same.
"""
FAMILIES: Mapping[str, Family] = {family.model_type: family for family in _ALL}
_WITHIN = {outer: family for family in _ALL for outer in family.within}


_TIED_WITHIN = {
    "gemma3": True,
    "gemma4": True,
    "gemma4_unified": True,
    "qwen3_5": False,
    "qwen3_5_moe": False,
    "qwen3_vl": False,
    "qwen3_vl_moe": False,
}
"""Multimodal `model_type` -> `tie_word_embeddings` where it is missing. That of text_config has no
effect. Mistral 3, which transformers ties, is not listed: released folders have a head that
differs, and transformers takes it.
"""


_SAME_AS = {"kimi_k2": "deepseek_v3"}
"""`model_type` of releases whose own code is that of another one, in its names and values too."""


class LanguageModel(NamedTuple):
    """The language model of a config.json. It may be the text part of a multimodal model."""

    family: Family
    config: ConfigFields
    prefix: Prefix


def is_multimodal(config: Mapping[str, Any]) -> bool:
    """Returns whether a config.json speaks of more than a language model, whose folder then holds
    tensors that are not trained.
    """
    return "text_config" in config or "vision_config" in config


def language_model(config: Mapping[str, Any], where: str = "config.json") -> LanguageModel:
    """Returns the family of a config.json, and its part about the language model. Raises
    ValueError, naming `where`, if the family is not supported.
    """
    kind, text = config.get("model_type"), config.get("text_config")
    outer = _WITHIN.get(kind) if isinstance(kind, str) else None
    kind = _SAME_AS.get(kind, kind) if isinstance(kind, str) else kind
    if outer is not None and not isinstance(text, dict):
        # Qwen2.5-VL as released, and what converters of others leave, which have no tower.
        prefix = outer.within[config["model_type"]] if is_multimodal(config) else Prefix()
        return _described(outer, config, where, prefix)
    if outer is not None and isinstance(text, dict):
        kind = text.get("model_type", outer.model_type)
        if kind in FAMILIES and config["model_type"] in FAMILIES[kind].within:
            prefix = FAMILIES[kind].within[config["model_type"]]
            ignored = FAMILIES[kind].ignored_within
            values = {name: value for name, value in text.items() if name not in ignored}
            tied = config.get("tie_word_embeddings", _TIED_WITHIN.get(config["model_type"]))
            if config["model_type"] == "qwen2_5_vl":  # whose older files say it in either place
                tied = bool(tied or text.get("tie_word_embeddings"))
            if tied is not None:
                values["tie_word_embeddings"] = tied
            return _described(FAMILIES[kind], values, where, prefix)
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ValueError(
            f"{where} has model_type {shown(kind)}, {why_unsupported(str(kind), FAMILIES)}"
        )
    return _described(FAMILIES[kind], config, where, Prefix())


def _described(
    family: Family, values: Mapping[str, Any], where: str, prefix: Prefix
) -> LanguageModel:
    return LanguageModel(family, ConfigFields({**family.defaults, **values}, where), prefix)
