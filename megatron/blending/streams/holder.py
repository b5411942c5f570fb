"""pure. A Holder makes the outputs of a batch, pack or group node in a shard, of samples that a
Cursor draws.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from megatron.blending.streams.holding import at_of, entries_of, keyed, remade, value_again
from megatron.blending.streams.node import (
    END_OF_DATA,
    Holders,
    Ints,
    MultiOutput,
    Origin,
    Plan,
    SavableDataset,
    SkipMarker,
    applied,
)

_MAX_EMPTY_BLOCKS = 200


class ShardEnd(Exception):
    """There is nothing more in this shard."""


class Planned(NamedTuple):
    """This is asked of a part of the tree in one block of a shard."""

    plan: Plan
    positions: Ints


class Shard(Holders, Protocol):
    """Cursors and holders know a shard of a stream by this."""

    inner: Any
    """Where the output of a node that holds samples back came from, for whoever asked for it."""
    asked_position: int

    def is_given_up(self, node: SavableDataset[Any]) -> bool:
        """Whether a blend above a node will have lost its weight for good."""

    def evaluate(self, asking: "Cursor", plan: Plan, place: int, position: int) -> object:
        """Return what stands at a place of a plan, for a cursor."""

    def leave_out(self, hole: SkipMarker, node: SavableDataset[Any], origin: Origin) -> None:
        """Count a sample, an output of a node, that makes nothing; FatalSampleError if that is too
        much.
        """


class Cursor:
    """It takes the outputs of a part of the tree in a shard one after the other, and passes over
    holes.
    """

    def __init__(
        self, node: SavableDataset[Any], planned: Callable[[int], Planned | None], shard: Shard
    ) -> None:
        """`planned`: by number of the block; None beyond the end."""
        self.node = node
        self.shard = shard
        self.at: list[Any] = [0, 0, 0, None]
        """Of the next output: block, place, part of several, and origin where it is beyond what was
        planned.
        """
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
            values, (position, inner) = self._values or [], self._origin
            self.at[2] += 1
            if self.at[2] >= len(values):
                self.at = [block, place + (extra is None), 0, None]
                self._values = None
            value = values[part] if part < len(values) else END_OF_DATA
            if type(value) is not SkipMarker:
                return (position if part == 0 and inner is None else [position, part, inner]), value
            self.shard.leave_out(value, self.node, [position, part, inner])

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
            if num_empty > _MAX_EMPTY_BLOCKS and self.shard.is_given_up(self.node):
                break
        else:
            value = self.node.extra(self.shard) if extra is None else value_again(self.node, extra)
            if value is not None:
                self.at = [
                    block,
                    place,
                    self.at[2],
                    extra or [self.shard.asked_position, 0, self.shard.inner],
                ]
                self._take(value, self.at[3][0])
                return
        self.at[:2] = block, place
        raise ShardEnd

    def _take(self, value: object, position: int) -> None:
        self._values = value if type(value) is MultiOutput else [value]
        self._origin, self.shard.inner = (position, self.shard.inner), None


class Holder:
    """It makes the outputs of one node in one shard, in order."""

    num_drawn = 0
    asked_position = 0
    """Where in the part of the tree above it was asked for last."""

    def __init__(self, node: Any, shard: Shard, planned: Callable[[int], Planned | None]) -> None:
        self.node = node
        self.cursor = Cursor(node.children[0], planned, shard)
        self.inner: Any = None
        """Of the last output: the origins of what it was made of, and its part of several."""
        self._origins: Any = None
        self._outputs: list[Any] | None = None
        self._given = 0
        """Of what a generator gave: what it was made from, all of it, and how many were given."""

    def next(self) -> object:
        """Make the next output; ShardEnd if there is none."""
        while True:
            if self._outputs is None:
                self._outputs = self._made()
            origins, number = self._origins, self._given
            found = self._outputs[number] if number < len(self._outputs) else END_OF_DATA
            self._given += 1
            if self._given >= len(self._outputs):
                self._origins, self._outputs, self._given = None, None, 0
            if type(found) is not SkipMarker:
                self.inner = [origins, number]
                return found
            self.leave_out(found, origins[0])

    def gather(self) -> tuple[list[Any], list[Any]]:
        """Return origins and values of the samples of the next output; ShardEnd if there are
        none."""
        raise NotImplementedError

    def draw(self) -> tuple[Any, Any]:
        found = self.cursor.draw()
        self.num_drawn += 1
        return found

    def leave_out(self, hole: SkipMarker, origin: Origin) -> None:
        self.cursor.shard.leave_out(hole, self.node.children[0], origin)

    def described(self, origin: Origin) -> str:
        """Say where the (first) record of a sample stands."""
        source, position = entries_of(self.node.children[0], origin)[0]
        return source.describe(position)

    def try_again(self, origin: Origin) -> list[Any]:
        """Return a sample that was held back: a list of it, or of none if it fails this time."""
        child = self.node.children[0]
        try:
            return [remade(child, origin)]
        except Exception as error:
            self.leave_out(SkipMarker(child.number, child, error), origin)
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

    def held(self) -> object:
        return None

    def restore_held(self, held: object) -> None:
        pass

    def _made(self) -> list[Any]:
        if self._origins is None:
            self._origins, values = self.gather()
        else:
            try:
                values = self.node.values_again(self._origins)
            except Exception as error:
                return [
                    *[END_OF_DATA] * self._given,
                    SkipMarker(self.node.number, self.node.make.function, error),
                ]
        made = applied(self.node.make, values, self.node.number, at_of(self._origins[0]))
        several = made if type(made) is MultiOutput else [made]
        return [one if type(one) is SkipMarker else keyed(one, values) for one in several]
