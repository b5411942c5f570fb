"""pure. Tokens of texts that share parts, as the prompts of a chat's turns do: a text is cut at its
added tokens, and what lies between two of them is tokenized once for all texts of late. Where texts
share too little, most of them are tokenized whole.

    <|im_start|>user\\nhi<|im_end|>    cut at <|im_start|> and <|im_end|>: "user\\nhi" is a segment

`tokenizers` finds added tokens first, and then takes each text between them by itself, so that the
ids are those of the whole text. `read_segments` refuses tokenizers where they might not be: where a
segment's first word is another in the middle of a text, or where an added token takes in what
stands beside it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.sft.data.token_bytes import settings_of

_MOST_ADDED = 1_024
"""Added tokens that a text is cut at, at most: a search for more takes longer than it saves."""
_MOST_CACHED = 512
"""Segments that are remembered of late, and again as many of before."""
_LONGEST_CACHED = 1 << 14
"""Characters of a segment that is remembered: 16 MiB of text in all, and of ids some four times
that.
"""
_WORTH = 1 / 8
"""Part of the characters that must be known for a cut to pay."""
_LOOKED_AT = 32
"""Texts that are cut to see whether it pays."""
_LEFT_WHOLE = 512
"""Texts that are tokenized whole before the next look."""
_NO_IDS = np.zeros(0, np.int32)
_KINDS = ("Split", "ByteLevel", "Digits", "Punctuation", "Sequence")
"""Steps before the model that treat a text alike wherever it stands."""


class TextSegments:
    """Tokenizes texts by their segments, with a memory of those seen of late."""

    def __init__(self, backend: Any, added: Mapping[str, int]) -> None:
        self._backend = backend
        self._added = {one: np.array([number], np.int32) for one, number in added.items()}
        longest_first = sorted(added, key=len, reverse=True)
        self._cut = re.compile(f"({'|'.join(map(re.escape, longest_first))})").split
        self._recent: dict[str, npt.NDArray[np.int32]] = {}
        self._older: dict[str, npt.NDArray[np.int32]] = {}
        self._to_look_at, self._to_leave = _LOOKED_AT, 0
        self._num_characters = self._num_known = 0

    def ids(self, text: str) -> npt.NDArray[np.int32]:
        """Returns the ids of the tokens of a text, [N], without those that begin or end one."""
        if self._to_leave:
            self._to_leave -= 1
            (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=False)
            return np.fromiter(encoding.ids, np.int32)
        pieces = self._cut(text)
        known = {"": _NO_IDS}
        missing = []
        for segment in pieces[::2]:
            if segment in known:
                continue
            found = self._recent.get(segment)
            if found is None and (found := self._older.get(segment)) is None:
                missing.append(segment)
                found = _NO_IDS
            known[segment] = found
        if missing:
            encodings = self._backend.encode_batch_fast(missing, add_special_tokens=False)
            for segment, encoding in zip(missing, encodings):
                known[segment] = np.fromiter(encoding.ids, np.int32)
        self._remember(known)
        self._look(len(text), sum(map(len, missing)))
        # Segments and added tokens take turns, segments at both ends.
        return np.concatenate(
            [self._added[one] if at % 2 else known[one] for at, one in enumerate(pieces)]
        )

    def forget(self) -> None:
        """Empties the memory."""
        self._recent, self._older = {}, {}

    def _look(self, num_characters: int, num_missing: int) -> None:
        """Counts a text that was cut, and decides about the next ones."""
        self._num_characters += num_characters
        self._num_known += num_characters - num_missing
        self._to_look_at -= 1
        if not self._to_look_at:
            if self._num_known < _WORTH * self._num_characters:
                self._to_leave = _LEFT_WHOLE
            self._to_look_at, self._num_characters, self._num_known = _LOOKED_AT, 0, 0

    def _remember(self, known: Mapping[str, npt.NDArray[np.int32]]) -> None:
        for segment, ids in known.items():
            if segment and len(segment) <= _LONGEST_CACHED:
                self._recent[segment] = ids
        if len(self._recent) > _MOST_CACHED:
            self._older, self._recent = self._recent, {}


def read_segments(backend: Any) -> TextSegments | None:
    """Returns the segments of a tokenizer of `tokenizers`; None where texts must stay whole."""
    added = backend.get_added_tokens_decoder()
    has_context = any(one.lstrip or one.rstrip or one.single_word for one in added.values())
    is_random = getattr(backend.model, "dropout", None)
    if has_context or is_random or backend.encode_special_tokens:
        return None
    step = settings_of(backend.pre_tokenizer) or {"type": "Sequence"}
    steps = [step, *step.get("pretokenizers", ())]
    if any(one["type"] not in _KINDS or one.get("add_prefix_space") for one in steps):
        return None
    # Those that are searched in normalized text come second, in what the others leave.
    first = {n: one for n, one in added.items() if one.content and not one.normalized}
    cuts = first
    if len(first) > _MOST_ADDED:
        cuts = {number: one for number, one in first.items() if one.special}
    names = {one.content: number for number, one in cuts.items()}
    others = {one.content for one in first.values()} - names.keys()
    if not 0 < len(names) <= _MOST_ADDED or any(
        _overlap(name, other) for name in names for other in others
    ):
        return None
    return TextSegments(backend, names)


def _overlap(one: str, other: str) -> bool:
    """Returns whether two tokens may share characters of a text."""
    return (
        one in other
        or other in one
        or any(
            one.endswith(other[:size]) or other.endswith(one[:size])
            for size in range(1, min(len(one), len(other)))
        )
    )
