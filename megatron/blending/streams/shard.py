"""pure. A shard is every num_shards-th output of a stream; here they are made in sequence, and
holes filled.
"""

from typing import Any

import numpy as np

from megatron.blending.streams.failures import Failures
from megatron.blending.streams.holder import Cursor, Holder, Planned, ShardEnd
from megatron.blending.streams.holding import BufferedDataset, entries_of
from megatron.blending.streams.node import (
    END_OF_DATA,
    Block,
    Origin,
    Plan,
    SavableDataset,
    SkipMarker,
)

_SAMPLES_PER_BLOCK = 512
ShardState = list[Any]
"""Nested lists of ints: next index, whether it is over, the cursor, then (node, its state) of each
node that holds.
"""
_NOWHERE = np.zeros(0, np.int64)


class StreamShard:
    """It is a shard of a bound tree, from its output `index` on: `next()` makes the next one."""

    def __init__(
        self,
        root: SavableDataset[Any],
        number: int,
        num_shards: int,
        failures: Failures,
        *,
        pass_number: int = 0,
        index: int = 0,
    ) -> None:
        self.root = root
        self.number = number
        self.num_shards = num_shards
        self.failures = failures
        self.index = index
        self.is_over = False
        self.inner: Any = None
        """Where the output of a node that holds samples back came from, for whoever asked for it.
        """
        self.asked_position = 0
        self._size = None if root.continues_across_epochs else root.size
        self._num_positions = None if root.continues_across_epochs else root.num_positions
        self._first = pass_number * (self._num_positions or 0)
        self._length = block_length(root)
        self._cursor = Cursor(root, self._planned, self)
        self._cursor.at[:2] = divmod(index, self._length)
        self._asking = self._cursor
        self._holders: dict[int, Holder] = {}
        self._origin: Any = None
        """Of the last output."""

    def next(self) -> object:
        """Make the next output; ShardEnd after the last."""
        # A limit counts what comes out, also where samples make several.
        is_done = self.root.is_limit and self.index * self.num_shards + self.number >= (
            self._size or 0
        )
        if self.is_over or is_done:
            self.is_over = True
            raise ShardEnd
        try:
            self._origin, value = self._cursor.draw()
        except ShardEnd:
            self.is_over = True
            raise
        self.index += 1
        return value

    def sources(self) -> set[int]:
        """Return the numbers of the sources that the last output is made of."""
        return {source.number for source, _ in entries_of(self.root, self._origin)}

    def evaluate(self, asking: Cursor, plan: Plan, place: int, position: int) -> object:
        """Return what stands at a place of a plan, for a cursor."""
        before, self._asking, self.asked_position = self._asking, asking, position
        self.inner = None
        try:
            return plan.values(place, place + 1, self)[0]
        finally:
            self._asking, self.asked_position = before, position

    def output_of(self, node: BufferedDataset, plan: Any, place: int) -> object:
        holder = self._holders.get(node.number)
        if holder is None:
            if plan is None:
                return END_OF_DATA
            holder = self._holder(node)
            holder.cursor.at[:2] = self._asking.at[0], plan.child_range(place)[0]
        if plan is not None:
            holder.asked_position = self.asked_position
        try:
            found = holder.next()
        except ShardEnd:
            return END_OF_DATA
        self.inner, self.asked_position = holder.inner, holder.asked_position
        return found

    def is_given_up(self, node: SavableDataset[Any]) -> bool:
        above = self.root
        while above.number != node.number:
            child = _child_towards(above, node.number)
            if above.gives_up(above.children.index(child)):
                return True
            above = child
        return False

    def leave_out(self, hole: SkipMarker, node: SavableDataset[Any], origin: Origin) -> None:
        """Count a sample, an output of a node, that makes nothing; FatalSampleError if that is too
        much.
        """
        if hole is END_OF_DATA:
            return

        def sources() -> set[int]:
            return {source.number for source, _ in entries_of(node, origin)}

        def where() -> str:
            source, position = entries_of(node, origin)[0]
            return source.describe(position)

        self.failures.leave_out(hole.error, hole.node, hole.function, where, hole.value, sources)

    def state(self) -> ShardState:
        held = [[number, holder.state()] for number, holder in sorted(self._holders.items())]
        return [self.index, int(self.is_over), list(self._cursor.at), *held]

    def restore(self, state: ShardState) -> None:
        self.index, self.is_over, self._cursor.at = state[0], bool(state[1]), list(state[2])
        for number, held in state[3:]:
            self._holder(_node_at(self.root, number)).restore(held)

    def _holder(self, node: BufferedDataset) -> Holder:
        """Make what makes a node's outputs, and nothing of it yet."""
        above, on_the_way = self._cursor, self.root
        while on_the_way.number != node.number:
            if isinstance(on_the_way, BufferedDataset):
                above = self._holders[on_the_way.number].cursor
            on_the_way = _child_towards(on_the_way, node.number)

        def planned(block: int) -> Planned | None:
            found = above.planned(block)
            if found is None:
                return None
            plan: Any = _plan_of(above.node, found.plan, node.number)
            if plan is None:
                return Planned(node.children[0].plan(_NOWHERE, Block()), _NOWHERE)
            return Planned(plan.child(0), plan.positions)

        holder = self._holders[node.number] = node.holder(node, self, planned)
        return holder

    def _planned(self, block: int) -> Planned | None:
        first = block * self._length
        slots = self.number + self.num_shards * np.arange(
            first, first + self._length, dtype=np.int64
        )
        if self._num_positions is not None:
            slots = slots[slots < self._num_positions]
        if not len(slots):
            return None
        return Planned(self.root.plan(self._first + slots, Block()), self._first + slots)


def block_length(root: SavableDataset[Any]) -> int:
    """Return how many outputs of a shard are planned together. Cursors count in blocks: states are
    of one length.
    """
    return max(1, _SAMPLES_PER_BLOCK // root.samples_per_output)


def _child_towards(node: SavableDataset[Any], number: int) -> SavableDataset[Any]:
    return next(child for child in node.children if child.number <= number < child.end)


def _node_at(root: SavableDataset[Any], number: int) -> Any:
    while root.number != number:
        root = _child_towards(root, number)
    return root


def _plan_of(node: SavableDataset[Any], plan: Plan | None, number: int) -> Plan | None:
    """Return the plan of a node below, as far as the plan of the one above asks for it."""
    while plan is not None and node.number != number:
        child = _child_towards(node, number)
        if not node.is_index_map:
            plan = plan.child(node.children.index(child))
        node = child
    return plan
