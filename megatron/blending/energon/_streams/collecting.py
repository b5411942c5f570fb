"""pure. Nodes that make an output of several samples: batches, packs and groups.

Position k of such a node is made of a block of consecutive positions of its child, and of nothing
else: `block` of them, or a single one if that already holds many outputs. So it is the same for any
number of ranks and workers. Samples of a block that fill no batch are a `Leftover`. They wait on
the rank, in a Collector of its own, until others come.
Worked example, batches of two of the samples a b c d e f, of which b and e fail: position 0 gives
the Leftover a, position 1 the batch [c d], position 2 the Leftover f; the rank makes [a f] of them.
"""

import contextlib
from collections.abc import Iterable, Iterator
from functools import cached_property, partial
from types import GeneratorType
from typing import Any, Protocol

import numpy as np

from megatron.blending.energon._streams.references import at_of, entries_of
from megatron.blending.streams.items import (
    Leftover,
    MultiOutput,
    Ref,
    Sample,
    SkipMarker,
    generated,
    numbered,
)
from megatron.blending.streams.node import (
    Binding,
    Ints,
    PlanBatch,
    SavableDataset,
    check_datasets,
)
from megatron.blending.streams.ranges import RangesPlan
from megatron.blending.streams.seeding import UserFunction, restore_key_of
from megatron.blending.streams.worker_config import WorkerConfig

Group = list[Sample]
"""Samples that make an output together."""


class Collector(Protocol):
    """Takes samples in order, and gives them back in groups."""

    def add(self, sample: Sample) -> Iterable[Group | SkipMarker]:
        """Takes one more. Returns the groups that are complete with it."""

    def finish(self) -> Iterable[Group | SkipMarker]:
        """Returns what else can be made of what is held, as no more samples come."""

    def held(self) -> list[Sample]:
        """Returns the samples that are in no group yet."""


class CollectingDataset(SavableDataset[Any]):
    """Makes its outputs of several samples each."""

    changes_outputs = True
    make: UserFunction
    """Makes an output of the samples of a group, or is a generator of outputs."""
    num_block = 1
    """Positions of the child that a position is made of, where these hold one output each."""
    drop_last = False
    is_outermost = False
    """True if its outputs are the loader's, and its last samples wait for those of other blocks."""

    def __init__(self, dataset: SavableDataset[Any], worker_config: WorkerConfig | None) -> None:
        check_datasets(type(self).__name__, [dataset])
        self.children = (dataset,)
        self.worker_config = worker_config
        self.is_block = dataset.is_block
        self.size = None

    @property
    def block(self) -> int:
        return 1 if self.children[0].is_block else self.num_block

    @property
    def num_positions(self) -> int | None:
        inner = self.children[0].size
        if inner is None:
            return None
        return inner // self.block if self._drops_short else -(-inner // self.block)

    @property
    def _drops_short(self) -> bool:
        """Returns whether a block that is cut short by the end of the data is not even read."""
        return self.drop_last and not self.is_outermost

    @cached_property
    def samples_per_output(self) -> int:
        return self.block * self.children[0].samples_per_output

    def on_bound(self, binding: Binding, is_outermost: bool) -> None:
        self.is_outermost = is_outermost
        self.size = self.num_positions

    def collector(self, is_of_rank: bool = False) -> Collector:
        """Returns what takes samples: of one block, or those that wait on a rank."""
        raise NotImplementedError

    def plan(self, positions: Ints, plan_batch: PlanBatch) -> "BlocksPlan":
        starts, sizes = positions * self.block, np.full_like(positions, self.block)
        inner, per_pass = self.children[0].size, self.num_positions
        # A pass of 10 samples in blocks of 4 has 3 blocks, of 4, 4 and 2. Position 4 is block 1 of
        # pass 1: its samples are 10 + 4 to 10 + 7.
        if inner is not None:
            passes, blocks = np.divmod(positions, max(per_pass or 0, 1))
            starts = passes * inner + blocks * self.block
            sizes = np.clip(inner - blocks * self.block, 0, self.block)
        return BlocksPlan(self, starts, sizes, plan_batch)

    def used(self, position: int) -> list[int]:
        inner, per_pass = self.children[0].size, self.num_positions
        if inner is None or not per_pass:
            return [position * self.block]
        # The last block of a pass may be short: 10 samples in blocks of 4, position 3 -> 10, not
        # 12.
        passes, block = divmod(position, per_pass)
        return [passes * inner + min(block * self.block, inner)]

    def is_complete(self, num_positions: int) -> bool:
        """Returns whether what is left of a block of so many positions makes a last, smaller
        output: at the end of data that begins again, or behind which other data comes.
        """
        is_cut = num_positions < self.block and not self.children[0].is_block
        return is_cut and not self.is_outermost

    def value(self, plan: "BlocksPlan", index: int) -> Any:
        """Returns what stands at an index of a plan."""
        return MultiOutput(self.items(plan, index))

    def items(self, plan: "BlocksPlan", index: int) -> Iterator[Any]:
        first, last = plan.child_range(index)
        values = plan.child.values(first, last)
        return self.collected(plan.samples(index, values), self.is_complete(last - first))

    def collected(
        self, samples: Iterable[tuple[Ref | None, Any]], is_complete: bool
    ) -> Iterator[Any]:
        """Yields what is made of samples, among which may be what passes through (without Ref)."""
        collector = self.collector()
        for ref, value in samples:
            if ref is None:
                yield value
                continue
            for group in collector.add((ref, value)):
                yield from self.outputs_of(group)
        if is_complete:
            for group in collector.finish():
                yield from self.outputs_of(group)
        elif left := collector.held():
            yield Leftover(self.node_id, left)

    def outputs_of(self, group: Group | SkipMarker) -> Iterator[Any]:
        """Yields the outputs of a group, one unless `make` is a generator; a SkipMarker if it
        fails.
        """
        if isinstance(group, SkipMarker):
            yield group
            return
        refs, values = [ref for ref, _ in group], [value for _, value in group]
        entries = partial(entries_of, self.children[0], refs)
        try:
            made = self.make(values, at_of(refs[0]))
        except Exception as error:
            yield SkipMarker(self.node_id, self.make.function, error, values, entries)
            return
        if type(made) is not GeneratorType:
            yield keyed(made, values)
            return
        for one in generated(made, self.make.function, values, self.node_id, entries):
            yield one if type(one) is SkipMarker else keyed(one, values)

    def signature(self) -> list[Any]:
        return [type(self).__name__, self.num_block]


class BlocksPlan(RangesPlan):
    """Positions of a node that collects samples."""

    def values(self, start: int, end: int) -> list[Any]:
        return [self.node.value(self, index) for index in range(start, end)]

    def samples(self, index: int, values: list[Any]) -> Iterator[tuple[Ref | None, Any]]:
        """Yields the samples at a position, each with its reference, of what the child gave."""
        node_id, first = self.node.children[0].node_id, self.child_range(index)[0]
        # Reversed and popped from the end, so that the memory of each sample is freed once it is
        # taken.
        values.reverse()
        for at in range(first, first + len(values)):
            position = int(self.positions[at])
            for part, item in numbered(values.pop()):
                yield None if part is None else [node_id, position, part], item


def keyed(made: Any, samples: list[Any]) -> Any:
    """Gives an output that has a `__restore_key__` those of what it was made of, whatever the
    function put there.
    """
    is_dict = isinstance(made, dict)
    if ("__restore_key__" in made) if is_dict else hasattr(made, "__restore_key__"):
        keys = [restore_key_of(sample) for sample in samples]
        if all(keys):
            # What is frozen stays as it is.
            with contextlib.suppress(AttributeError):
                made.update(__restore_key__=tuple(keys)) if is_dict else setattr(
                    made, "__restore_key__", tuple(keys)
                )
    return made
