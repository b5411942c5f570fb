"""pure. Places of characters among tokens, by sums of bytes.

`tokenizers` can give the characters of each token, for a quarter more time than the ids alone take
(Llama 3.1), or three quarters (Gemma 3). Where a token stands for its own bytes, sums of their
numbers give the same places:

    "<s>hi\\n", tokens <s> hi \\n: 3, 2 and 1 bytes, which end at 3, 5 and 6
    characters [3, 5) are the tokens [1, 2)

Invariant: `find_tokens` returns the tokens that a search of character offsets returns, or None.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

_BYTES = 256
_BYTE = re.compile("<0x[0-9A-F]{2}>")
_SPACE = "▁"
_SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}


class TokenBytes:
    """Numbers of bytes of all tokens."""

    def __init__(self, sizes: npt.NDArray[np.unsignedinteger[Any]], normal_form: Any) -> None:
        self._sizes, self._normal_form = sizes, normal_form

    def find_tokens(
        self, text: str, ids: npt.NDArray[np.int32], spans: Sequence[tuple[int, int]]
    ) -> list[tuple[int, int]] | None:
        """Returns the tokens [first, last) of each span of characters [start, end); None if the
        tokens are not the bytes of the text, or a span begins or ends within a token.

        A span that ends with white space has none either: the post-processor of some tokenizers
        takes it out of the offsets.
        """
        is_ascii, form = text.isascii(), self._normal_form
        if not is_ascii and form is not None and not unicodedata.is_normalized(form, text):
            return None
        # A sum that changes its type as it goes takes four times as long.
        ends = self._sizes.take(ids).astype(np.int64).cumsum()
        places = [place for span in spans for place in span]
        if not len(ids) or not _are_between_texts(text, places):
            return None
        num_bytes = len(text)
        if not is_ascii:
            pieces = (text[start:end] for start, end in pairwise([0, *places, len(text)]))
            *places, num_bytes = accumulate(len(piece.encode()) for piece in pieces)
        if ends[-1] != num_bytes:
            return None
        found = ends.searchsorted(places)
        if ends[found].tolist() != places:
            return None
        after = (found + 1).tolist()
        return list(zip(after[::2], after[1::2]))


def _are_between_texts(text: str, places: Sequence[int]) -> bool:
    """Returns whether spans, one behind the other, begin behind the text's start and end with a
    character other than white space.
    """
    return all(
        before <= start < end and start and not text[end - 1].isspace()
        for before, start, end in zip([0, *places[1::2]], places[::2], places[1::2])
    )


def read_token_bytes(backend: Any) -> TokenBytes | None:
    """Returns the bytes of the tokens of a tokenizer of `tokenizers`; None if a token may stand for
    other bytes than its own: text is changed, but to a form of Unicode, or lacks some bytes.
    """
    normalizers = _steps(backend.normalizer, "normalizers")
    steps = _steps(backend.pre_tokenizer, "pretokenizers")
    vocabulary = backend.get_vocab(with_added_tokens=False)
    if type(backend.model).__name__ != "BPE":
        return None
    normal_form = None
    if [step["type"] for step in normalizers] in (["NFC"], ["NFKC"]):
        normal_form = normalizers.pop()["type"]
    size_of: Callable[[str], int] = len  # a character of a byte-level token is a byte
    size_of_added = _num_bytes
    if normalizers or not _is_byte_level(steps, vocabulary):
        if normal_form or not _falls_back_to_bytes(backend, normalizers, steps, vocabulary):
            return None
        size_of = size_of_added = _least_bytes
    added = backend.get_added_tokens_decoder()
    sizes = np.zeros(max(max(vocabulary.values()), *added, 0) + 1, np.int64)
    for token, number in vocabulary.items():
        sizes[number] = size_of(token)
    for number, one in added.items():
        sizes[number] = size_of_added(one.content)
    # The smaller the table, the less of it is driven out of the cache.
    return TokenBytes(sizes.astype(np.min_scalar_type(sizes.max())), normal_form)


def _is_byte_level(steps: Sequence[Mapping[str, Any]], vocabulary: Mapping[str, int]) -> bool:
    """Returns whether each token is a text of characters that stand for a byte each (GPT-2)."""
    return (
        bool(steps)
        and steps[-1]["type"] == "ByteLevel"
        and not any(step.get("add_prefix_space") for step in steps)
        and all(step["type"] == "ByteLevel" or _keeps_all(step) for step in steps)
        and len([token for token in vocabulary if len(token) == 1]) >= _BYTES
    )


def _falls_back_to_bytes(
    backend: Any,
    normalizers: Sequence[Mapping[str, Any]],
    steps: Sequence[Mapping[str, Any]],
    vocabulary: Mapping[str, int],
) -> bool:
    """Returns whether each token is a text with another character for spaces, or a byte of a
    character that has no token (Gemma).
    """
    return (
        list(normalizers) == [_SPACES]
        and all(map(_keeps_all, steps))
        and backend.model.byte_fallback
        and all(f"<0x{byte:02X}>" in vocabulary for byte in range(_BYTES))
    )


def _keeps_all(step: Mapping[str, Any]) -> bool:
    is_split = step["type"] == "Split" and step["behavior"] != "Removed"
    return is_split or step["type"] == "Digits"


def _num_bytes(token: str) -> int:
    return len(token.encode())


def _least_bytes(token: str) -> int:
    """Returns the least number of bytes that a token may stand for, so that sums of other tokens
    never make up for one that stands for more: its own character for spaces, or the text "<0x0A>".
    """
    return 1 if _BYTE.fullmatch(token) else _num_bytes(token.replace(_SPACE, " "))


def _steps(step: Any, of_sequence: str) -> list[dict[str, Any]]:
    """Returns the settings of a normalizer or pre-tokenizer, those of a sequence one by one."""
    settings = settings_of(step)
    if settings is None:
        return []
    inner: list[dict[str, Any]] = settings.get(of_sequence, [settings])
    return inner


def settings_of(step: Any) -> dict[str, Any] | None:
    """Returns the settings of a normalizer or pre-tokenizer as in tokenizer.json, which has them
    behind a whole vocabulary; None for none.
    """
    return None if step is None else json.loads(step.__getstate__())
