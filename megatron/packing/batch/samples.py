"""pure. The sequences that one rank holds, as flat arrays; also as they travel.

Nothing here is done sequence by sequence. Nearly always the labels are the next tokens, the mask is
one weight or zero in each sequence, and positions count from zero: then none of the three is kept,
and a token takes 5 bytes (its id and one flag) in memory and on the wire. `form` names the columns
that are kept besides (see `columns`).

    [7 8 9] [5 6]    tokens   7 8 9 5 6     lengths      3 2
                     flags    0 1 1 1 0     last_labels  2 4     labels would be 8 9 2 6 4
                                            weights      1 .5    the mask would be 0 1 1 .5 0
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.packing.batch.columns import (
    ALWAYS,
    FLAGS,
    LABELS,
    LAST_LABELS,
    LOSS_MASK,
    POSITION_IDS,
    SOURCES,
    TOKENS,
    WEIGHTS,
    Column,
    Form,
    form_of,
    num_words,
    wire_columns,
)

IntArray = npt.NDArray[np.int64]
Columns = Mapping[Column, npt.NDArray[Any]]


class Fields(NamedTuple):
    """What a model is trained on, in full; one entry per token each."""

    tokens: npt.NDArray[np.int32]
    labels: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.float32]
    position_ids: npt.NDArray[np.int32]


@dataclass(frozen=True, kw_only=True, eq=False)
class Samples:
    """n sequences of T tokens in all, one after the other, without padding."""

    lengths: IntArray
    """int64 [n]"""
    columns: Columns
    """ALWAYS and those of `form`: [n, *shape] or [T, *shape] each.

    sources: a number of the user's, by which losses may be told apart. last_labels: the label of
    each sequence's last token. weights: of the tokens that count, in the loss's sum. flags: 1 where
    a token's label counts.
    """

    @classmethod
    def none(cls) -> Samples:
        """Return no sequences at all."""
        return cls(
            lengths=np.empty(0, np.int64), columns={column: column.zeros(0) for column in ALWAYS}
        )

    @classmethod
    def of(
        cls,
        lengths: IntArray,
        sources: npt.NDArray[np.int32],
        tokens: npt.NDArray[Any],
        labels: npt.NDArray[Any],
        loss_mask: npt.NDArray[np.float32],
        position_ids: npt.NDArray[Any] | None = None,
    ) -> Samples:
        """Return the sequences with as few columns as hold all of them.

        Ids are integers of any type, one entry per token each; position_ids None: they count from
        zero.
        """
        if not lengths.size:
            return cls.none()
        ends = np.cumsum(lengths)
        tokens, labels = (ids.astype(np.int32, copy=False) for ids in (tokens, labels))
        flags = loss_mask != 0
        weights = np.ones(lengths.size, np.float32)
        kept: dict[Column, npt.NDArray[Any]] = {}
        if not _are_next_tokens(labels, tokens, ends):
            kept[LABELS] = labels
        if not np.array_equal(loss_mask, flags):
            weights = np.maximum.reduceat(loss_mask, ends - lengths)
            if not np.array_equal(loss_mask, flags * np.repeat(weights, lengths)):
                kept[LOSS_MASK] = loss_mask
        if position_ids is not None and not np.array_equal(position_ids, counted(lengths)):
            kept[POSITION_IDS] = position_ids.astype(np.int32, copy=False)
        always = (sources, tokens, labels[ends - 1], weights, flags.view(np.uint8))
        return cls(lengths=lengths, columns={**dict(zip(ALWAYS, always)), **kept})

    def with_extra(self, extra: Columns) -> Samples:
        """Return the same sequences with columns of the user's."""
        return replace(self, columns={**self.columns, **extra})

    @property
    def form(self) -> Form:
        """The columns that are kept beyond those that always are."""
        return form_of(self.columns)

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """int32 [T]"""
        return self.columns[TOKENS]

    @property
    def sources(self) -> npt.NDArray[np.int32]:
        """int32 [n]"""
        return self.columns[SOURCES]

    @property
    def num_loss_tokens(self) -> IntArray:
        """int64 [n]: how many tokens of each sequence count."""
        if not self.lengths.size:
            return np.empty(0, np.int64)
        return np.add.reduceat(
            self.columns[FLAGS], np.cumsum(self.lengths) - self.lengths, dtype=np.int64
        )

    def fields(self) -> Fields:
        """Return what a model is trained on, in full."""
        return Fields(
            self.tokens, *(self._whole(column) for column in (LABELS, LOSS_MASK, POSITION_IDS))
        )

    def extra(self) -> dict[Column, npt.NDArray[Any]]:
        """Return the user's columns."""
        return {column: values for column, values in self.columns.items() if column.extra}

    def in_form(self, form: Form) -> Samples:
        """Return the same sequences with at least the columns of `form`.

        Extra ones must be there already, unless there are no sequences.
        """
        missing = {column: self._whole(column) for column in form if column not in self.columns}
        return replace(self, columns={**self.columns, **missing}) if missing else self

    def _whole(self, column: Column) -> npt.NDArray[Any]:
        """The values of a column, derived where it is not kept."""
        if column in self.columns:
            return self.columns[column]
        if column == LABELS:
            return next_tokens(self.tokens, self.columns[LAST_LABELS], np.cumsum(self.lengths))
        if column == LOSS_MASK:
            mask = np.repeat(self.columns[WEIGHTS], self.lengths)
            mask *= self.columns[FLAGS]
            return mask
        if column == POSITION_IDS:
            return counted(self.lengths)
        assert not self.lengths.size, f"samples without '{column.name}'"
        return column.zeros(0)

    def take(self, ids: IntArray) -> Samples:
        """Return the sequences of these numbers, in this order."""
        if np.array_equal(ids, np.arange(self.lengths.size)):
            return self
        starts = np.cumsum(self.lengths) - self.lengths
        return self._gathered(ids, spread(starts[ids], self.lengths[ids]), self.lengths[ids])

    def first(self, limit: int) -> Samples:
        """Return all sequences, each cut after `limit` tokens."""
        lengths = np.minimum(self.lengths, limit)
        starts, ends = np.cumsum(self.lengths) - self.lengths, np.cumsum(lengths)
        index = spread(starts, lengths)
        cut = self._gathered(np.arange(lengths.size), index, lengths)
        last_labels = (
            self._whole(LABELS)[index[ends - 1]] if lengths.size else cut.columns[LAST_LABELS]
        )
        return replace(cut, columns={**cut.columns, LAST_LABELS: last_labels})

    def split(self, counts: IntArray) -> list[Samples]:
        """Return the first counts[0] sequences, the next counts[1] ..., as views."""
        ends = np.cumsum(counts)[:-1]
        token_ends = np.concatenate(([0], np.cumsum(self.lengths)))[ends]
        parts = {
            column: np.split(values, token_ends if column.per_token else ends)
            for column, values in self.columns.items()
        }
        lengths = np.split(self.lengths, ends)
        return [
            Samples(lengths=lengths[i], columns={column: its[i] for column, its in parts.items()})
            for i in range(len(counts))
        ]

    def _gathered(self, ids: IntArray, index: IntArray, lengths: IntArray) -> Samples:
        """Sequences `ids`, whose tokens stand at `index`."""
        columns = {
            column: values[index if column.per_token else ids]
            for column, values in self.columns.items()
        }
        return Samples(lengths=lengths, columns=columns)

    def to_words(self) -> npt.NDArray[np.int32]:
        """Return everything but the lengths as int32 [num_words(n, T, form)]."""
        return np.concatenate(
            [column.to_words(self.columns[column]) for column in wire_columns(self.form)]
        )

    @classmethod
    def from_words(cls, words: npt.NDArray[np.int32], lengths: IntArray, form: Form) -> Samples:
        """Return what `to_words` was called on; views of `words` where they can be.

        Raises ValueError where `words` are not as many as these sequences take.
        """
        size = (lengths.size, int(lengths.sum()))
        if words.size != num_words(*size, form):
            raise ValueError(
                f"{size[0]} sequences take {num_words(*size, form)} words, but there are "
                f"{words.size}"
            )
        columns: dict[Column, npt.NDArray[Any]] = {}
        start = 0
        for column in wire_columns(form):
            num_rows = column.num_rows(*size)
            end = start + column.num_words(num_rows)
            columns[column] = column.from_words(words[start:end], num_rows)
            start = end
        if LOSS_MASK in columns:
            columns[WEIGHTS] = np.ones(lengths.size, np.float32)
            columns[FLAGS] = (columns[LOSS_MASK] != 0).view(np.uint8)
        return cls(lengths=lengths, columns=columns)


def joined(parts: Sequence[Samples]) -> Samples:
    """Return all sequences, one part after the other, with the columns of all of them.

    Raises ValueError where the parts' extra columns differ.
    """
    parts = [part for part in parts if part.lengths.size]
    if len(parts) < 2:
        return parts[0] if parts else Samples.none()
    form = common_form([part.form for part in parts])
    parts = [part.in_form(form) for part in parts]
    columns = {
        column: np.concatenate([part.columns[column] for part in parts])
        for column in (*ALWAYS, *form)
    }
    return Samples(lengths=np.concatenate([part.lengths for part in parts]), columns=columns)


def common_form(forms: Sequence[Form]) -> Form:
    """Return the form that batches of these forms, none of them empty, can all take.

    Raises ValueError where an extra column is not in all of them.
    """
    common = form_of({column for form in forms for column in form})
    for column in common:
        if column.extra and not all(column in form for form in forms):
            raise ValueError(
                f"'{column.name}' must be in all samples of a global batch or in none, but some "
                "lack it; give it a value in each"
            )
    return common


def spread(starts: IntArray, lengths: IntArray) -> npt.NDArray[np.int64]:
    """Return start, start + 1, ... for each length, at least 1: [5, 0], [2, 3] -> [5, 6, 0, 1,
    2]."""
    ends = np.cumsum(lengths)
    steps = np.ones(ends[-1] if ends.size else 0, np.int64)
    steps[ends[:-1]] = starts[1:] - starts[:-1] - lengths[:-1] + 1
    steps[:1] = starts[:1]
    return np.cumsum(steps, out=steps)


def counted(lengths: IntArray) -> npt.NDArray[np.int32]:
    """Return positions that count from zero, lengths at least 1: [2, 3] -> [0, 1, 0, 1, 2]."""
    ends = np.cumsum(lengths)
    steps = np.ones(ends[-1] if ends.size else 0, np.int32)
    steps[ends[:-1]] = 1 - lengths[:-1]
    steps[:1] = 0
    return np.cumsum(steps, out=steps)


def next_tokens(
    tokens: npt.NDArray[np.int32], last_labels: npt.NDArray[np.int32], ends: IntArray
) -> npt.NDArray[np.int32]:
    """Return the tokens that follow, in sequences that end at `ends` with `last_labels`."""
    labels = np.empty_like(tokens)
    labels[:-1] = tokens[1:]
    labels[ends - 1] = last_labels
    return labels


def _are_next_tokens(
    labels: npt.NDArray[np.int32], tokens: npt.NDArray[np.int32], ends: IntArray
) -> bool:
    """Whether that is so but at the ends, which are kept in any case."""
    differ = labels[:-1] != tokens[1:]
    differ[ends[:-1] - 1] = False
    return not differ.any()
