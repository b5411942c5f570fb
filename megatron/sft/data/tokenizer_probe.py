"""pure. Compares tokenizers of the library tokenizers, by their parts and by a probe text."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from megatron.sft.base_exceptions import is_failure

PROBE = (
    "\n\n1. One\n2. Two 3,141.59 and 20260101",
    "def f(x):\n    if x:\n\t\treturn  x+1  # (ok)\r\n\r\n\n\n\n",
    "你好\uff0c世界。2026年 こんにちは カタカナ 안녕하세요",
    "cafe\u0301 naïve ﬁ Ａ½① Å \u1e9b\u0323",
    "I'LL don't WE'RE it's 'twas camelCase HTTPServer snake_case",
    "  leads, trails  ",
    "tab\there \u00a0\u2003wide\u200b👩\u200d👩\u200d👧 😀!?",
    "Привет مرحبا हिन्दी ไทย",
    "https://a.b/c?d=e&f=1%20 <p class='x'>{}[];--=>!= ...",
)
"""Texts that tokenizers split in different ways."""
_MAX_PROBED_TOKENS = 300
_MODEL_FLAGS = (
    *("continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", "byte_fallback"),
    *("ignore_merges", "unk_token"),
)


def part_state(part: Any) -> Any:
    """Returns a part of a tokenizer as JSON would hold it, without what concerns offsets only."""
    return None if part is None else _without_offsets(json.loads(part.__getstate__()))


def _without_offsets(state: Any) -> Any:
    if isinstance(state, list):
        return [_without_offsets(each) for each in state]
    if not isinstance(state, dict):
        return state
    if state in (
        {"type": "Sequence", "normalizers": []},
        {"type": "Sequence", "pretokenizers": []},
    ):
        return None
    return {key: _without_offsets(value) for key, value in state.items() if key != "trim_offsets"}


def parts(backend: Any) -> tuple[Any, ...]:
    """Returns what decides on the tokens of a text, besides model and vocabulary."""
    tokens = backend.get_added_tokens_decoder()
    added = {number: token.__getstate__() for number, token in tokens.items()}
    return added, part_state(backend.normalizer), part_state(backend.pre_tokenizer)


def model_flags(model: Any) -> dict[str, Any]:
    flags = {name: getattr(model, name, None) or None for name in _MODEL_FLAGS}
    if flags["byte_fallback"]:  # then no character is unknown
        del flags["unk_token"]
    return {"type": type(model).__name__, **flags}


def encode_alike(one: Any, other: Any, alone: Collection[str]) -> bool:
    """Returns whether two tokenizers split the probe in the same pieces and encode it in the same
    ids.

    alone: tokens that only one of them has; texts with them are left out.
    """
    tokens = [each.content for _, each in sorted(other.get_added_tokens_decoder().items())]
    half = _MAX_PROBED_TOKENS // 2
    chosen = tokens if len(tokens) <= 2 * half else [*tokens[:half], *tokens[-half:]]
    texts = [*PROBE, *(f"a{token}b {token} c\n{token}\n\nd" for token in chosen)]
    return all(
        _split(one, text) == _split(other, text) and _encode(one, text) == _encode(other, text)
        for text in texts
        if not any(token in text for token in alone)
    )


def _split(backend: Any, text: str) -> list[str]:
    """Returns the pieces that the model turns into tokens. They show differences that the ids of a
    text show only if the vocabulary has tokens for them.
    """
    if backend.normalizer is not None:
        text = backend.normalizer.normalize_str(text)
    if backend.pre_tokenizer is None:
        return [text]
    return [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)]


def _encode(backend: Any, text: str) -> list[int] | None:
    """Returns ids, or None if the tokenizer fails on the text."""
    try:
        return backend.encode(text, add_special_tokens=False).ids
    except BaseException as error:
        if not is_failure(error):
            raise
        return None
