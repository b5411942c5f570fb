"""pure. Relation between a parameter of a rank and HuggingFace tensors, for reading and writing.

The parameter of the whole model consists of blocks of rows of HuggingFace tensors, and a
tensor-parallel rank has a part of it. `copies` lists the blocks of a rank: reading copies each
block from the tensor to the parameter, writing copies it back.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Literal, NamedTuple, Protocol

from megatron.packing.layers import Sharding

Stack = Literal["matrices", "rows", "columns"]
"""Ways to stack the matrices [n, m] of experts in one tensor.

matrices: [experts, n, m].
rows: one below the other, [experts * n, m].
columns: interleaved, [n, m * experts]: column c * experts + e is column c of expert e. PEFT stores
B like this.
"""


class View(NamedTuple):
    """Place of the rows of a part in a tensor, or in one matrix of a stack.

    Row r of the part is row `r // run * stride + offset + r % run` of the tensor. If queries and
    gates alternate by heads of 2 rows, the tensor has the rows q0 q1 g0 g1 q2 q3 g2 g3: queries
    have offset 0, gates have offset 2, and both have run 2 and stride 4.
    """

    offset: int = 0
    run: int = 0
    """Number of consecutive rows; 0 if all rows are consecutive."""
    stride: int = 0
    """Distance between the first rows of two runs."""
    is_transposed: bool = False
    expert: int | None = None
    """Number of the matrix (or row) in a stack of experts; None for a tensor that is no stack."""
    stack: Stack = "matrices"

    def rows(self, rows: slice) -> slice | list[int]:
        """Returns the rows of the tensor that these rows of the part are."""
        if not self.run:
            return slice(rows.start + self.offset, rows.stop + self.offset)
        return [
            row // self.run * self.stride + self.offset + row % self.run
            for row in range(rows.start, rows.stop)
        ]


class Part(NamedTuple):
    """Rows of one HuggingFace tensor that a parameter consists of."""

    name: str
    shape: tuple[int, ...]
    view: View = View()
    stored: tuple[int, ...] = ()
    """Shape of the whole tensor; empty if the part is the whole tensor."""

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
    """One parameter of the whole model, as megatron-core has it on a single rank."""

    sharding: Sharding
    parts: tuple[Part, ...]
    is_expert: bool = False
    num_groups: int = 1
    """Number of groups of heads, for the sharding "heads"."""
    part: str = ""
    """Logical name, as in `packing.model.names`."""


class Copy(NamedTuple):
    """A block of a part, and its place in the parameter of a rank."""

    part: int
    """Number of the part in `Weight.parts`."""
    rows: slice
    columns: slice
    """Rows and columns of the part."""
    row: int
    """First row of the block in the parameter. The block has all columns of the parameter."""


class Tensors(Protocol):
    """Table of the tensors in a folder and the parameters that they belong to. There are two: of a
    model (`weights.Weights`), and of an adapter (`lora.names.AdapterWeights`).
    """

    tied: tuple[str, str] | None
    """Two names of one tensor, of which a folder may lack the first; None if there are none."""

    def concerns(self, name: str) -> bool:
        """Returns whether a folder of this kind has the values of a parameter."""

    def of_parameter(self, name: str) -> Weight:
        """Returns the weight of a parameter for which `concerns` is true; raises KeyError if it has
        no row.
        """

    def all(self) -> Iterator[Weight]:
        """Yields every weight of the folder."""

    def is_carried(self, name: str) -> bool:
        """Returns whether a tensor is outside the model, and copied by an export."""


def copies(weight: Weight, rank: int, size: int, num_rows: int) -> Iterator[Copy]:
    """Yields the blocks of a weight that tensor-parallel rank `rank` of `size` has, as a parameter
    of `num_rows` rows. Rows without a block are padding of the vocabulary.

    Gate and up of 8 rows each, "sections", on rank 1 of 2: rows 4 to 7 of gate begin at row 0 of
    the parameter, rows 4 to 7 of up at row 4.
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
    """Returns the blocks that follow one another in a fused parameter: (part, first row in it,
    number of rows).

    Queries of 4 rows, keys and values of 2, in 2 groups: `[(0, 0, 2), (1, 0, 1), (2, 0, 1), (0, 2,
    2), (1, 1, 1), (2, 1, 1)]`.
    """
    per_group = [part.shape[0] // weight.num_groups for part in weight.parts]
    return [
        (part, g * rows, rows)
        for g in range(weight.num_groups)
        for part, rows in enumerate(per_group)
    ]
