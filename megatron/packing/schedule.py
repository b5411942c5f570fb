"""pure. Lengths in, a Schedule out: which rank and microbatch each sequence of a global batch goes to.

Invariants of every scheduler in SCHEDULERS, for every request that can be built (`check_schedule` states them as code):

- each sequence is in exactly one pack, and no pack holds more tokens than the capacity;
- all ranks have the same number of microbatches, a positive multiple of `microbatch_multiple`;
- the same request gives the same schedule on every rank and machine: ties break by integers, sums run in a fixed order.

`default` and `dp_balanced` leave a pack empty only where there are fewer sequences than packs.
"""

from __future__ import annotations

import difflib
from bisect import bisect_left, insort
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from megatron.packing.bounds import microbatch_lower_bound
from megatron.packing.cost import SequenceCost

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


class CapacityError(ValueError):
    """Sequences that must share a pack, or one alone, are longer than the capacity."""


@dataclass(frozen=True, kw_only=True)
class ScheduleRequest:
    """The sequences of one global batch and the packs they may go to.

    Sequences are numbered 0..N-1 in global order: by source rank, then in the order drawn there. ValueError where
    fields contradict one another, CapacityError where a sequence alone is over capacity: what can be built can be
    scheduled.
    """

    lengths: IntArray
    """int64 [N], tokens that each sequence occupies in a pack, alignment included; at least 1."""
    source_rank: IntArray
    """int64 [N], data-parallel rank that drew each sequence."""
    source_draw: IntArray
    """int64 [N], which `next` of that rank's iterator gave it, from 0."""
    num_ranks: int
    """Data-parallel ranks."""
    num_draws: int
    """`next` calls per rank."""
    capacity: int
    """Tokens that a pack may hold."""
    cost: SequenceCost
    """Cost of a sequence, to balance by."""
    microbatch_multiple: int = 1
    """Microbatches per rank must be a multiple of this."""

    def __post_init__(self) -> None:
        for name in ("num_ranks", "capacity", "microbatch_multiple"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, but is {getattr(self, name)}")
        _check_array("lengths", self.lengths, self.lengths.size, 1, None)
        _check_array("source_rank", self.source_rank, self.lengths.size, 0, self.num_ranks)
        _check_array("source_draw", self.source_draw, self.lengths.size, 0, self.num_draws)
        for i in np.flatnonzero(self.lengths > self.capacity)[:1]:
            raise CapacityError(
                f"sequence {i} of the global batch (rank {self.source_rank[i]}, draw {self.source_draw[i]}) has "
                f"{self.lengths[i]} tokens, but a pack holds {self.capacity}; "
                f"raise --max-seqlen-per-dp-cp-rank or truncate the sequence"
            )


@dataclass(frozen=True)
class Schedule:
    """Where each sequence goes: pack `microbatch[i]` of rank `rank[i]`. Both are int64 [N]."""

    rank: IntArray
    microbatch: IntArray
    num_ranks: int
    num_microbatches: int
    """Per rank, equal on all ranks."""

    def packs_of(self, rank: int) -> list[IntArray]:
        """Sequence ids of each microbatch of `rank`: num_microbatches arrays, ascending, int64, maybe empty."""
        ids = np.flatnonzero(self.rank == rank)
        by_microbatch = np.argsort(self.microbatch[ids], kind="stable")
        ends = np.cumsum(np.bincount(self.microbatch[ids], minlength=self.num_microbatches))
        return np.split(ids[by_microbatch], ends[:-1])


class Scheduler(Protocol):
    """A pure function from request to schedule that keeps the invariants in this module's docstring."""

    def __call__(self, request: ScheduleRequest, /) -> Schedule: ...


def check_schedule(request: ScheduleRequest, schedule: Schedule) -> None:
    """ValueError if `schedule` breaks an invariant of this module's docstring."""
    if schedule.num_ranks != request.num_ranks:
        raise ValueError(f"schedule must be for {request.num_ranks} ranks, but is for {schedule.num_ranks}")
    num_microbatches, multiple = schedule.num_microbatches, request.microbatch_multiple
    if num_microbatches < 1 or num_microbatches % multiple:
        raise ValueError(f"microbatches per rank must be a positive multiple of {multiple}, but are {num_microbatches}")
    _check_array("schedule.rank", schedule.rank, request.lengths.size, 0, request.num_ranks)
    _check_array("schedule.microbatch", schedule.microbatch, request.lengths.size, 0, num_microbatches)
    _check_capacity(request, schedule)


def get_scheduler(name: str) -> Scheduler:
    """The scheduler of that name; ValueError with the choices for an unknown one."""
    if name not in SCHEDULERS:
        close = difflib.get_close_matches(name, SCHEDULERS, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ValueError(f"--sequence-packing-scheduler must be one of {', '.join(SCHEDULERS)}, but is {name!r}{hint}")
    return SCHEDULERS[name]


def default(request: ScheduleRequest) -> Schedule:
    """Ranks of even cost, from as few microbatches as capacity allows.

    The costliest sequence goes first, each to the cheapest rank with room (Graham's LPT rule, 1969). Where that finds
    no room although best-fit-decreasing packing does, those tighter packs are dealt to ranks instead. Within a rank
    the costliest pack is microbatch 0, so that a rank that runs out of memory does so at once, and packs of like cost
    meet at each microbatch. O(N log N).
    """
    lengths, num_ranks, capacity = request.lengths, request.num_ranks, request.capacity
    costs = request.cost(lengths)
    num_microbatches = microbatch_lower_bound(lengths, num_ranks, capacity, request.microbatch_multiple)
    pack = _place_costliest_first(lengths, costs, num_ranks, num_microbatches, capacity)
    if pack is None:
        tight = _best_fit_decreasing(lengths, capacity)
        num_microbatches = _rounded_up(int(tight.max()) + 1, request) // num_ranks
        pack = _place_costliest_first(lengths, costs, num_ranks, num_microbatches, capacity)
        if pack is None:
            pack = _deal(tight, costs, num_ranks, num_microbatches)
    _fill_empty_packs(pack, lengths, num_ranks * num_microbatches)

    pack_costs = np.bincount(pack, weights=costs, minlength=num_ranks * num_microbatches).reshape(num_ranks, -1)
    microbatch = np.argsort(np.argsort(-pack_costs, axis=1, kind="stable"), axis=1).ravel()
    return Schedule(pack // num_microbatches, microbatch[pack], num_ranks, num_microbatches)


def empty(request: ScheduleRequest) -> Schedule:
    """The sampler has decided: what a rank drew by one `next` is one pack of that rank, in the order drawn.

    Empty packs at the end make up `microbatch_multiple`. CapacityError where what was drawn together is over capacity.
    """
    num_microbatches = _rounded_up(request.num_draws * request.num_ranks, request) // request.num_ranks
    schedule = Schedule(request.source_rank, request.source_draw, request.num_ranks, num_microbatches)
    _check_capacity(request, schedule)
    return schedule


def dp_balanced(request: ScheduleRequest) -> Schedule:
    """Packs are filled one after the other in arrival order and dealt to ranks in turn, as Megatron-LM does.

    The name is Megatron-LM's; it evens out the number of packs, not their cost: use `default` for that. A pack is
    closed by the first sequence that doesn't fit (next-fit). The pack with the most tokens is split in halves until
    the number of packs is a multiple of num_ranks * microbatch_multiple.
    """
    ends = np.cumsum(request.lengths)
    starts = []
    start = 0
    while start < ends.size:
        starts.append(start)
        start = int(np.searchsorted(ends, ends[start] - request.lengths[start] + request.capacity, side="right"))
    num_packs = _rounded_up(len(starts), request)
    starts = _split_largest(starts, ends, num_packs)
    pack = np.searchsorted(starts, np.arange(ends.size), side="right") - 1
    return Schedule(
        pack % request.num_ranks, pack // request.num_ranks, request.num_ranks, num_packs // request.num_ranks
    )


SCHEDULERS: dict[str, Scheduler] = {"default": default, "empty": empty, "dp_balanced": dp_balanced}


def _place_costliest_first(
    lengths: IntArray, costs: FloatArray, num_ranks: int, packs_per_rank: int, capacity: int
) -> IntArray | None:
    """Pack of each sequence, rank * packs_per_rank + position, int64 [N]; None where one found no room.

    The cheapest rank with room takes the next sequence, into its emptiest pack. A rank without room waits until
    sequences are short enough for its emptiest pack; it then takes one for sure, so that each rank waits at most once
    per sequence it takes.
    """
    order = np.lexsort((-lengths, -costs))
    packs = [[(0, rank * packs_per_rank + i) for i in range(packs_per_rank)] for rank in range(num_ranks)]
    cheapest = [(0.0, rank) for rank in range(num_ranks)]  # heap of (cost, rank)
    waiting: list[tuple[int, float, int]] = []  # heap of (tokens of its emptiest pack, cost, rank)
    placed = []
    for length, cost in zip(lengths[order].tolist(), costs[order].tolist()):
        most_tokens = capacity - length
        while waiting and waiting[0][0] <= most_tokens:
            heappush(cheapest, heappop(waiting)[1:])
        while cheapest and packs[cheapest[0][1]][0][0] > most_tokens:
            rank_cost, rank = heappop(cheapest)
            heappush(waiting, (packs[rank][0][0], rank_cost, rank))
        if not cheapest:
            return None
        rank_cost, rank = cheapest[0]
        tokens, pack = packs[rank][0]
        heapreplace(cheapest, (rank_cost + cost, rank))
        heapreplace(packs[rank], (tokens + length, pack))
        placed.append(pack)
    pack_of = np.empty(lengths.size, np.int64)
    pack_of[order] = placed
    return pack_of


def _best_fit_decreasing(lengths: IntArray, capacity: int) -> IntArray:
    """Pack of each sequence, int64 [N]: the longest first, each to the fullest pack with room, else to a new one."""
    pack_of = np.empty(lengths.size, np.int64)
    rooms: list[tuple[int, int]] = []  # (room, pack), ascending
    for sequence in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[sequence])
        at = bisect_left(rooms, (length, 0))
        room, pack = rooms.pop(at) if at < len(rooms) else (capacity, len(rooms))
        insort(rooms, (room - length, pack))
        pack_of[sequence] = pack
    return pack_of


def _deal(pack: IntArray, costs: FloatArray, num_ranks: int, packs_per_rank: int) -> IntArray:
    """The packs renumbered to rank * packs_per_rank + position, so that the costs of the ranks are even."""
    pack_costs = np.bincount(pack, weights=costs).astype(np.float64)
    ones = np.ones(pack_costs.size, np.int64)
    rank = _place_costliest_first(ones, pack_costs, num_ranks, packs_per_rank=1, capacity=packs_per_rank)
    assert rank is not None, "fewer places than packs"
    by_rank = np.argsort(rank, kind="stable")
    first = np.searchsorted(rank[by_rank], rank[by_rank])  # [0, 0, 1, 1, 1] -> [0, 0, 2, 2, 2]
    position = np.empty_like(rank)
    position[by_rank] = np.arange(rank.size) - first
    return (rank * packs_per_rank + position)[pack]


def _fill_empty_packs(pack: IntArray, lengths: IntArray, num_packs: int) -> None:
    """Move the shortest sequences that share a pack to packs that have none, in place."""
    counts = np.bincount(pack, minlength=num_packs)
    empty_packs = np.flatnonzero(counts == 0).tolist()
    for sequence in np.argsort(lengths, kind="stable").tolist() if empty_packs else ():
        if not empty_packs:
            return
        if counts[pack[sequence]] > 1:
            counts[pack[sequence]] -= 1
            pack[sequence] = empty_packs.pop()


def _split_largest(starts: list[int], ends: IntArray, num_packs: int) -> list[int]:
    """First sequences of `num_packs` packs of consecutive ones (fewer if sequences run out): `starts` and splits.

    `ends[i]` is the number of tokens up to and with sequence i. Ascending.
    """

    def entry(start: int, stop: int) -> tuple[int, int, int]:
        before = int(ends[start - 1]) if start else 0
        return before - int(ends[stop - 1]), start, stop

    splittable = [entry(a, b) for a, b in zip(starts, [*starts[1:], ends.size]) if b - a > 1]
    heapify(splittable)
    starts = list(starts)
    while len(starts) < num_packs and splittable:
        negative_tokens, start, stop = heappop(splittable)
        half = int(ends[stop - 1]) + negative_tokens // 2
        middle = min(max(int(np.searchsorted(ends, half)) + 1, start + 1), stop - 1)
        starts.append(middle)
        for piece in ((start, middle), (middle, stop)):
            if piece[1] - piece[0] > 1:
                heappush(splittable, entry(*piece))
    return sorted(starts)


def _rounded_up(num_packs: int, request: ScheduleRequest) -> int:
    """`num_packs` raised to the next positive multiple of num_ranks * microbatch_multiple."""
    step = request.num_ranks * request.microbatch_multiple
    return max(1, -(-num_packs // step)) * step


def _check_capacity(request: ScheduleRequest, schedule: Schedule) -> None:
    pack = schedule.rank * schedule.num_microbatches + schedule.microbatch
    tokens = np.zeros(schedule.num_ranks * schedule.num_microbatches, np.int64)
    np.add.at(tokens, pack, request.lengths)
    fullest = int(tokens.argmax())
    if tokens[fullest] > request.capacity:
        rank, microbatch = divmod(fullest, schedule.num_microbatches)
        raise CapacityError(
            f"microbatch {microbatch} of rank {rank} has {tokens[fullest]} tokens, but a pack holds "
            f"{request.capacity}; raise --max-seqlen-per-dp-cp-rank or use --sequence-packing-scheduler default"
        )


def _check_array(name: str, values: IntArray, size: int, low: int, high: int | None) -> None:
    """ValueError unless `values` is int64 [size] with each element at least `low` and below `high`."""
    if values.dtype != np.int64 or values.shape != (size,):
        raise ValueError(f"{name} must be int64 [{size}], but is {values.dtype} {list(values.shape)}")
    if size and (values.min() < low or (high is not None and values.max() >= high)):
        limit = f"at least {low}" + ("" if high is None else f" and below {high}")
        raise ValueError(f"{name} must be {limit}, but spans {values.min()} to {values.max()}")
