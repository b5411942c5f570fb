"""pure. A ChunkDataset gives consecutive outputs of its child together, and keeps a SkippedSample
where a sample makes none.
"""

from typing import Any, NamedTuple

import numpy as np

from megatron.blending.arguments import check_whole
from megatron.blending.streams.failures import SkipSample
from megatron.blending.streams.items import ON_FAILURE, MultiOutput, SkipMarker
from megatron.blending.streams.node import (
    Binding,
    Ints,
    PlanBatch,
    SavableDataset,
    check_datasets,
)
from megatron.blending.streams.ranges import RangesPlan
from megatron.blending.streams.worker_config import WorkerConfig


class SkippedSample(NamedTuple):
    """Stands in a chunk for a sample that makes no output."""

    source: int
    """Number of its source among those of the tree, from 0."""
    place: str
    """Place at which a person finds it."""
    reason: str | None
    """Reason given to `SkipSample`; None for a sample that failed."""
    fault: str = ""
    """Message of its failure."""


class ChunkDataset(SavableDataset[Any]):
    """Lists of `length` consecutive outputs of the child, from its position `first` on.

    Output k begins at position `first + k * length`: with `first=10, length=4` output 2 holds the
    positions 18 to 21.

    A SkippedSample stands in the list for a sample that makes no output, or several. Unlike a
    batch, a chunk is never filled with later samples. So its content follows from its number alone,
    and the reader of the chunk counts the samples that were left out.
    """

    def __init__(
        self,
        dataset: SavableDataset[Any],
        length: int,
        *,
        first: int = 0,
        num_outputs: int | None = None,
        worker_config: WorkerConfig | None = None,
    ) -> None:
        """`num_outputs`: lists of one pass over the child, of which those at its end are shorter or
        empty; None: pass after pass, for ever.
        """
        check_datasets("ChunkDataset", [dataset])
        check_whole("ChunkDataset: length", length)
        self.children = (dataset,)
        self.length = length
        self.first = first
        self.size = num_outputs
        self.worker_config = worker_config
        self.samples_per_output = length
        self.numbers: dict[int, int] = {}

    def __len__(self) -> int:
        return -(-len(self.children[0]) // self.length) if self.size is None else self.size

    def on_bound(self, binding: Binding, is_outermost: bool) -> None:
        sources = [
            node.node_id
            for node in binding.nodes[self.node_id + 1 : self.end_node_id]
            if not node.children
        ]
        self.numbers = {number: at for at, number in enumerate(sources)}

    def plan(self, positions: Ints, plan_batch: PlanBatch) -> "ChunkPlan":
        starts, sizes = self.first + positions * self.length, np.full_like(positions, self.length)
        # 10 samples in 3 lists of 4: starts 0 4 8, sizes 4 4 2.
        if self.size is not None:
            sizes = np.clip(len(self.children[0]) - starts, 0, self.length)
        return ChunkPlan(self, starts, sizes, plan_batch)

    def used(self, position: int) -> list[int]:
        return [self.first + position * self.length]

    def signature(self) -> list[Any]:
        # States of loaders that were saved hold this name.
        return ["WindowDataset", self.length, self.first]


class ChunkPlan(RangesPlan):
    """Plan of chunks."""

    def values(self, start: int, end: int) -> list[Any]:
        # No failure is announced here: the reader of the chunks reports their SkippedSamples.
        before = ON_FAILURE.set(None)
        try:
            return [self._chunk(*self.child_range(index)) for index in range(start, end)]
        finally:
            ON_FAILURE.reset(before)

    def _chunk(self, start: int, end: int) -> list[Any]:
        try:
            values = self.child.values(start, end)
        except Exception:
            values = [self._value(at) for at in range(start, end)]
        return [
            self._left_out(value, start + number)
            if type(value) in (SkipMarker, MultiOutput)
            else value
            for number, value in enumerate(values)
        ]

    def _value(self, at: int) -> object:
        """Returns one output of a range that failed as a whole; a SkipMarker if it fails, too."""
        try:
            return self.child.values(at, at + 1)[0]
        except Exception as error:
            return SkipMarker(-1, None, error)

    def _left_out(self, marker: object, at: int) -> SkippedSample:
        source, position = self.child.entries(at, at + 1)[0]
        error: Exception = TypeError("several outputs of one sample; a chunk has one of each")
        if type(marker) is SkipMarker:
            error = marker.error if marker.error is not None else SkipSample("filtered")
        found = self.node.numbers[source.node_id], source.describe(position)
        if isinstance(error, SkipSample):
            return SkippedSample(*found, reason=str(error))
        is_said = isinstance(error, ValueError) and str(error)
        fault = str(error) if is_said else f"{type(error).__name__}: {error}"
        return SkippedSample(*found, reason=None, fault=f"{fault:.500}")
