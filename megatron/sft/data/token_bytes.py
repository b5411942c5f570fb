"""pure. Places of characters among the tokens of a byte-level vocabulary, by sums of bytes.

`tokenizers` can give the characters of each token, for a quarter more time than the ids alone take
(Llama 3.1). Where a token stands for its own bytes, sums of their numbers give the same places:

    "<s>hi\\n", tokens <s> hi \\n: 3, 2 and 1 bytes, which end at 3, 5 and 6
    characters [3, 5) are the tokens [1, 2)

Invariant: `find_tokens` returns the tokens that a search of character offsets returns, or None.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_BYTES = 256


class TokenBytes:
    """Numbers of bytes of all tokens."""

    def __init__(self, sizes: npt.NDArray[np.int64], normal_form: Any) -> None:
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
        ends = self._sizes[ids].cumsum()
        num_bytes = len(text) if is_ascii else len(text.encode())
        if not len(ids) or ends[-1] != num_bytes:
            return None
        found = []
        for start, end in spans:
            if not 0 < start < end or text[end - 1].isspace():
                return None
            places = (start, end)
            if not is_ascii:
                places = (len(text[:start].encode()), len(text[:end].encode()))
            before, last = ends.searchsorted(places).tolist()
            if (ends[before], ends[last]) != places:
                return None
            found.append((before + 1, last + 1))
        return found


def read_token_bytes(backend: Any) -> TokenBytes | None:
    """Returns the bytes of the tokens of a tokenizer of `tokenizers`; None if a token may stand for
    other bytes than its own: text is changed, but to a form of Unicode, or lacks some bytes.
    """
    normal_form = None
    if (normalizer := settings_of(backend.normalizer)) is not None:
        normal_form = normalizer["type"]
        if normal_form not in ("NFC", "NFKC"):
            return None
    steps = settings_of(backend.pre_tokenizer) or {}
    steps = steps.get("pretokenizers", [steps])
    is_byte_level = steps[-1].get("type") == "ByteLevel" and not any(
        step.get("add_prefix_space") for step in steps
    )
    keeps_all = all(
        step.get("type") in ("ByteLevel", "Digits")
        or (step.get("type") == "Split" and step["behavior"] != "Removed")
        for step in steps
    )
    vocabulary = backend.get_vocab(with_added_tokens=False)
    has_all = len([token for token in vocabulary if len(token) == 1]) >= _BYTES
    is_bpe = type(backend.model).__name__ == "BPE"
    if not (is_bpe and is_byte_level and keeps_all and has_all):
        return None
    added = backend.get_added_tokens_decoder()
    sizes = np.zeros(max(max(vocabulary.values()), *added, 0) + 1, np.int64)
    for token, number in vocabulary.items():
        sizes[number] = len(token)  # a character of a byte-level token is a byte
    for number, token in added.items():
        sizes[number] = len(token.content.encode())
    return TokenBytes(sizes, normal_form)


def settings_of(step: Any) -> dict[str, Any] | None:
    """Returns the settings of a normalizer or pre-tokenizer as in tokenizer.json, which has them
    behind a whole vocabulary; None for none.
    """
    return None if step is None else json.loads(step.__getstate__())
