"""pure. The columns that a batch of sequences may have.

A column says all that is needed to split, gather, send, pack and store one field. A new field is
one more row of the table below; a field of the user's (`advantages`, `sample_id`) becomes an
`extra` column when a sample has it.

    name          one row per   travels
    sources       sequence      always
    tokens        token         always
    last_labels   sequence      always
    weights       sequence      unless loss_mask does
    flags         token         unless loss_mask does
    labels        token         where they are not the next tokens
    loss_mask     token         where a sequence has several weights
    position_ids  token         where they do not count from zero
    extra ones    either        where the samples have them
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

_WORD = 4
"""Bytes of an int32, the unit of the wire format."""


class Column(NamedTuple):
    """A field of a batch: one row per token or per sequence."""

    name: str
    dtype: str
    """By numpy's name; neither objects nor strings."""
    per_token: bool
    shape: tuple[int, ...] = ()
    """Shape of one row: () for a number, (3,) for positions along three axes."""
    extra: bool = False
    """Given by the user; otherwise one of this module's."""

    def num_rows(self, num_sequences: int, num_tokens: int) -> int:
        """Return the rows that a batch of this size has."""
        return num_tokens if self.per_token else num_sequences

    def zeros(self, num_rows: int) -> npt.NDArray[Any]:
        """Return so many rows of zeros."""
        return np.zeros((num_rows, *self.shape), self.dtype)

    def num_words(self, num_rows: int) -> int:
        """Return the int32 words that so many rows take on the wire: their bytes, rounded up."""
        return -(-num_rows * self._row_bytes // _WORD)

    def to_words(self, values: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
        """Return the rows as int32 words; a view where they fill whole words."""
        values = np.ascontiguousarray(values).reshape(-1)
        num_bytes = values.size * values.itemsize
        if num_bytes % _WORD == 0:
            return values.view(np.int32)
        padded = np.zeros(-(-num_bytes // _WORD), np.int32)
        padded.view(np.uint8)[:num_bytes] = values.view(np.uint8)
        return padded

    def from_words(self, words: npt.NDArray[np.int32], num_rows: int) -> npt.NDArray[Any]:
        """Return the rows that `to_words` made words of; a view where its address allows one."""
        values = words.view(np.uint8)[: num_rows * self._row_bytes].view(self.dtype)
        return np.require(values, requirements="A").reshape(num_rows, *self.shape)

    @property
    def _row_bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


SOURCES = Column("sources", "int32", per_token=False)
TOKENS = Column("tokens", "int32", per_token=True)
LAST_LABELS = Column("last_labels", "int32", per_token=False)
WEIGHTS = Column("weights", "float32", per_token=False)
FLAGS = Column("flags", "uint8", per_token=True)
LABELS = Column("labels", "int32", per_token=True)
LOSS_MASK = Column("loss_mask", "float32", per_token=True)
POSITION_IDS = Column("position_ids", "int32", per_token=True)

ALWAYS = (SOURCES, TOKENS, LAST_LABELS, WEIGHTS, FLAGS)
"""Columns that every batch has."""
DERIVABLE = (LABELS, LOSS_MASK, POSITION_IDS)
"""Columns that a batch has where they do not follow from those that it always has."""

Form = tuple[Column, ...]
"""The columns that a batch has beyond ALWAYS: those of DERIVABLE in that order, then extra ones by
name.
"""


def form_of(columns: Iterable[Column]) -> Form:
    """Return the columns beyond ALWAYS in the order of a form.

    Raises ValueError for two columns of one name that differ in type or shape.
    """
    extra = {column for column in columns if column.extra}
    in_order = sorted(extra)
    for one, other in pairwise(in_order):
        if one.name == other.name:
            raise ValueError(
                f"'{one.name}' must have one type and shape in a global batch, but is "
                f"{_description(one)} in some samples and {_description(other)} in others"
            )
    present = set(columns)
    return (*(column for column in DERIVABLE if column in present), *in_order)


def wire_columns(form: Form) -> tuple[Column, ...]:
    """Return the columns that travel, in the order in which they do."""
    replaced = (WEIGHTS, FLAGS) if LOSS_MASK in form else ()
    return (*(column for column in ALWAYS if column not in replaced), *form)


def num_words(num_sequences: int, num_tokens: int, form: Form) -> int:
    """Return the int32 words that so many sequences and tokens take on the wire."""
    return sum(
        column.num_words(column.num_rows(num_sequences, num_tokens))
        for column in wire_columns(form)
    )


def _description(column: Column) -> str:
    shape = f"[{', '.join(map(str, column.shape))}] " if column.shape else ""
    return f"{shape}{column.dtype} per {'token' if column.per_token else 'sequence'}"
