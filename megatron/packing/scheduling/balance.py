"""pure. The `default` scheduler: the modelled step time within a percent or so of its lower bound, in milliseconds.

For each promising number of microbatches, the lowest bound first, a few ways to place the sequences are tried until one
is as good as the bound, and the best is taken. What is tried depends on how ranks wait for one another:

    at the end of the step     ranks of even cost: costliest first to the cheapest rank (LPT), then by bisection the
                               lowest cost of a rank for which first-fit finds places (MULTIFIT: Coffman, Garey and
                               Johnson, 1978)
    in pipelines               ranks of even `sum + (stages - 1) * costliest pack`: sequences that alone cost more than
                               a fair pack gather on as few ranks as can hold them; the others make packs of even cost,
                               which are dealt to the other ranks
    at every microbatch        rows of even packs: while a sequence costs more than a fair pack, a row filled up to its
                               cost; then rows of even packs

Where capacity is tight, packs by best-fit decreasing are dealt instead. Then `movement` looks for a placement as good
that moves fewer tokens, and `arrange` puts each rank's packs in order.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.packing.scheduling.arrange import arrange
from megatron.packing.scheduling.bounds import MicrobatchBound
from megatron.packing.scheduling.even import Effort, Room, deal, even_ranks, even_rows
from megatron.packing.scheduling.even_pipelines import even_pipelines
from megatron.packing.scheduling.movement import stay_home
from megatron.packing.scheduling.placement import best_fit
from megatron.packing.scheduling.schedule import Schedule, ScheduleRequest
from megatron.packing.scheduling.step_time import StepModel

IntArray = npt.NDArray[np.int64]

_GOOD_ENOUGH = 1.0002
"""Times the bound: what is left to gain is less than any cost model is accurate to."""
_MAX_TRIES = 8
"""Numbers of microbatches tried."""
_MORE_ROOM = (115, 140, 200)
"""Percent of the microbatches with the lowest bound, tried too in pipelines: full packs can't be made even."""
_EFFORT = 40
"""Times that 1,024 sequences may be placed; of more sequences fewer times."""
_PIPELINE_EFFORT = 144
"""The same where packs matter and not just ranks."""


def default(request: ScheduleRequest) -> Schedule:
    """The least modelled step time (see the module's docstring). O(N log N)."""
    work, num_ranks = request.work, request.num_ranks
    if work.cost.size == 0:
        nowhere = np.empty(0, np.int64)
        return Schedule(nowhere, nowhere, num_ranks, request.bound.min_microbatches)
    found = _Search(request).best()
    num_microbatches = found.num_microbatches
    pack = stay_home(
        *(work, request.source_rank[work.order], found.pack),
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        capacity=request.capacity,
        model=request.model,
        good_enough=int(request.bound.time * _GOOD_ENOUGH),
    )
    pack = arrange(
        *(work, pack),
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        capacity=request.capacity,
        model=request.model,
    )
    in_global_order = np.empty_like(pack)
    in_global_order[work.order] = pack
    return Schedule(*np.divmod(in_global_order, num_microbatches), num_ranks, num_microbatches)


class _Found(NamedTuple):
    time: int
    num_microbatches: int
    pack: IntArray
    """int64 [N] in the order of the work: rank * num_microbatches + microbatch."""


class _Search:
    """For the quickest placement, over numbers of microbatches in the order of their bounds."""

    def __init__(self, request: ScheduleRequest) -> None:
        self._request = request
        self._work = request.work
        size = self._work.cost.size
        self._only_ranks_matter = request.model == StepModel()
        passes = _EFFORT * (1024 / size) ** 0.4 if self._only_ranks_matter else _PIPELINE_EFFORT * (1024 / size) ** 0.5
        self._effort = Effort(int(min(passes, _PIPELINE_EFFORT) * size))
        self._try = size if self._only_ranks_matter else 3 * size

    def best(self) -> _Found:
        """First a quick placement for each number of microbatches, then better ones where the quick one is best."""
        best: _Found | None = None
        if self._work.cost.size <= self._request.num_ranks:  # each alone on a rank: no schedule is better
            number = self._request.bound.min_microbatches
            pack = np.arange(self._work.cost.size) * number
            return _Found(self._time_of(pack, number), number, pack)
        begun = []
        quick_effort = self._effort.part(3)
        for bound, number in self._promising():
            if best is not None and best.time <= bound * _GOOD_ENOUGH:
                continue
            if best is not None and not quick_effort.spend(self._try):
                break
            placements = self._placements(bound, number)
            try:
                found = self._next(placements, number)
            except StopIteration:
                continue
            if found is not None:
                begun.append((found.time, bound, number, placements))
                best = found if best is None or found.time < best.time else best
        if best is None:  # capacity is so tight that only tight packs are left
            step = self._request.num_ranks * self._request.microbatch_multiple
            number = -(-self._tight[1] // step) * self._request.microbatch_multiple
            best = self._next(self._placements(self._request.bound.time, number), number)
            assert best is not None, "as many places as packs"
            return best
        begun.sort(key=lambda entry: entry[:3])
        while begun:
            time, bound, number, placements = begun.pop(0)
            if best.time <= bound * _GOOD_ENOUGH:
                continue
            try:
                found = self._next(placements, number)
            except StopIteration:
                continue
            best = found if found is not None and found.time < best.time else best
            # In turn where capacity decides who gets anywhere; one after the other where placements take long.
            begun.insert(len(begun) if self._only_ranks_matter else 0, (time, bound, number, placements))
        return best

    def _promising(self) -> list[MicrobatchBound]:
        """Bounds and numbers of microbatches to try, the most promising first.

        Bounds promise too much of many microbatches, as packs of few sequences can't be even: so some between the
        fewest and the one of the lowest bound are tried too, and a pack's likely excess over the mean is added.
        """
        bounds = self._request.bound.by_microbatches
        ascending = sorted(bounds, key=lambda entry: entry.num_microbatches)
        last = ascending.index(bounds[0])
        places = {round(last * part / (_MAX_TRIES - 3)) for part in range(_MAX_TRIES - 2)}
        numbers = [entry.num_microbatches for entry in ascending]
        more, work = self._request.model.num_stages - 1, self._work
        more_room = [bisect_left(numbers, numbers[last] * percent // 100) for percent in _MORE_ROOM if more]
        places |= {min(place, len(ascending) - 1) for place in (last + 1, last + 2, *more_room)}
        per_rank = work.cost.size / self._request.num_ranks

        def hoped_for(entry: MicrobatchBound) -> tuple[float, int]:
            share = min(entry.num_microbatches / per_rank, 1.0)
            excess = int(work.cost[0]) - work.total / work.cost.size
            return entry.time + more * share**2 * excess, entry.num_microbatches

        return sorted((ascending[place] for place in places), key=hoped_for)

    def _placements(self, bound: int, num_microbatches: int) -> Iterator[IntArray | None]:
        """Some with that many microbatches per rank, a quick one first; None for each attempt that failed."""
        request, work, model = self._request, self._work, self._request.model
        room = Room(
            num_ranks=request.num_ranks,
            num_microbatches=num_microbatches,
            capacity=request.capacity,
            effort=self._effort,
        )

        def tight() -> IntArray | None:
            packs, num_packs = self._tight
            fit = num_packs <= request.num_ranks * num_microbatches
            return deal(work.cost, packs, request.num_ranks, num_microbatches) if fit else None

        if model.ranks_meet:
            return even_rows(work, room, tight)
        if model.num_stages > 1:
            return even_pipelines(work, room, tight, model.num_stages, bound)
        return even_ranks(work, room, tight)

    def _next(self, placements: Iterator[IntArray | None], num_microbatches: int) -> _Found | None:
        """The next of them, with no pack left empty; None where an attempt failed. StopIteration at their end."""
        pack = next(placements)
        if pack is None:
            return None
        _fill_empty_packs(pack, self._request.num_ranks * num_microbatches)
        return _Found(self._time_of(pack, num_microbatches), num_microbatches, pack)

    @cached_property
    def _tight(self) -> tuple[IntArray, int]:
        return best_fit(self._work.length, capacity=self._request.capacity)

    def _time_of(self, pack: IntArray, num_microbatches: int) -> int:
        return self._request.model.time_of(self._work.pack_costs(pack, self._request.num_ranks, num_microbatches))


def _fill_empty_packs(pack: IntArray, num_packs: int) -> None:
    """Move the shortest sequences that share a pack to packs that have none, in place, if there are as many."""
    if pack.size < num_packs:
        return
    counts = np.bincount(pack, minlength=num_packs)
    empty = np.flatnonzero(counts == 0).tolist()
    for sequence in range(pack.size - 1, -1, -1):
        if not empty:
            return
        if counts[pack[sequence]] > 1:
            counts[pack[sequence]] -= 1
            pack[sequence] = empty.pop()
