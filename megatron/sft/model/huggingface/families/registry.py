"""pure. The families that are supported, by `model_type`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from megatron.packing.user_files import shown
from megatron.sft.model.huggingface.families.config_fields import ConfigFields
from megatron.sft.model.huggingface.families.family import Family, Prefix
from megatron.sft.model.huggingface.families.gemma import GEMMA
from megatron.sft.model.huggingface.families.llama import LLAMA
from megatron.sft.model.huggingface.families.mistral import MISTRAL
from megatron.sft.model.huggingface.families.mixtral import MIXTRAL
from megatron.sft.model.huggingface.families.qwen2 import QWEN2, QWEN2_MOE
from megatron.sft.model.huggingface.families.qwen3 import QWEN3, QWEN3_MOE

_ALL = (LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA, MIXTRAL, QWEN2_MOE, QWEN3_MOE)
FAMILIES: Mapping[str, Family] = {family.model_type: family for family in _ALL}
_WITHIN = {outer: family for family in _ALL for outer in family.within}


class LanguageModel(NamedTuple):
    """The language model that a config.json describes, which may be the text part of a larger
    model.
    """

    family: Family
    config: ConfigFields
    prefix: Prefix


def language_model(config: Mapping[str, Any], where: str = "config.json") -> LanguageModel:
    """Returns the family of a config.json, and the part of it that describes the language model;
    ValueError, naming `where`, for families that are not supported.
    """
    kind, text = config.get("model_type"), config.get("text_config")
    outer = _WITHIN.get(kind) if isinstance(kind, str) else None
    if outer is not None and isinstance(text, dict):
        kind = text.get("model_type", outer.model_type)
        if kind in FAMILIES and config["model_type"] in FAMILIES[kind].within:
            prefix = FAMILIES[kind].within[config["model_type"]]
            tied = config.get("tie_word_embeddings")  # it stands beside text_config
            values = text if tied is None else {**text, "tie_word_embeddings": tied}
            return LanguageModel(FAMILIES[kind], ConfigFields(values, where), prefix)
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ValueError(
            f"{where} has model_type {shown(kind)}, but only {', '.join(FAMILIES)} are supported"
        )
    return LanguageModel(FAMILIES[kind], ConfigFields(config, where), Prefix())
