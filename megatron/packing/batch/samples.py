"""pure. The sequences that one rank holds, as flat arrays; also as they travel.

No token is handled in Python: fields are whole arrays, and only `take` goes through the sequences,
one slice of each. Nearly always the labels are the next tokens, the mask is
one weight or zero in each sequence, and positions count from zero: then none of the three is kept,
and a token takes 5 bytes (its id and one flag) in memory and on the wire. `schema` names the
columns that are kept besides (see `columns`).

    [7 8 9] [5 6]    tokens   7 8 9 5 6     lengths      3 2
                     flags    0 1 1 1 0     last_labels  2 4     labels:    8 9 2 6 4
                                            weights      1 .5    loss_mask: 0 1 1 .5 0
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
    NODE,
    POSITION_IDS,
    SEQUENCE,
    SOURCES,
    TOKEN,
    TOKENS,
    Column,
    Columns,
    IntArray,
    Schema,
    Sizes,
    count_from_zero,
    expand_ranges,
    num_words,
    schema_of,
    split_at,
    wire_columns,
)
from megatron.packing.batch.extra import unified


class Fields(NamedTuple):
    """Values that a model is trained on, in full; [T] each."""

    tokens: npt.NDArray[np.int32]
    labels: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.float32]
    position_ids: npt.NDArray[np.int32]


@dataclass(frozen=True, kw_only=True, eq=False)
class Samples:
    """n sequences of T tokens in all, one after the other, without padding."""

    sizes: Sizes
    columns: Columns
    """ALWAYS and those of `schema`: [rows of the column's scope, *shape] each. ALWAYS are:

        sources      number of the data source that the user gave the sequence, by which losses
                     are reported, per sequence
        tokens       ids, per token
        last_labels  label of the last token, per sequence
        weights      weight in the loss's sum of the tokens that count, per sequence
        flags        1 if a token's label counts, else 0, per token
    """

    @classmethod
    def none(cls) -> Samples:
        """Returns no sequences at all."""
        return cls(
            sizes=Sizes(lengths=np.empty(0, np.int64)),
            columns={column: column.zeros(0) for column in ALWAYS},
        )

    @property
    def lengths(self) -> IntArray:
        """int64 [n]"""
        return self.sizes.lengths

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
        """Returns the sequences with as few columns as hold all of them.

        Args:
            tokens, labels, position_ids: integers of any type, [T] each. Positions that are None
                count from zero.
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
        # A mask of zeros and ones is its flags. Else each sequence may have one weight, which must
        # be the largest value, as masked tokens are zero.
        if not np.array_equal(loss_mask == 1, flags):
            # reduceat needs lengths of at least 1; item.py refuses empty sequences.
            weights = np.maximum.reduceat(loss_mask, ends - lengths)
            if not np.array_equal(loss_mask, flags * np.repeat(weights, lengths)):
                kept[LOSS_MASK] = loss_mask
        if position_ids is not None and not np.array_equal(position_ids, count_from_zero(lengths)):
            kept[POSITION_IDS] = position_ids.astype(np.int32, copy=False)
        always = (sources, tokens, labels[ends - 1], weights, flags.view(np.uint8))
        sizes = Sizes(lengths=lengths)
        return cls(sizes=sizes, columns={**dict(zip(ALWAYS, always)), **kept})

    def with_columns(
        self, columns: Columns, ragged: Mapping[str, IntArray] | None = None
    ) -> Samples:
        """Returns the same sequences with further columns: the user's, or those of trees.

        Args:
            ragged: rows of each sequence, int64 [n], by scope: {"node": [1, 3]} with PARENTS and
                NODE_LENGTHS of four nodes.
        """
        sizes = replace(self.sizes, ragged={**self.sizes.ragged, **(ragged or {})})
        return Samples(sizes=sizes, columns={**self.columns, **columns})

    @property
    def schema(self) -> Schema:
        """Columns that are kept beyond those that always are."""
        return schema_of(self.columns) if len(self.columns) > len(ALWAYS) else ()

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
        # Lengths are at least 1, as reduceat needs: item.py refuses empty sequences.
        starts = np.cumsum(self.lengths) - self.lengths
        return np.add.reduceat(self.columns[FLAGS], starts, dtype=np.int32).astype(np.int64)

    def fields(self) -> Fields:
        """Returns what a model is trained on, in full."""
        return Fields(
            self.tokens, *(self.values_of(column) for column in (LABELS, LOSS_MASK, POSITION_IDS))
        )

    def extra(self) -> dict[Column, npt.NDArray[Any]]:
        """Returns the user's columns."""
        return {column: values for column, values in self.columns.items() if column.extra}

    def with_schema(self, schema: Schema) -> Samples:
        """Returns the same sequences with at least the columns of `schema`.

        Extra columns must be there already, perhaps of a smaller type, unless there are no
        sequences.
        """
        missing = [column for column in schema if column not in self.columns]
        if not missing:
            return self
        scopes = {column.scope for column in missing} - {TOKEN, SEQUENCE}
        ragged = {scope: self.sizes.rows(scope) for scope in scopes}
        # A column of another type, or per sequence where each has one token, is the same one.
        names = {column.name for column in missing}
        former = {column.name: column for column in self.columns if column.name in names}
        replaced = set(former.values())
        columns = {column: each for column, each in self.columns.items() if column not in replaced}
        for column in missing:
            values = self.values_of(former.get(column.name, column))
            columns[column] = values.astype(column.dtype, copy=False)
        return Samples(
            sizes=replace(self.sizes, ragged={**self.sizes.ragged, **ragged}), columns=columns
        )

    def values_of(self, column: Column) -> npt.NDArray[Any]:
        """Returns the values of a column: its rows, derived where it is not kept."""
        if column in self.columns:
            return self.columns[column]
        if column.derive is not None:
            return column.derive(self.sizes, self.columns)
        assert not self.lengths.size, f"samples without '{column.name}'"
        return column.zeros(0)

    def take(self, numbers: IntArray) -> Samples:
        """Returns the sequences of these numbers, in this order."""
        if np.array_equal(numbers, np.arange(self.lengths.size)):
            return self  # already in this order: nothing is copied
        runs = {
            scope: self._runs(scope, numbers)
            for scope in {column.scope for column in self.columns} - {SEQUENCE}
        }
        columns = {
            column: values[numbers]
            if column.scope == SEQUENCE
            else _joined_runs(values, runs[column.scope])
            for column, values in self.columns.items()
        }
        return Samples(sizes=self.sizes.take(numbers), columns=columns)

    def _runs(self, scope: str, numbers: IntArray) -> list[slice]:
        """Returns the rows of each of some sequences: copied as runs, they take a third of the time
        that an index of all rows takes.
        """
        # rows 2 1 3, numbers 2 0    ->    rows 3 to 6, 0 to 2
        ends = np.cumsum(self.sizes.rows(scope))
        starts = ends - self.sizes.rows(scope)
        return list(map(slice, starts[numbers].tolist(), ends[numbers].tolist()))

    def truncated(self, limit: int) -> Samples:
        """Returns all sequences, each truncated to `limit` tokens.

        Raises ValueError for a tree of more tokens: a part of its nodes is another tree.
        """
        if NODE in self.sizes.ragged and (self.lengths > limit).any():
            raise ValueError(f"a tree of more than {limit} tokens cannot be truncated")
        lengths = np.minimum(self.lengths, limit)
        starts, ends = np.cumsum(self.lengths) - self.lengths, np.cumsum(lengths)
        index = expand_ranges(starts, lengths)
        columns = {
            column: values[index] if column.scope == TOKEN else values
            for column, values in self.columns.items()
        }
        if lengths.size:  # the last token that is left is labelled with the next, which is cut off
            columns[LAST_LABELS] = self.values_of(LABELS)[index[ends - 1]]
        return Samples(sizes=replace(self.sizes, lengths=lengths), columns=columns)

    def split(self, counts: IntArray) -> list[Samples]:
        """Returns the first counts[0] sequences, the next counts[1] ..., as views."""
        ends = np.cumsum(counts)[:-1]
        row_ends: dict[str, npt.NDArray[Any]] = {SEQUENCE: ends}
        for scope in {column.scope for column in self.columns} - {SEQUENCE}:
            # Rows 2 1 3, split after 2 sequences    ->    after row 3
            row_ends[scope] = np.concatenate(([0], np.cumsum(self.sizes.rows(scope))))[ends]
        parts_by_column = {
            column: split_at(values, row_ends[column.scope])
            for column, values in self.columns.items()
        }
        return [
            Samples(
                sizes=sizes, columns={column: parts[i] for column, parts in parts_by_column.items()}
            )
            for i, sizes in enumerate(self.sizes.split(ends))
        ]

    def to_words(self) -> npt.NDArray[np.int32]:
        """Returns everything but the sizes as int32 [num_words(sizes, schema)]."""
        return np.concatenate(
            [column.to_words(self.columns[column]) for column in wire_columns(self.schema)]
        )

    @classmethod
    def from_words(cls, words: npt.NDArray[np.int32], sizes: Sizes, schema: Schema) -> Samples:
        """Returns what `to_words` was called on; views of `words` where they can be.

        Raises ValueError where `words` are not as many as these sequences take.
        """
        if words.size != num_words(sizes, schema):
            raise ValueError(
                f"{sizes.lengths.size} sequences take {num_words(sizes, schema)} words, but there "
                f"are {words.size}"
            )
        columns: dict[Column, npt.NDArray[Any]] = {}
        start = 0
        for column in wire_columns(schema):
            num_rows = sizes.num_rows(column.scope)
            end = start + column.num_words(num_rows)
            columns[column] = column.from_words(words[start:end], num_rows)
            start = end
        for column in ALWAYS:
            if column not in columns and column.derive is not None:
                columns[column] = column.derive(sizes, columns)
        return cls(sizes=sizes, columns=columns)


def joined(parts: Sequence[Samples]) -> Samples:
    """Returns all sequences, one part after the other, with the columns of all of them.

    Raises ValueError where the parts' extra columns differ.
    """
    parts = [part for part in parts if part.lengths.size]
    if len(parts) < 2:
        return parts[0] if parts else Samples.none()
    schema = common_schema([SchemaOfPart.of(part.schema, part.lengths) for part in parts])
    parts = [part.with_schema(schema) for part in parts]
    columns = {
        column: np.concatenate([part.columns[column] for part in parts])
        for column in (*ALWAYS, *schema)
    }
    return Samples(sizes=Sizes.joined([part.sizes for part in parts]), columns=columns)


class SchemaOfPart(NamedTuple):
    """The columns that some sequences have, at least one."""

    schema: Schema
    has_lone_tokens: bool
    """Each sequence has one token: a row per sequence is one per token, too."""

    @classmethod
    def of(cls, schema: Schema, lengths: IntArray) -> SchemaOfPart:
        """Returns the part of sequences of these lengths."""
        return cls(schema, int(lengths.max()) == 1)


def common_schema(parts: Sequence[SchemaOfPart], agreed: Sequence[SchemaOfPart] = ()) -> Schema:
    """Returns the schema that all parts can take.

    Args:
        agreed: extra columns of the run so far. Those that the parts have keep scope and type; all
            of them are returned where there are no parts.

    Raises ValueError where an extra column is not in all of the parts, or differs.
    """
    variants: dict[str, list[tuple[Column, bool]]] = {}
    for part in parts:
        for column in (column for column in part.schema if column.extra):
            variants.setdefault(column.name, []).append((column, part.has_lone_tokens))
    for name, columns in variants.items():
        if len(columns) < len(parts):
            raise ValueError(
                f"'{name}' must be in all samples of a global batch or in none, but some "
                "lack it; give it a value in each"
            )
    for part in agreed:
        for column in part.schema:
            if column.name in variants or not parts:
                variants.setdefault(column.name, []).append((column, part.has_lone_tokens))
    extra = [unified(name, columns) for name, columns in variants.items()]
    ours = {column for part in parts for column in part.schema if not column.extra}
    return schema_of({*ours, *extra})


def _joined_runs(values: npt.NDArray[Any], runs: Sequence[slice]) -> npt.NDArray[Any]:
    """Returns some runs of rows, one after the other: as bytes, they take half of the time that
    arrays take.
    """
    rows = np.ascontiguousarray(values).data
    joined_bytes = bytearray().join(map(rows.__getitem__, runs))
    num_rows = sum(run.stop - run.start for run in runs)
    return np.frombuffer(joined_bytes, values.dtype).reshape(num_rows, *values.shape[1:])


def _are_next_tokens(
    labels: npt.NDArray[np.int32], tokens: npt.NDArray[np.int32], ends: IntArray
) -> bool:
    """Returns whether labels are the next tokens, except at the ends, which are kept anyhow."""
    differ = labels[:-1] != tokens[1:]
    differ[ends[:-1] - 1] = False  # there the next token belongs to another sequence
    return not differ.any()
