"""pure. The table of columns that a batch of sequences may have.

A column says all that is needed to derive, split, gather, send, pack and store one field. A new
field is one more row of the table below; a field of the user's (`advantages`, `sample_id`) becomes
an `extra` column when a sample has it.

    name            row per   bits  travels                                 else it is
    sources         sequence    32  always
    tokens          token       32  always
    last_labels     sequence    32  always
    weights         sequence    32  unless loss_mask does                   one
    flags           token        8  unless loss_mask does                   loss_mask != 0
    labels          token       32  where they are not the next tokens      the next tokens
    loss_mask       token       32  where a sequence has several weights    flags * weights
    position_ids    token       32  where they do not count along the path  counted
    axis_positions  token   3 x 32  where a sample has them along axes      position_ids thrice
    parents         node        32  where a sequence is a tree              -1
    node_lengths    node        32  where a sequence is a tree              the sequence's length
    num_paths       token       32  where paths of a tree share tokens      flags
    first_path      token       32  where paths have fields (see `paths`)   0
    payloads        sequence    64  where a sequence has a payload          -1
    payload_costs   sequence    64  where a sequence has a payload          0
    extra ones      any        any  where the samples have them

A plain sequence is a tree of one node; "is a tree" here and elsewhere means one of several. A
tree's nodes are runs of tokens, one after the other, each
behind its parent: `parents` 0, 0 and `node_lengths` 3, 2, 4 are a trunk of 3 tokens and two
branches, in a sequence of 9 tokens whose paths have 5 and 7.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

TOKEN, SEQUENCE, NODE, PATH = "token", "sequence", "node", "path"
"""Scopes: what a column has one row for. Any other word is the scope of a user's columns with a
number of rows per sequence of their own, as many as `Sizes.ragged` says (references to images).
"""
NUM_AXES = 3
"""Axes of multimodal rotary positions: time, height, width."""
_WORD = 4
"""Bytes of an int32, the unit of the wire format."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Sizes:
    """The number of rows that each of n sequences has in the columns of a scope."""

    lengths: IntArray
    """int64 [n], tokens."""
    ragged: Mapping[str, IntArray] = field(default_factory=dict)
    """int64 [n] for each further scope; one that is not there has a row per sequence."""

    def rows(self, scope: str) -> IntArray:
        """Returns the rows of each sequence, int64 [n]."""
        if scope == TOKEN:
            return self.lengths
        return self.ragged[scope] if scope in self.ragged else np.ones_like(self.lengths)

    def num_rows(self, scope: str) -> int:
        """Returns the rows of all sequences."""
        if scope == TOKEN:
            return self.num_tokens
        return int(self.rows(scope).sum()) if scope in self.ragged else self.lengths.size

    @cached_property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return int(self.lengths.sum())

    def take(self, ids: npt.NDArray[Any]) -> Sizes:
        """Returns the sizes of some sequences, in this order."""
        ragged = {scope: rows[ids] for scope, rows in self.ragged.items()}
        return Sizes(lengths=self.lengths[ids], ragged=ragged)

    def split(self, ends: npt.NDArray[np.int64]) -> list[Sizes]:
        """Returns the sizes of the sequences before `ends[0]`, from there to `ends[1]` ..."""
        ragged = {scope: split_at(rows, ends) for scope, rows in self.ragged.items()}
        return [
            Sizes(lengths=lengths, ragged={scope: rows[i] for scope, rows in ragged.items()})
            for i, lengths in enumerate(split_at(self.lengths, ends))
        ]

    @classmethod
    def joined(cls, parts: Sequence[Sizes]) -> Sizes:
        """Returns the sizes of all sequences, one part after the other."""
        scopes = dict.fromkeys(scope for part in parts for scope in part.ragged)
        ragged = {scope: np.concatenate([part.rows(scope) for part in parts]) for scope in scopes}
        return cls(lengths=np.concatenate([part.lengths for part in parts]), ragged=ragged)


class Column(NamedTuple):
    """A field of a batch: so many rows for each sequence."""

    name: str
    dtype: str
    """Numpy's name of a type of numbers."""
    scope: str
    shape: tuple[int, ...] = ()
    """Shape of one row: () for a number, (3,) for positions along three axes."""
    extra: bool = False
    """Given by the user; otherwise a row of this module's table."""
    unless: str = ""
    """Name of the column in whose company this one does not travel."""
    derive: Callable[[Sizes, Mapping[Any, npt.NDArray[Any]]], npt.NDArray[Any]] | None = None
    """Function of sizes and columns that gives its values where it is not kept, or did not travel.
    """

    def zeros(self, num_rows: int) -> npt.NDArray[Any]:
        """Returns so many rows of zeros."""
        return np.zeros((num_rows, *self.shape), self.dtype)

    def num_words(self, num_rows: int) -> int:
        """Returns the int32 words that so many rows take on the wire: their bytes, rounded up."""
        return -(-num_rows * self._row_bytes // _WORD)

    def to_words(self, values: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
        """Returns the rows as int32 words; a view where they fill whole words.

        5 flags of a byte each, 1 0 1 1 1    ->    2 words of the bytes 1 0 1 1 and 1 0 0 0
        """
        values = np.ascontiguousarray(values).reshape(-1)
        num_bytes = values.size * values.itemsize
        if num_bytes % _WORD == 0:
            return values.view(np.int32)
        padded = np.zeros(-(-num_bytes // _WORD), np.int32)
        padded.view(np.uint8)[:num_bytes] = values.view(np.uint8)
        return padded

    def from_words(self, words: npt.NDArray[np.int32], num_rows: int) -> npt.NDArray[Any]:
        """Returns the rows that `to_words` made words of; a view where its address allows one."""
        values = words.view(np.uint8)[: num_rows * self._row_bytes].view(self.dtype)
        if not values.flags.aligned:  # a float64 column may begin at an odd word
            values = values.copy()
        return values.reshape(num_rows, *self.shape)

    @property
    def _row_bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


Columns = Mapping[Column, npt.NDArray[Any]]


def expand_ranges(starts: IntArray, lengths: IntArray) -> IntArray:
    """Returns start, start + 1, ... for each length: [5, 0], [2, 3] -> [5, 6, 0, 1, 2]."""
    if lengths.size and not lengths.all():
        starts, lengths = starts[lengths > 0], lengths[lengths > 0]
    ends = np.cumsum(lengths)
    # A running sum of steps: 1 within a range, and a jump where the next one begins.
    steps = np.ones(ends[-1] if ends.size else 0, np.int64)
    steps[ends[:-1]] = starts[1:] - starts[:-1] - lengths[:-1] + 1
    steps[:1] = starts[:1]
    return np.cumsum(steps, out=steps)


def split_at(values: npt.NDArray[Any], ends: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
    """Returns the rows before `ends[0]`, from there to `ends[1]` ..., as views: `numpy.split`, at a
    sixth of its time for each.
    """
    bounds = [0, *ends.tolist(), len(values)]
    return [values[start:end] for start, end in pairwise(bounds)]


def count_from_zero(lengths: IntArray) -> npt.NDArray[np.int32]:
    """Returns 0, 1, ... for each length, at least 1: [2, 3] -> [0, 1, 0, 1, 2]."""
    # Copies of one row take a fifth of the time that a cumulative sum takes, in which each number
    # waits for the one before it.
    longest = np.arange(lengths.max(initial=0), dtype=np.int32)
    return np.concatenate([longest[:0], *(longest[:length] for length in lengths.tolist())])


def next_tokens(
    tokens: npt.NDArray[np.int32], last_labels: npt.NDArray[np.int32], ends: IntArray
) -> npt.NDArray[np.int32]:
    """Returns the tokens that follow, in sequences that end at `ends` with `last_labels`."""
    labels = np.empty_like(tokens)
    labels[:-1] = tokens[1:]
    labels[ends - 1] = last_labels
    return labels


def depths_of_nodes(rows: IntArray, parents: IntArray, node_lengths: IntArray) -> IntArray:
    """Returns the tokens of the path before each node, int64 [nodes].

    Args:
        rows: int64 [n], nodes of each sequence.
        parents: int64 [nodes], number of the parent within its sequence; -1 for a root.

        one sequence, parents -1 0 0 2, node_lengths 3 2 4 1    ->    0 3 3 7
    """
    first = np.repeat(np.cumsum(rows) - rows, rows)  # of the node's sequence
    depths = np.zeros(parents.size, np.int64)
    for i in np.flatnonzero(parents >= 0):  # parents stand before their children
        parent = first[i] + parents[i]
        depths[i] = depths[parent] + node_lengths[parent]
    return depths


def _weights(sizes: Sizes, columns: Columns) -> npt.NDArray[Any]:
    return np.ones(sizes.lengths.size, np.float32)


def _flags(sizes: Sizes, columns: Columns) -> npt.NDArray[Any]:
    return (columns[LOSS_MASK] != 0).view(np.uint8)


def _labels(sizes: Sizes, columns: Columns) -> npt.NDArray[Any]:
    return next_tokens(columns[TOKENS], columns[LAST_LABELS], np.cumsum(sizes.lengths))


def _loss_mask(sizes: Sizes, columns: Columns) -> npt.NDArray[Any]:
    mask = np.repeat(columns[WEIGHTS], sizes.lengths)
    mask *= columns[FLAGS]
    return mask


def _position_ids(sizes: Sizes, columns: Columns) -> npt.NDArray[Any]:
    if NODE not in sizes.ragged:
        return count_from_zero(sizes.lengths)
    lengths, parents = (columns[each].astype(np.int64) for each in (NODE_LENGTHS, PARENTS))
    depths = depths_of_nodes(sizes.ragged[NODE], parents, lengths)
    return count_from_zero(lengths) + np.repeat(depths, lengths).astype(np.int32)


def _axis_positions(sizes: Sizes, columns: Columns) -> npt.NDArray[Any]:
    """Derives positions of text, which are the same along all axes."""
    positions = columns.get(POSITION_IDS)
    positions = _position_ids(sizes, columns) if positions is None else positions
    return np.repeat(positions[:, None], NUM_AXES, axis=1)


def _parents(sizes: Sizes, columns: Columns) -> npt.NDArray[Any]:
    return np.full(sizes.lengths.size, -1, np.int32)


def _node_lengths(sizes: Sizes, columns: Columns) -> npt.NDArray[Any]:
    return sizes.lengths.astype(np.int32)


def _first_path(sizes: Sizes, columns: Columns) -> npt.NDArray[Any]:
    return np.zeros(sizes.num_rows(TOKEN), np.int32)


def _payloads(sizes: Sizes, columns: Columns) -> npt.NDArray[Any]:
    return np.full(sizes.lengths.size, -1, np.int64)


def _payload_costs(sizes: Sizes, columns: Columns) -> npt.NDArray[Any]:
    return np.zeros(sizes.lengths.size, np.float64)


def _num_paths(sizes: Sizes, columns: Columns) -> npt.NDArray[Any]:
    return columns[FLAGS].astype(np.int32)


SOURCES = Column("sources", "int32", SEQUENCE)
TOKENS = Column("tokens", "int32", TOKEN)
LAST_LABELS = Column("last_labels", "int32", SEQUENCE)
WEIGHTS = Column("weights", "float32", SEQUENCE, unless="loss_mask", derive=_weights)
FLAGS = Column("flags", "uint8", TOKEN, unless="loss_mask", derive=_flags)
LABELS = Column("labels", "int32", TOKEN, derive=_labels)
LOSS_MASK = Column("loss_mask", "float32", TOKEN, derive=_loss_mask)
POSITION_IDS = Column("position_ids", "int32", TOKEN, derive=_position_ids)
AXIS_POSITIONS = Column("axis_positions", "int32", TOKEN, (NUM_AXES,), derive=_axis_positions)
PARENTS = Column("parents", "int32", NODE, derive=_parents)
NODE_LENGTHS = Column("node_lengths", "int32", NODE, derive=_node_lengths)
NUM_PATHS = Column("num_paths", "int32", TOKEN, derive=_num_paths)
FIRST_PATH = Column("first_path", "int32", TOKEN, derive=_first_path)
PAYLOADS = Column("payloads", "int64", SEQUENCE, derive=_payloads)
"""Numbers in the list of payloads that is kept beside the samples; -1 for none."""
PAYLOAD_COSTS = Column("payload_costs", "float64", SEQUENCE, derive=_payload_costs)

ALWAYS = (SOURCES, TOKENS, LAST_LABELS, WEIGHTS, FLAGS)
"""Columns that every batch has."""
DERIVABLE = (
    *(LABELS, LOSS_MASK, POSITION_IDS, AXIS_POSITIONS),
    *(PARENTS, NODE_LENGTHS, NUM_PATHS, FIRST_PATH),
    *(PAYLOADS, PAYLOAD_COSTS),
)
"""Columns that a batch has where they do not follow from those that it always has."""

Schema = tuple[Column, ...]
"""The columns that a batch has beyond ALWAYS: those of DERIVABLE in that order, then extra ones by
name.
"""


def schema_of(columns: Iterable[Column]) -> Schema:
    """Returns the columns beyond ALWAYS in the order of a schema."""
    present = set(columns)
    extra = sorted(column for column in present if column.extra)
    return (*(column for column in DERIVABLE if column in present), *extra)


def wire_columns(schema: Schema) -> tuple[Column, ...]:
    """Returns the columns that travel, in the order in which they do."""
    names = {column.name for column in schema}
    return (*(column for column in ALWAYS if column.unless not in names), *schema)


def num_words(sizes: Sizes, schema: Schema) -> int:
    """Returns the int32 words that sequences of these sizes take on the wire."""
    return sum(column.num_words(sizes.num_rows(column.scope)) for column in wire_columns(schema))
