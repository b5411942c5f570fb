"""pure. The sequence of a rank's outputs, put together from the outputs of its workers.

Workers make all outputs that are functions of the position (server.py). The rest is done here, on
the rank:

- the order of the rank's cells over its workers;
- batches of samples that wait until they are full (gatherer.py);
- blends of packs or groups: each output is chosen after the one before it was taken, because the
  number of packs of a source is not known in advance.

The sequence is the same for any number of workers. Its state is numbers of cells, and references of
waiting samples.
"""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any, Protocol

from megatron.blending.energon._loading.cells import CellState
from megatron.blending.energon._loading.gatherer import Gatherer, Held
from megatron.blending.energon._loading.lanes import Lane, has_counted, is_counted
from megatron.blending.energon._streams.collecting import CollectingDataset
from megatron.blending.loading.messages import END, Message
from megatron.blending.loading.worker_pool import WorkerPool
from megatron.blending.streams.choice import BlendDataset, ConcatDataset
from megatron.blending.streams.failures import Failures
from megatron.blending.streams.items import (
    Sample,
)
from megatron.blending.streams.mapping import SameOutputs
from megatron.blending.streams.node import SavableDataset
from megatron.blending.streams.positions import LimitDataset

Counts = dict[str, Any]
"""Counts of outputs on a rank, by kind and number of the node ("limit 3"): plain values, which a
state has.
"""
_CHOSEN_TOGETHER = 256


class Outputs(Protocol):
    """Outputs of a part of the stream on this rank, in order."""

    def next(self) -> Sample | None:
        """Returns the next output with its reference; None at the end of a pass."""


class LaneSequence:
    """The outputs of a lane. The workers deliver its cells in turns: worker 0, 1, ..., 0, 1, ..."""

    def __init__(self, lane: Lane, num_ranks: int, failures: Failures) -> None:
        self.lane = lane
        self.gatherer = Gatherer(lane.top, list(_collecting(lane.node)), failures)
        self.counts: dict[int, tuple[int, int]] = {}
        """Worker -> its numbers of failed and of skipped samples."""
        self._num_ranks = num_ranks
        self._pool: Any = None
        self._begun = self._state = CellState(0)
        self._turn = 0
        self._heads: dict[int, Message] = {}
        self._is_over = False
        self._first = 0

    @property
    def cells(self) -> CellState:
        """State after the last output that was taken."""
        return self._state

    def restore(self, state: CellState) -> None:
        self._state = state
        self._is_over = False

    def start(self, pool: WorkerPool, pass_number: int) -> None:
        """Takes outputs from workers that begin at this sequence's state."""
        self._pool, self._begun = pool, self._state
        self._first = pass_number * (self.lane.size or 0)
        self._turn, self._heads = 0, {}

    def next(self) -> Sample | None:
        gatherer = self.gatherer
        gatherer.rebuild()
        while not gatherer.ready:
            if self._is_over:
                return None
            message = self._taken()
            if message is None:
                self._is_over = True
                gatherer.finish()
                continue
            # Cells are numbered within a pass; a reference needs the position in the stream.
            node_id, position = self.lane.node.node_id, self._first + message.cell
            for part, item in message.items:
                if part is None:
                    gatherer.take_leftover(item)
                else:
                    gatherer.ready.append(([node_id, position, part], item))
        return gatherer.ready.popleft()

    def _taken(self) -> Message | None:
        """Returns the next message in the order of turns; None at the end of the pass."""
        workers = len(self._pool)
        while True:
            worker = self._turn % workers
            # `_heads` has the last message of each worker until its turn comes. Cells without
            # outputs are not reported: if one worker sends turns 0 and 2, turn 1 had none.
            head = self._heads.get(worker)
            if head is None:
                head = self._heads[worker] = self._pool.next(worker, self.lane.index)
            if head.turn == self._turn:
                del self._heads[worker]
                self.counts[worker] = head.num_failed, head.num_skipped
                self._turn += head.ends_turn
                self._state = self._begun.after(
                    head.cell, head.given, head.ends_cell, self._num_ranks
                )
                return head
            # The cell of this turn has no output. The pass is over once all workers sent END.
            if len(self._heads) == workers and all(
                head.turn == END for head in self._heads.values()
            ):
                for number, head in self._heads.items():
                    self.counts[number] = head.num_failed, head.num_skipped
                return None
            self._turn += 1


class BlendSequence:
    """Outputs of several parts of the stream, mixed by the weights of a blend and counted as they
    come.

    Every rank takes them in the same order of children. Once a child has ended, each output comes
    from the remaining child that is furthest behind its share.
    """

    def __init__(self, node: BlendDataset, children: Sequence[Outputs], counts: Counts) -> None:
        self._node = node
        self._children = children
        self._counts = counts
        self._key = f"blend {node.node_id}"
        self._chosen: list[int] = []

    def next(self) -> Sample | None:
        none_given = {"given": [0] * len(self._children), "over": []}
        counts = self._counts.setdefault(self._key, none_given)
        while (child := self._child(counts["given"], counts["over"])) is not None:
            found = self._children[child].next()
            if found is not None:
                counts["given"][child] += 1
                return found
            counts["over"].append(child)
        return None

    def _child(self, given: list[int], over: list[int]) -> int | None:
        if not over:
            if not self._chosen:
                self._chosen = self._node.children_of(sum(given), _CHOSEN_TOGETHER)[::-1]
            return self._chosen.pop()
        weights = {
            child: weight for child, weight in self._node.weighted_children if child not in over
        }
        if not weights:
            return None
        # The share of each child of the outputs so far and the next one. Weights 2 1 with 3 and 1
        # given -> shares 10/3 and 5/3: child 1 is furthest behind.
        due = Fraction(1 + sum(given[child] for child in weights), sum(weights.values()))
        return max(weights, key=lambda child: weights[child] * due - given[child])


class ConcatSequence:
    """Outputs of several parts of the stream, one part after the other."""

    def __init__(self, children: Sequence[Outputs]) -> None:
        self._children = children

    def next(self) -> Sample | None:
        found = (child.next() for child in self._children)
        return next((sample for sample in found if sample is not None), None)


class LimitSequence:
    """This rank's share of the first `length` outputs of a part of the stream."""

    def __init__(
        self, node: LimitDataset, child: Outputs, part: tuple[int, int], counts: Counts
    ) -> None:
        self._child = child
        self._length, self._part = node.length, part
        self._key, self._before = f"limit {node.node_id}", f"before {node.node_id}"
        self._counts = counts

    def next(self) -> Sample | None:
        given = self._counts.get(self._key, 0)
        if given >= share_of(self._length - self._counts.get(self._before, 0), *self._part):
            return None
        found = self._child.next()
        if found is not None:
            self._counts[self._key] = given + 1
        return found


class CollectSequence:
    """Batches, packs or groups of the outputs of another sequence."""

    def __init__(self, node: CollectingDataset, child: Outputs, gatherer: Gatherer) -> None:
        self._node = node
        self._child = child
        self._gatherer = gatherer
        self._is_over = False

    def next(self) -> Sample | None:
        gatherer = self._gatherer
        gatherer.rebuild()
        while not gatherer.ready:
            if self._is_over:
                return None
            sample = self._child.next()
            if sample is None:
                self._is_over = True
                gatherer.finish()
            else:
                gatherer.take(self._node, [sample])
        return gatherer.ready.popleft()


class RankSequence:
    """All outputs of a rank, and their state. It mirrors the part of the stream's tree that is done
    on the rank: a lane, or a blend of lanes.
    """

    def __init__(
        self,
        root: SavableDataset[Any],
        lanes: Sequence[Lane],
        part: tuple[int, int],
        failures: Failures,
    ) -> None:
        """`part`: rank, and number of ranks."""
        self._part = part
        self._failures = failures
        self.counts: Counts = {}
        """Numbers of outputs taken, where they do not follow from positions."""
        self.lanes = [LaneSequence(lane, part[1], failures) for lane in lanes]
        self._left = iter(self.lanes)
        self.gatherers = {f"lane {one.lane.index}": one.gatherer for one in self.lanes}
        self.next = self._made(root, ()).next

    @property
    def num_short_groups(self) -> int:
        return sum(gatherer.num_short for gatherer in self.gatherers.values())

    def _made(self, node: Any, above: tuple[SameOutputs, ...]) -> Any:
        if not has_counted(node):
            return next(self._left)
        if isinstance(node, SameOutputs):
            return self._made(node.children[0], (node, *above))
        if isinstance(node, CollectingDataset):
            gatherer = Gatherer(above[-1] if above else node, [node], self._failures)
            self.gatherers[f"node {node.node_id}"] = gatherer
            return CollectSequence(node, self._made(node.children[0], ()), gatherer)
        children = [self._made(child, above) for child in node.children]
        if is_counted(node):
            return BlendSequence(node, children, self.counts)
        if isinstance(node, ConcatDataset):
            return ConcatSequence(children)
        if isinstance(node, LimitDataset) and not node.is_outermost:
            return LimitSequence(node, children[0], self._part, self.counts)
        return children[0]

    def held(self) -> dict[str, Held]:
        states = {name: gatherer.state() for name, gatherer in self.gatherers.items()}
        return {name: state for name, state in states.items() if state}


def share_of(total: int, rank: int, num_ranks: int) -> int:
    """Returns a rank's number of `total` outputs that are dealt in turns: 5 over 2 ranks are 3 and
    2.
    """
    return max(0, total) // num_ranks + (rank < max(0, total) % num_ranks)


def _collecting(top: SavableDataset[Any]) -> Iterator[CollectingDataset]:
    """Yields the collecting nodes at and below `top`."""
    if isinstance(top, CollectingDataset):
        yield top
    for child in top.children:
        yield from _collecting(child)
