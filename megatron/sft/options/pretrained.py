"""pure. What --pretrained-checkpoint says of the other options, and whether they contradict it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.packing.flags import flag_of
from megatron.sft.model.huggingface.config import options_of, read_config, window_of
from megatron.sft.options.rope_scaling import parse_rope_scaling


def implied_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Options that the folder of --pretrained-checkpoint decides, and defaults that it changes; none without it.

    `given` are the options of the user, by field name. ValueError where one contradicts the folder, or where the
    folder's model cannot be computed exactly.
    """
    folder = given.get("pretrained_checkpoint")
    if folder is None:
        return {}
    config, where = read_config(folder), str(Path(folder) / "config.json")
    decided = options_of(config, where)
    for name, value in decided.items():
        if name in given and _comparable(name, given[name]) != value:
            raise ValueError(
                f"{flag_of(name)} {given[name]} contradicts {where}, which says {value}; drop the option, it is read "
                "from there"
            )
    window, seq_length = window_of(config), given.get("seq_length", 0)
    if window is not None and seq_length > window:
        raise ValueError(
            f"{where} has a sliding window of {window} tokens, which is exact only for --seq-length up to that, but "
            f"it is {seq_length}; lower it"
        )
    own_tokenizer = given.get("tokenizer_type", "HuggingFaceTokenizer") != "HuggingFaceTokenizer"
    defaults = {
        "tokenizer_model": None if own_tokenizer else folder,
        "attention_dropout": config.get("attention_dropout") or 0.0,
        "mask_vocab_padding": True,
    }
    return defaults | decided


def _comparable(name: str, value: Any) -> Any:
    return parse_rope_scaling(value).to_json() if name == "rope_scaling" else value
