"""pure. Lanes: outputs made in sequence, where samples are left out or held back.

The outputs of a stream are dealt to a fixed number of lanes: output k belongs to lane k % num_lanes. Within a lane
each node below has a sequence of its own, planned in blocks: all that the outputs of this lane ask of it. A node whose
sample is left out takes the next of that sequence; no other lane is touched. So the stream depends on the number of
lanes, and on nothing that ranks and workers are.

A node is in step with its parent, whose plan says where the node stands (a `Place`), until it takes more or less than
planned: from then on it has a cursor, which is all that a lane's state holds, apart from what is held back.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from megatron.blending.streams.dataset import Block, Plan, SavableDataset
from megatron.blending.streams.failures import Failures
from megatron.blending.streams.origins import first_leaf, sources_of

Place = tuple[int, int]
"""(block, place in the node's plan of that block)."""

_SAMPLES_PER_BLOCK = 512
_KEPT_BLOCKS = 2
_MOST_EMPTY_BLOCKS = 20_000
_FEW_EMPTY_BLOCKS = 8


class LaneEnd(Exception):
    """A node has nothing more to give in this lane."""


class Lane:
    """One lane of a bound tree, from output `index` of the lane on: `next()` makes the next one."""

    def __init__(
        self,
        root: SavableDataset[Any],
        number: int,
        num_lanes: int,
        failures: Failures,
        *,
        pass_number: int = 0,
        index: int = 0,
        size: int | None = None,
    ) -> None:
        """`size`: outputs of a pass of the whole stream; None: endless."""
        self.root = root
        self.failures = failures
        self.index = index
        self.is_over = False
        self.most_empty_blocks = _MOST_EMPTY_BLOCKS
        """How far a node that has a cursor looks for its next output."""
        self.number = number
        self.num_lanes = num_lanes
        self._first = 0 if size is None else pass_number * size
        self._size = size
        self._block_length = block_length(root)
        self._blocks: dict[int, Plan | None] = {}
        self._top = root.in_lane(self, None, 0)
        self._origin: Any = None
        """Of the last output."""

    def next(self) -> Any:
        """Make the next output; LaneEnd after the last."""
        if self.is_over:
            raise LaneEnd
        try:
            self._origin, value = self.pull()
        except LaneEnd:
            self.is_over = True
            raise
        return value

    def sources(self) -> set[int]:
        """Numbers of the leaves that the last output is made of."""
        return sources_of(self._origin)

    def pull(self) -> tuple[Any, Any]:
        """Return (origin, value) of the next output."""
        block, place = divmod(self.index, self._block_length)
        plan = self.plan(block)
        found = self._top.pull(None if plan is None or place >= plan.length else (block, place))
        self.index += 1
        return found

    @contextmanager
    def only_near(self) -> Iterator[None]:
        """Look for outputs in the next blocks only: each that is gone through is planned, which takes milliseconds."""
        self.most_empty_blocks = _FEW_EMPTY_BLOCKS
        try:
            yield
        finally:
            self.most_empty_blocks = _MOST_EMPTY_BLOCKS

    def plan(self, block: int) -> Plan | None:
        """What the root makes in a block of this lane; None beyond the end."""
        if block not in self._blocks:
            first = block * self._block_length
            slots = self.number + self.num_lanes * np.arange(first, first + self._block_length, dtype=np.int64)
            if self._size is not None:
                slots = slots[slots < self._size]
            if len(self._blocks) == _KEPT_BLOCKS:
                del self._blocks[next(iter(self._blocks))]
            self._blocks[block] = self.root.plan(self._first + slots, Block()) if len(slots) else None
        return self._blocks[block]

    def state(self) -> list[Any]:
        """Nested lists of ints: [next index, is over, [node number, its state], ...]."""
        return [self.index, int(self.is_over), *self._top.collect()]

    def restore(self, state: list[Any]) -> None:
        self.index, self.is_over = state[0], bool(state[1])
        for number, held in state[2:]:
            self._top.descend(number).restore(held)


def block_length(root: SavableDataset[Any]) -> int:
    """How many outputs of a lane are planned together. Cursors are counted in blocks: a state holds for one length."""
    return max(1, _SAMPLES_PER_BLOCK // root.samples_per_output)


class LaneNode:
    """A node's part in a lane."""

    def __init__(self, node: Any, lane: Lane, parent: "LaneNode | None", child_number: int) -> None:
        self.node = node
        self.lane = lane
        self._parent = parent
        self._child_number = child_number
        self._children: dict[int, LaneNode] = {}
        self._block = -1
        self._plan: Plan | None = None

    def pull(self, place: Place | None) -> tuple[Any, Any]:
        """Return (origin, value) of the next output, which is planned at `place` if the node is in step.

        None: the parent takes more than it planned to; a node in step then has nothing (LaneEnd).
        """
        raise NotImplementedError

    def pull_same(self) -> tuple[Any, Any]:
        """Return (origin, value) in place of the last output, which failed: of the same source, if it has more."""
        self.detach()
        return self.pull(None)

    def detach(self) -> None:
        """Take a cursor, behind the last output: the parent will go on without places."""
        self.child(0).detach()

    def is_detached(self) -> bool:
        return self.child(0).is_detached()

    def held(self) -> Any:
        """What of this node must be saved, in ints and lists; None if nothing."""
        return None

    def restore(self, held: Any) -> None:
        raise NotImplementedError

    def collect(self) -> list[Any]:
        own = self.held()
        found = [] if own is None else [[self.node.number, own]]
        for number in sorted(self._children):
            found += self._children[number].collect()
        return found

    def child(self, number: int) -> "LaneNode":
        child = self._children.get(number)
        if child is None:
            child = self._children[number] = self.node.children[number].in_lane(self.lane, self, number)
        return child

    def descend(self, number: int) -> "LaneNode":
        """Return the part of the node with this number."""
        if self.node.number == number:
            return self
        below = self.node.children
        at = next(place for place, child in enumerate(below) if child.number <= number < child.end)
        return self.child(at).descend(number)

    def plan(self, block: int) -> Plan | None:
        """This node's plan in a block, which may have length 0; None beyond the end of the lane."""
        if block != self._block:
            if self._parent is None:
                self._plan = self.lane.plan(block)
            else:
                above = self._parent.plan(block)
                self._plan = None if above is None else (above.child(self._child_number) or _NOTHING)
            self._block = block
        return self._plan

    def is_away(self, child_number: int, block: int) -> bool:
        """Whether it is known that a child is not asked for anything in this block and in many after it."""
        return self._is_away(block)

    def _is_away(self, block: int) -> bool:
        return self._parent is not None and self._parent.is_away(self._child_number, block)

    def fail(self, error: Exception | None, function: Any, origin: Any, value: Any) -> None:
        sources = sources_of(origin)
        self.lane.failures.leave_out(
            error,
            self.node.number,
            function,
            lambda: describe_origin(self.lane.root, origin),
            value,
            sources.pop() if len(sources) == 1 else None,
        )


class _Nothing:
    length = 0

    def take(self, count: int) -> list[Any]:
        raise NotImplementedError

    def seek(self, offset: int) -> None:
        raise NotImplementedError

    def child(self, number: int) -> None:
        return None

    def sources(self, start: int, end: int) -> set[int]:
        return set()


_NOTHING = _Nothing()


class CursorNode(LaneNode):
    """A node that knows where it stands, once it is out of step with its parent."""

    cursor: Place | None = None
    _after: Place | None = None

    def detach(self) -> None:
        if self.cursor is None:
            self.cursor = self._after

    def is_detached(self) -> bool:
        return self.cursor is not None

    def held(self) -> Any:
        return None if self.cursor is None else list(self.cursor)

    def restore(self, held: Any) -> None:
        self.cursor = held[0], held[1]

    def locate(self, place: Place | None) -> tuple[Any, int, int]:
        """Return (plan, block, place) of the next planned output; LaneEnd if there is none."""
        at = place if self.cursor is None else self.cursor
        if at is None:
            raise LaneEnd
        block, within = at
        for _ in range(self.lane.most_empty_blocks):
            plan = self.plan(block)
            if plan is None:
                break
            if within < plan.length:
                return plan, block, within
            if not plan.length and self._is_away(block):
                break
            block, within = block + 1, within - plan.length
        raise LaneEnd

    def passed(self, block: int, within: int) -> None:
        """An output was made of what was planned there."""
        self._after = (block, within + 1)
        if self.cursor is not None:
            self.cursor = self._after

    def passed_over(self, block: int, within: int) -> None:
        """What was planned there makes no output: from now on this node is out of step."""
        self.cursor = (block, within + 1)


def describe_origin(root: SavableDataset[Any], origin: Any) -> str:
    """Say where the (first) record of a sample stands."""
    while isinstance(origin[0], (list, tuple)) or origin[0] < 0:
        origin = origin[0] if isinstance(origin[0], (list, tuple)) else origin[1]
    node: Any = root
    while node.children:
        node = node.child_of([first_leaf(origin), origin[1]])
    return node.describe(origin[1])


Describe = Callable[[], str]
