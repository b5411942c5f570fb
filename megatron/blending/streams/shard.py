"""pure. One shard of a stream: every num_shards-th output, made in sequence, each hole filled by what follows it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from megatron.blending.streams.failures import Failures
from megatron.blending.streams.holding import HoldingDataset, entries_of, remade, value_again
from megatron.blending.streams.node import EXHAUSTED, Block, Hole, Ints, Plan, SavableDataset, Several, applied

_SAMPLES_PER_BLOCK = 512
_MOST_EMPTY_BLOCKS = 200


class ShardEnd(Exception):
    """There is nothing more in this shard."""


class Planned(NamedTuple):
    """What is asked of a part of the tree in one block of a shard."""

    plan: Plan
    positions: Ints


class Cursor:
    """Takes the outputs of a part of the tree in a shard one after the other, and passes over holes."""

    def __init__(
        self, node: SavableDataset[Any], planned: Callable[[int], Planned | None], shard: "StreamShard"
    ) -> None:
        """`planned`: by number of the block; None beyond the end."""
        self.node = node
        self.shard = shard
        self.at: list[Any] = [0, 0, 0, None]
        """Of the next output: block, place, part of several, and origin where it is beyond what was planned."""
        self._planned = planned
        self._kept: tuple[int, Planned | None] = (-1, None)
        self._values: list[Any] | None = None
        self._origin: tuple[int, Any] = (0, None)

    def planned(self, block: int) -> Planned | None:
        if self._kept[0] != block:
            self._kept = block, self._planned(block)
        return self._kept[1]

    def draw(self) -> tuple[Any, Any]:
        """Return (origin, value) of the next output; ShardEnd if there is none."""
        while True:
            if self._values is None:
                self._evaluate()
            block, place, part, extra = self.at
            values, (position, inner) = self._values or [EXHAUSTED], self._origin
            self.at[2] += 1
            if self.at[2] >= len(values):
                self.at = [block, place + (extra is None), 0, None]
                self._values = None
            if type(values[part]) is not Hole:
                return (position if part == 0 and inner is None else [position, part, inner]), values[part]
            self.shard.leave_out(values[part], self.node, [position, part, inner])

    def _evaluate(self) -> None:
        """Make what stands at the cursor; ShardEnd if nothing does."""
        block, place, _, extra = self.at
        num_empty = 0
        while extra is None and (found := self.planned(block)) is not None:
            if place < found.plan.length:
                self.at[:2] = block, place
                position = int(found.positions[place])
                self._take(self.shard.evaluate(self, found.plan, place, position), position)
                return
            num_empty = 0 if found.plan.length else num_empty + 1
            block, place = block + 1, 0
            if num_empty > _MOST_EMPTY_BLOCKS:
                break
        else:
            value = self.node.extra(self.shard) if extra is None else value_again(self.node, extra)
            if value is not None:
                self.at = [block, place, self.at[2], extra or [self.shard.asked_position, 0, self.shard.inner]]
                self._take(value, self.at[3][0])
                return
        self.at[:2] = block, place
        raise ShardEnd

    def _take(self, value: Any, position: int) -> None:
        self._values = value if type(value) is Several else [value]
        self._origin, self.shard.inner = (position, self.shard.inner), None


class Holder:
    """Makes the outputs of one node in one shard, in order."""

    num_drawn = 0
    asked_position = 0
    """Where in the part of the tree above it was asked for last."""

    def __init__(self, node: Any, shard: "StreamShard", planned: Callable[[int], Planned | None]) -> None:
        self.node = node
        self.cursor = Cursor(node.children[0], planned, shard)
        self.inner: Any = None
        """Of the last output: the origins of what it was made of, and its part of several."""
        self._origins: Any = None
        self._outputs: list[Any] | None = None
        self._given = 0
        """Of what a generator gave: what it was made from, all of it, and how many were given."""

    def next(self) -> Any:
        """Make the next output; ShardEnd if there is none."""
        while True:
            if self._outputs is None:
                self._outputs = self._made()
            origins, number = self._origins, self._given
            found = self._outputs[number] if number < len(self._outputs) else EXHAUSTED
            self._given += 1
            if self._given >= len(self._outputs):
                self._origins, self._outputs, self._given = None, None, 0
            if type(found) is not Hole:
                self.inner = [origins, number]
                return found
            self.leave_out(found, origins[0])

    def gather(self) -> tuple[list[Any], list[Any]]:
        """Return origins and values of the samples of the next output; ShardEnd if there are none."""
        raise NotImplementedError

    def draw(self) -> tuple[Any, Any]:
        found = self.cursor.draw()
        self.num_drawn += 1
        return found

    def leave_out(self, hole: Hole, origin: Any) -> None:
        self.cursor.shard.leave_out(hole, self.node.children[0], origin)

    def described(self, origin: Any) -> str:
        """Say where the (first) record of a sample stands."""
        source, position = entries_of(self.node.children[0], origin)[0]
        return source.describe(position)

    def try_again(self, origin: Any) -> list[Any]:
        """Return a sample that was held back: a list of it, or of none if it fails this time."""
        child = self.node.children[0]
        try:
            return [remade(child, origin)]
        except Exception as error:
            self.leave_out(Hole(child.number, child, error), origin)
            return []

    def state(self) -> list[Any]:
        """Return what must be saved, in ints and lists, beginning with how many samples it drew."""
        pending = None if self._origins is None else [self._origins, self._given]
        return [self.num_drawn, list(self.cursor.at), pending, self.held()]

    def restore(self, state: list[Any]) -> None:
        self.num_drawn, self.cursor.at, pending, held = state[0], list(state[1]), state[2], state[3]
        if pending is not None:
            self._origins, self._given = pending
        self.restore_held(held)

    def held(self) -> Any:
        return None

    def restore_held(self, held: Any) -> None:
        pass

    def _made(self) -> list[Any]:
        if self._origins is None:
            self._origins, values = self.gather()
        else:
            try:
                values = self.node.values_again(self._origins)
            except Exception as error:
                return [*[EXHAUSTED] * self._given, Hole(self.node.number, self.node.make, error)]
        made = applied(self.node.make, values, self.node.number)
        return made if type(made) is Several else [made]


class StreamShard:
    """A shard of a bound tree, from its output `index` on: `next()` makes the next one."""

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
        """Where the output of a node that holds samples back came from, for whoever asked for it."""
        self.asked_position = 0
        self._size = None if root.goes_on else root.size
        self._num_positions = None if root.goes_on else root.num_positions
        self._first = pass_number * (self._num_positions or 0)
        self._length = block_length(root)
        self._cursor = Cursor(root, self._planned, self)
        self._cursor.at[:2] = divmod(index, self._length)
        self._asking = self._cursor
        self._holders: dict[int, Holder] = {}
        self._origin: Any = None
        """Of the last output."""

    def next(self) -> Any:
        """Make the next output; ShardEnd after the last."""
        # A limit counts what comes out, also where samples make several.
        is_done = self.root.is_limit and self.index * self.num_shards + self.number >= (self._size or 0)
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

    def evaluate(self, asking: Cursor, plan: Plan, place: int, position: int) -> Any:
        """Return what stands at a place of a plan, for a cursor."""
        before, self._asking, self.asked_position = self._asking, asking, position
        self.inner = None
        try:
            return plan.values(place, place + 1, self)[0]
        finally:
            self._asking, self.asked_position = before, position

    def output_of(self, node: HoldingDataset, plan: Any, place: int) -> Any:
        holder = self._holders.get(node.number)
        if holder is None:
            if plan is None:
                return EXHAUSTED
            holder = self._holder(node)
            holder.cursor.at[:2] = self._asking.at[0], plan.span(place)[0]
        if plan is not None:
            holder.asked_position = self.asked_position
        try:
            found = holder.next()
        except ShardEnd:
            return EXHAUSTED
        self.inner, self.asked_position = holder.inner, holder.asked_position
        return found

    def leave_out(self, hole: Hole, node: SavableDataset[Any], origin: Any) -> None:
        """Count a sample, an output of a node, that makes nothing; FatalSampleError if that is too much."""
        if hole is EXHAUSTED:
            return
        found = entries_of(node, origin)
        sources = {source.number for source, _ in found}
        self.failures.leave_out(
            hole.error,
            hole.node,
            hole.function,
            lambda: found[0][0].describe(found[0][1]),
            hole.value,
            sources.pop() if len(sources) == 1 else None,
        )

    def state(self) -> list[Any]:
        """Return nested lists of ints: [next index, is over, cursor, [node number, its state], ...]."""
        held = [[number, holder.state()] for number, holder in sorted(self._holders.items())]
        return [self.index, int(self.is_over), list(self._cursor.at), *held]

    def restore(self, state: list[Any]) -> None:
        self.index, self.is_over, self._cursor.at = state[0], bool(state[1]), list(state[2])
        for number, held in state[3:]:
            self._holder(_node_at(self.root, number)).restore(held)

    def _holder(self, node: HoldingDataset) -> Holder:
        """Make what makes a node's outputs, and nothing of it yet."""
        above, on_the_way = self._cursor, self.root
        while on_the_way.number != node.number:
            if isinstance(on_the_way, HoldingDataset):
                above = self._holders[on_the_way.number].cursor
            on_the_way = _child_towards(on_the_way, node.number)

        def planned(block: int) -> Planned | None:
            found = above.planned(block)
            if found is None:
                return None
            plan: Any = _plan_of(above.node, found.plan, node.number)
            return _NOTHING if plan is None else Planned(plan.child(0), plan.positions)

        holder = self._holders[node.number] = node.holder(node, self, planned)
        return holder

    def _planned(self, block: int) -> Planned | None:
        first = block * self._length
        slots = self.number + self.num_shards * np.arange(first, first + self._length, dtype=np.int64)
        if self._num_positions is not None:
            slots = slots[slots < self._num_positions]
        if not len(slots):
            return None
        return Planned(self.root.plan(self._first + slots, Block()), self._first + slots)


def block_length(root: SavableDataset[Any]) -> int:
    """Return how many outputs of a shard are planned together. Cursors count in blocks: states are of one length."""
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
        if not node.only_chooses_positions:
            plan = plan.child(node.children.index(child))
        node = child
    return plan


class _Nothing:
    length = 0

    def values(self, start: int, end: int, holders: Any) -> list[Any]:
        return []

    def child(self, number: int) -> None:
        return None

    def entries(self, start: int, end: int, inner: Any = None) -> list[tuple[Any, int]]:
        return []


_NOTHING = Planned(_Nothing(), np.zeros(0, np.int64))
