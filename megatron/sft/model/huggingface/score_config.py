"""pure. The config.json of reward models: `...ForSequenceClassification` with one label.

transformers reads the score of the last token that is not `pad_token_id`, by `score.weight` [1, h].
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.packing.quoting import shown
from megatron.sft.model.huggingface.families.registry import is_multimodal, language_model

_ENDING = "ForSequenceClassification"
_ARCHITECTURES = {"gemma3_text": "Gemma3TextForSequenceClassification"}
"""`model_type` -> its class where that is not the one of its language model with another ending."""
_SCORED = frozenset(
    """
    llama mistral qwen2 qwen3 gemma mixtral qwen2_moe qwen3_moe seed_oss smollm3 phi3 olmo2 glm4
    deepseek_v3 mistral4 deepseek_v2 gemma2 gemma3_text olmo3 exaone4 ministral3 gpt_oss
    """.split()
)
"""Families of which transformers has such a class."""


def is_reward_model(config: Mapping[str, Any]) -> bool:
    """Returns whether a config.json is of a model of scores, not of words."""
    names = config.get("architectures")
    return isinstance(names, list) and any(str(name).endswith(_ENDING) for name in names)


def check_scores(config: Mapping[str, Any], pad: int | None, where: str | Path) -> None:
    """Raises ValueError where a model of this config.json has no reward model in transformers, or
    where it is one of several labels, or of another padding.

    pad: padding of the run's tokenizer; None if it is unknown.
    """
    family, _, _ = language_model(config, str(where))
    if is_multimodal(config) or family.model_type not in _SCORED:
        raise ValueError(
            f"{where} has model_type {shown(config.get('model_type'))}, of which transformers has "
            "no text model for sequence classification; --loss reward takes "
            f"{', '.join(sorted(_SCORED))}"
        )
    if not is_reward_model(config):
        return
    labels = config.get("id2label")
    count = config.get("num_labels", len(labels) if isinstance(labels, Mapping) else 2)
    if count != 1:
        raise ValueError(
            f"{where} has {shown(count)} labels, but a reward model has one; give a model with "
            "num_labels 1"
        )
    own_pad = config.get("pad_token_id")
    if pad is not None and own_pad is not None and own_pad != pad:
        raise ValueError(
            f"{where} has pad_token_id {shown(own_pad)}, but the tokenizer's padding is {pad}; "
            "transformers scores the last token that is not padding: make them the same"
        )


def with_score(config: Mapping[str, Any], pad: int | None) -> dict[str, Any]:
    """Returns the config.json of the reward model that begins as this model."""
    family, _, _ = language_model(config)
    plain = family.architecture.removesuffix("ForCausalLM") + _ENDING
    reward_config = {
        **config,
        "architectures": [_ARCHITECTURES.get(family.model_type, plain)],
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
    }
    reward_config.pop("num_labels", None)
    return reward_config if pad is None else {**reward_config, "pad_token_id": pad}
