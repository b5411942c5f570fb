"""pure. A server makes the outputs of the cells of a rank that one worker has.

The rank takes its cells in turns: worker w of W makes those of the turns t with t % W == w. With 2
workers, the cells 3 7 11 15 of a rank are turns 0 1 2 3, so worker 1 makes the cells 7 and 15. If a
block holds only lengths, each worker knows all of its packs, and the packs are dealt out instead of
the cells. A cell without an output is not reported. Several parts of the stream (`Lane`) are served
side by side, as the rank asks for them.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from megatron.blending.energon._loading.cells import CellState
from megatron.blending.energon._loading.lanes import Lane
from megatron.blending.loading.messages import END, Message, Start
from megatron.blending.streams.failures import Failures
from megatron.blending.streams.items import (
    ON_FAILURE,
    PARTS_OF_DEFERRED,
    Deferred,
    Leftover,
    SkipMarker,
    applied,
    numbered,
    numbered_deferred,
)
from megatron.blending.streams.node import Plan, PlanBatch
from megatron.blending.streams.seeding import BATCH_INDEX

_FIRST_PLANNED = 2048
_MAX_PLANNED = 32768


class _Cell(NamedTuple):
    turn: int
    number: int
    given: int
    plan: Plan
    index_in_plan: int
    value: Any


class Server:
    """Makes the outputs of a worker's turns in order, one pass at a time."""

    def __init__(
        self,
        lanes: Sequence[Lane],
        worker: int,
        num_workers: int,
        num_ranks: int,
        failures: Failures,
    ) -> None:
        self.lanes = lanes
        self.failures = failures
        self._worker = worker
        self._num_workers = num_workers
        self._num_ranks = num_ranks
        self._streams: list[Iterator[Message]] = []
        self._cell: _Cell | None = None

    def start(self, start: Start) -> None:
        """Begins again, with the first turn of this worker."""
        self._start = start
        self._streams = [
            self._dealt(lane, cells) if lane.is_dealt_by_output else self._made(lane, cells)
            for lane, cells in zip(self.lanes, start.cells)
        ]

    def next(self, lane: int = 0) -> Message:
        """Makes the next output of a lane. One of END for ever after the last one of the pass."""
        before = ON_FAILURE.set(self._announce)
        try:
            message = next(self._streams[lane], None)
        finally:
            ON_FAILURE.reset(before)
        return self._message(self.lanes[lane], END) if message is None else message

    def places(self) -> list[str]:
        """Returns where a person finds the records of the last output's cell."""
        if self._cell is None:
            return []
        at = self._cell.index_in_plan
        return [source.describe(one) for source, one in self._cell.plan.entries(at, at + 1)]

    def close(self) -> None:
        """Does nothing, unlike the worker process that may stand in the place of a server."""

    def _message(
        self,
        lane: Lane,
        turn: int,
        cell: tuple[int, int] = (0, 0),
        items: Sequence[tuple[int | None, Any]] = (),
        ends: tuple[bool, bool] = (True, True),
    ) -> Message:
        """`cell`: its number, and outputs given with this one. `ends`: the turn, and the cell."""
        failures = self.failures
        counts = failures.num_failed, failures.num_skipped
        return Message(self._start.generation, lane.index, turn, *cell, items, *ends, *counts)

    def _made(self, lane: Lane, state: CellState) -> Iterator[Message]:
        """Yields the outputs of every num_workers-th cell."""
        cells = state.cells(self._num_ranks, lane.size)
        turns = islice(enumerate(cells), self._worker, None, self._num_workers)
        for cell in self._cells(lane, turns):
            skipped: list[SkipMarker] = []
            # Sent with the last output. A state saved within the cell then holds no leftover of it,
            # and a resumed run, which makes the cell again, adds none twice.
            leftovers: list[tuple[None, Leftover]] = []
            waiting: tuple[int, Any] | None = None
            for part, item in numbered(cell.value):
                if type(item) is SkipMarker:
                    self._leave_out(item, skipped)
                elif part is None:
                    leftovers.append((None, item))
                elif part >= cell.given:
                    if waiting is not None:
                        # Held back until the next output is there: only then it is known not to be
                        # the last of its cell.
                        done = cell.number, waiting[0] + 1
                        yield self._message(lane, cell.turn, done, [waiting], (False, False))
                    waiting = part, item
            if waiting is not None or leftovers:
                self.failures.succeeded(partial(_sources, cell, skipped))
                last = [] if waiting is None else [waiting]
                done = cell.number, waiting[0] + 1 if waiting is not None else 0
                yield self._message(lane, cell.turn, done, [*last, *leftovers])

    def _dealt(self, lane: Lane, state: CellState) -> Iterator[Message]:
        """Yields every num_workers-th of the outputs, where all workers plan all cells."""
        turn = 0
        for cell in self._cells(lane, enumerate(state.cells(self._num_ranks, lane.size))):
            for item in cell.value:
                is_own = turn % self._num_workers == self._worker
                if type(item) is not Deferred:
                    if is_own:
                        self._leave_out(item, [])
                    continue
                # All outputs of Deferred number 1 count as given up to 2 * PARTS_OF_DEFERRED, so
                # that nobody has to make them to know how many there are.
                given = (item.number + 1) * PARTS_OF_DEFERRED
                if given <= cell.given:
                    continue
                # Counted by every worker, also for the packs of others: all agree on the turns.
                turn += 1
                if not is_own:
                    continue
                made: list[tuple[int | None, Any]] = []
                skipped: list[SkipMarker] = []
                for part, output in numbered_deferred(item):
                    if part is None:
                        self._leave_out(output, skipped)
                    else:
                        made.append((part, output))
                if made:
                    self.failures.succeeded(partial(_sources, cell, skipped))
                    done = cell.number, given
                    yield self._message(lane, turn - 1, done, made, (True, item.is_last))

    def _cells(self, lane: Lane, turns: Iterator[tuple[int, tuple[int, int]]]) -> Iterator[_Cell]:
        """Yields what stands at cells. Many are planned in one call; few at first, so that the
        first output comes soon.
        """
        length, first = _FIRST_PLANNED, self._start.pass_number * (lane.size or 0)
        while True:
            asked = list(islice(turns, max(1, length // lane.node.samples_per_output)))
            if not asked:
                return
            length = min(2 * length, _MAX_PLANNED)
            positions = first + np.array([cell for _, (cell, _) in asked], np.int64)
            plan = lane.node.plan(positions, PlanBatch())
            for index, (turn, (cell, given)) in enumerate(asked):
                BATCH_INDEX.set(cell // self._num_ranks)
                value = plan.values(index, index + 1)[0]
                for node in lane.above:
                    at = (lane.node.node_id, int(positions[index]))
                    value = applied(node, value, at, partial(plan.entries, index, index + 1))
                self._cell = _Cell(turn, cell, given, plan, index, value)
                yield self._cell

    def _announce(self, hole: SkipMarker) -> None:
        where = partial(place_of, hole)
        self.failures.announce(hole.error, hole.node, hole.function, where, hole.value)

    def _leave_out(self, hole: SkipMarker, skipped: list[SkipMarker]) -> None:
        skipped.append(hole)
        leave_out(self.failures, hole)


def leave_out(failures: Failures, hole: SkipMarker) -> None:
    """Counts a sample that makes nothing; FatalSampleError if that is too much."""

    def sources() -> set[int]:
        return {source.node_id for source, _ in hole.entries()}

    where = partial(place_of, hole)
    failures.leave_out(hole.error, hole.node, hole.function, where, hole.value, sources)


def place_of(hole: SkipMarker) -> str:
    """Returns where a person finds the (first) record of a sample."""
    found = hole.entries()
    return found[0][0].describe(found[0][1]) if found else f"node {hole.node}"


def _sources(cell: _Cell, skipped: Sequence[SkipMarker]) -> set[int]:
    """Returns the numbers of the sources of which something came out at a cell."""
    left = {(id(source), position) for hole in skipped for source, position in hole.entries()}
    return {
        source.node_id
        for source, position in cell.plan.entries(cell.index_in_plan, cell.index_in_plan + 1)
        if (id(source), position) not in left
    }
