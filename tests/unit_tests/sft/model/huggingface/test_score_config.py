"""The config.json of reward models beside transformers' classes."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from megatron.sft.model.huggingface.families.registry import FAMILIES
from megatron.sft.model.huggingface.score_config import (
    _SCORED,
    check_scores,
    is_reward_model,
    with_score,
)

CONFIG: dict[str, Any] = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}


@pytest.mark.skipif(not importlib.util.find_spec("transformers"), reason="needs transformers")
def test_the_classes_are_those_of_transformers() -> None:
    """A folder with the name of a class that does not exist could not be loaded."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as CLASSES,
    )

    for kind in _SCORED:
        (name,) = with_score({"model_type": kind}, 0)["architectures"]
        assert CLASSES[kind] == name
    text = {kind for kind in FAMILIES if kind in CLASSES and kind not in _SCORED}
    assert text <= {"qwen3_5_text", "qwen3_next"}  # recurrent layers train the paths of trees apart


def test_one_label_and_one_padding() -> None:
    """transformers gives two labels where config.json names none, and scores another token where
    its padding is another.
    """
    scored = with_score(CONFIG, 7)
    assert is_reward_model(scored)
    assert not is_reward_model(CONFIG)
    check_scores(scored, 7, "config.json")
    with pytest.raises(ValueError, match="pad_token_id 7, but the tokenizer's padding is 8"):
        check_scores(scored, 8, "config.json")
    with pytest.raises(ValueError, match="has 2 labels"):
        check_scores({**scored, "id2label": None}, 7, "config.json")
    with pytest.raises(ValueError, match="no text model for sequence classification"):
        check_scores({"model_type": "granite"}, 7, "config.json")
