"""pure. Parameters as HuggingFace tensors, and the part of them that each rank holds.

A parameter is a stack of blocks of rows of HuggingFace tensors, of which a tensor-parallel rank
holds a part. That is said once, by `copies`: reading copies each piece one way, writing the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Literal, NamedTuple, Protocol

Sharding = Literal["whole", "columns", "rows", "sections", "heads", "vocabulary"]
"""Ways in which tensor-parallel ranks share a parameter.

whole: each rank has all of it.
columns, rows: each has a run of them.
sections: rows of each of its parts, one after the other.
heads: rows of heads in groups, [queries, key, value] for each group.
vocabulary: rows, of which the last rank has padding.
"""

Stack = Literal["matrices", "rows", "columns"]
"""Ways in which matrices [n, m] of experts make one tensor.

matrices: one behind the other, [experts, n, m].
rows: one below the other, [experts * n, m].
columns: column after column, [n, m * experts], as PEFT has B: column c * experts + e is column c of
expert e.
"""


class View(NamedTuple):
    """Place of the rows of a part in its tensor.

    Row r is row `r // run * stride + offset + r % run` of the tensor (or of one matrix of a stack
    of them), so that gates and queries that alternate by heads of d are offsets 0 and d, run d,
    stride 2 d.
    """

    offset: int = 0
    run: int = 0
    """0: all rows stand together."""
    stride: int = 0
    is_transposed: bool = False
    expert: int | None = None
    """Number of the matrix (or row) in a stack of experts; None for a tensor that is no stack."""
    stack: Stack = "matrices"

    def rows(self, rows: slice) -> slice | list[int]:
        """Returns where these rows of the part stand in the tensor."""
        if not self.run:
            return slice(rows.start + self.offset, rows.stop + self.offset)
        return [
            row // self.run * self.stride + self.offset + row % self.run
            for row in range(rows.start, rows.stop)
        ]


class Part(NamedTuple):
    """Rows of one HuggingFace tensor, which a parameter is made of."""

    name: str
    shape: tuple[int, ...]
    view: View = View()
    stored: tuple[int, ...] = ()
    """Shape of the whole tensor; empty if the part is all of it."""

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the tensor in the file."""
        return self.stored or self.shape

    @property
    def matrix_shape(self) -> tuple[int, ...]:
        """Shape of each expert's matrix (or row) in a stack."""
        if self.view.stack == "matrices":
            return self.stored[1:]
        return self.shape if self.view.stack == "rows" else (self.stored[0], self.shape[1])


class Weight(NamedTuple):
    """One parameter of the whole model, as megatron-core would have it on a single rank."""

    sharding: Sharding
    parts: tuple[Part, ...]
    is_expert: bool = False
    num_groups: int = 1
    """Groups of heads, of sharding "heads"."""
    part: str = ""
    """Logical name, as in `packing.model.names`."""


class Copy(NamedTuple):
    """A block of a part's rows, and the row of a rank's parameter where it begins."""

    part: int
    rows: slice
    columns: slice
    row: int
    """Columns of the parameter are always all of its own."""


class Tensors(Protocol):
    """The tensors of a folder, by the parameters that they make up: those of a model, or those of
    an adapter."""

    tied: tuple[str, str] | None
    """Two names that stand for the same tensor; a folder may lack the first."""

    def concerns(self, name: str) -> bool:
        """Returns whether a parameter's values are in such a folder at all."""

    def of_parameter(self, name: str) -> Weight:
        """Returns the weight behind the name of a parameter that it concerns; KeyError where there
        is none."""

    def all(self) -> Iterator[Weight]:
        """Yields every weight of the folder."""

    def is_carried(self, name: str) -> bool:
        """Returns whether a tensor is no part of the model, but exported as it was."""


def copies(weight: Weight, rank: int, size: int, num_rows: int) -> Iterator[Copy]:
    """Yields what number `rank` of `size` tensor-parallel ranks holds of a weight, as a parameter
    of `num_rows` rows.

    Rows that no copy fills are padding of the vocabulary.
    """
    everything = slice(None)
    if weight.sharding == "columns":
        width = weight.parts[0].shape[1] // size
        yield Copy(0, slice(0, num_rows), slice(rank * width, (rank + 1) * width), 0)
        return
    if weight.sharding == "sections":
        row = 0
        for number, part in enumerate(weight.parts):
            share = part.shape[0] // size
            yield Copy(number, slice(rank * share, (rank + 1) * share), everything, row)
            row += share
        return
    begin = 0 if weight.sharding == "whole" else rank * num_rows
    blocks = _blocks(weight)
    ends = [0]
    for _, _, length in blocks:
        ends.append(ends[-1] + length)
    for (part_number, start, _), (first, last) in zip(blocks, pairwise(ends)):
        low, high = max(first, begin), min(last, begin + num_rows)
        if low < high:
            rows = slice(start + low - first, start + high - first)
            yield Copy(part_number, rows, everything, low - begin)


def _blocks(weight: Weight) -> list[tuple[int, int, int]]:
    """Rows of a fused parameter in order, such as queries, keys and values by group: (part, first
    row in it, number of rows).
    """
    per_group = [part.shape[0] // weight.num_groups for part in weight.parts]
    return [
        (part, g * rows, rows)
        for g in range(weight.num_groups)
        for part, rows in enumerate(per_group)
    ]
