"""pure. A rank takes its outputs in sequence: from lanes, and by what is counted as it comes.

Workers make what is a function of the position (server.py). What is left is here: the order of a
rank's cells, samples that wait until they fill a batch, and blends of packs or groups, of which
each output is chosen when the one before it was given. All of it is the same for any number of
workers. Its state is numbers of cells, and references of the samples that wait.
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
"""Counts of a rank, by kind and number of the node: plain values, for a state."""
_CHOSEN_TOGETHER = 256


class Outputs(Protocol):
    """Outputs of a part of the stream on this rank, in order."""

    def next(self) -> Sample | None:
        """Returns the next output with its reference; None after the last one of a pass."""


class LaneSequence:
    """The outputs of a lane, from the workers in turn."""

    def __init__(self, lane: Lane, num_ranks: int, failures: Failures) -> None:
        self.lane = lane
        self.gatherer = Gatherer(lane.top, list(_collecting(lane.node)), failures)
        self.counts: dict[int, tuple[int, int]] = {}
        """Samples of each worker that failed, and that were skipped."""
        self._num_ranks = num_ranks
        self._pool: Any = None
        self._begun = self._state = CellState(0)
        self._turn = 0
        self._heads: dict[int, Message] = {}
        self._is_over = False
        self._first = 0

    @property
    def cells(self) -> CellState:
        """The state of what was taken."""
        return self._state

    def restore(self, state: CellState) -> None:
        self._state = state
        self._is_over = False

    def start(self, pool: WorkerPool, pass_number: int) -> None:
        """Begins to take from workers that begin at this sequence's state."""
        self._pool, self._begun = pool, self._state
        self._first = pass_number * (self.lane.size or 0)
        self._turn, self._heads = 0, {}

    def next(self) -> Sample | None:
        gatherer = self.gatherer
        gatherer.remake()
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
        """Takes the next message in the order of turns; None at the end."""
        workers = len(self._pool)
        while True:
            worker = self._turn % workers
            # A worker is asked again only after its last message was used. Its head may be of a
            # later turn, as cells without outputs are not reported: turns 0 2 with 1 worker -> turn
            # 1 is passed over.
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
            # This cell has no output. The pass is over once every worker has said so.
            if len(self._heads) == workers and all(
                head.turn == END for head in self._heads.values()
            ):
                for number, head in self._heads.items():
                    self.counts[number] = head.num_failed, head.num_skipped
                return None
            self._turn += 1


class BlendSequence:
    """Outputs of parts of the stream by the weights of a blend, counted as they come.

    Every rank takes its outputs in the same order of children. Once a child is over, the next
    output is always of the child that is furthest behind its share of what the others gave.
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
    """Parts of the stream one after the other."""

    def __init__(self, children: Sequence[Outputs]) -> None:
        self._children = children

    def next(self) -> Sample | None:
        found = (child.next() for child in self._children)
        return next((sample for sample in found if sample is not None), None)


class LimitSequence:
    """Share of this rank of the first outputs of a part of the stream."""

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
    """Batches, packs or groups of what a sequence gives."""

    def __init__(self, node: CollectingDataset, child: Outputs, gatherer: Gatherer) -> None:
        self._node = node
        self._child = child
        self._gatherer = gatherer
        self._is_over = False

    def next(self) -> Sample | None:
        gatherer = self._gatherer
        gatherer.remake()
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
    """All that a rank takes of a bound tree, and its state."""

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
        """Outputs given, by number of node, where positions do not tell."""
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
    """Returns how many of some outputs are a rank's, where they are dealt one by one."""
    return max(0, total) // num_ranks + (rank < max(0, total) % num_ranks)


def _collecting(top: SavableDataset[Any]) -> Iterator[CollectingDataset]:
    """Yields the nodes at and below one that collect samples."""
    if isinstance(top, CollectingDataset):
        yield top
    for child in top.children:
        yield from _collecting(child)
