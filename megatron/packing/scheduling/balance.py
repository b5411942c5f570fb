"""pure. The `default` scheduler: the modelled step time as a rule within a percent of its lower bound, in milliseconds.

For each promising number of microbatches, the lowest bound first, a few ways to place the sequences are tried until one
is as good as the bound, and the best is taken. What is tried depends on how ranks wait for one another:

    at the end of the step     ranks of even cost: costliest first to the cheapest rank (LPT), then by bisection the
                               lowest cost of a rank for which first-fit finds places (MULTIFIT: Coffman, Garey and
                               Johnson, 1978); then packs made over two by two
    in pipelines               ranks of even `sum + (stages - 1) * costliest pack`: sequences that alone cost more than
                               a fair pack gather on as few ranks as can hold them; the others make packs of even cost,
                               which are dealt to the other ranks
    at every microbatch        rows of even packs: while a sequence costs more than a fair pack, a row filled up to its
                               cost; then rows of even packs; then trades between rows, step by step and by annealing;
                               then packs made over

Where capacity is tight, packs by best-fit decreasing, or those that the bound was found with, are dealt instead. In
pipelines `arrange` then puts the packs of the best few in order and shapes them, and the quickest by simulated 1F1B is
taken. At last `movement` looks for a placement as good that moves fewer tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.packing.scheduling.arrange import arrange, can_simulate, costliest_first
from megatron.packing.scheduling.bounds import MicrobatchBound
from megatron.packing.scheduling.even import Effort, Room, even_ranks
from megatron.packing.scheduling.even_full import annealed_rows, evener_ranks, evener_rows
from megatron.packing.scheduling.even_pipelines import even_pipelines
from megatron.packing.scheduling.even_rows import Rows, even_rows, rows_with_short_last
from megatron.packing.scheduling.movement import stay_home
from megatron.packing.scheduling.placement import best_fit
from megatron.packing.scheduling.repacking import deal, fill_empty
from megatron.packing.scheduling.schedule import Schedule, ScheduleRequest
from megatron.packing.scheduling.step_time import StepModel
from megatron.packing.scheduling.work import MANY

IntArray = npt.NDArray[np.int64]

_GOOD_ENOUGH = 1.0002
"""Times the bound: what is left to gain is less than any cost model is accurate to."""
_MAX_TRIES = 8
"""Numbers of microbatches tried."""
_MORE_ROOM = (115, 140, 200)
"""Percent of the microbatches with the lowest bound, tried too in pipelines: full packs can't be made even."""
_SHARE_WITH_EMPTY = 0.3
"""Of a sequence to a pack, as which it counts for the likely excess in pipelines with more packs than sequences: what
can't be even may stay empty then, so that the first such number of microbatches is worth a try.
"""
_MAX_ARRANGED = 4
"""Numbers of microbatches, the best ones found, whose packs are arranged in pipelines to find the quickest by 1F1B."""
_EFFORT = 40
"""Times that 1,024 sequences may be placed; of more sequences fewer times."""
_PIPELINE_EFFORT = 144
"""The same where packs matter and not just ranks."""
_MOST_SPLIT, _WORTH_SPLITTING = 2048, 400
"""Packs are made over two by two for up to so many sequences, where more than such a part of the time is to gain."""
_SPLITS_OF_RANKS, _SPLITS_OF_ROWS = (6000, 1 << 23), (4000, 0)
"""Looked at for each sequence, and besides, where much stays to gain: some 3 nanoseconds each."""
_STEPS_OF_ROWS, _WORTH_ANNEALING = 200_000, 100
"""To anneal rows, where more than such a part of the time is to gain: half of the steps, some 3 milliseconds, for the
quickest placement, a quarter for the next one, and so on.
"""


def default(request: ScheduleRequest) -> Schedule:
    """The least modelled step time (see the module's docstring). O(N log N)."""
    work, model, num_ranks = request.work, request.model, request.num_ranks
    if work.cost.size == 0:
        nowhere = np.empty(0, np.int64)
        return Schedule(nowhere, nowhere, num_ranks, request.bound.min_microbatches)
    found = search(request)
    best = _quickest_by_1f1b(request, found[:_MAX_ARRANGED]) if model.num_stages > 1 else found[0]
    num_microbatches = best.num_microbatches
    pack = stay_home(
        *(work, request.source_rank[work.order], best.pack),
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        capacity=request.capacity,
        model=model,
        good_enough=int(request.bound.time * _GOOD_ENOUGH),
    )
    if model.num_stages == 1 and not model.ranks_meet:
        pack = costliest_first(work, pack, num_ranks, num_microbatches)
    in_global_order = np.empty_like(pack)
    in_global_order[work.order] = pack
    rank = in_global_order // num_microbatches
    return Schedule(rank, in_global_order - rank * num_microbatches, num_ranks, num_microbatches)


class Found(NamedTuple):
    """A placement and its modelled time (`StepModel.time_of`)."""

    time: int
    num_microbatches: int
    pack: IntArray
    """int64 [N] in the order of the work: rank * num_microbatches + microbatch."""


def search(request: ScheduleRequest) -> list[Found]:
    """The quickest placement found for each number of microbatches that was tried, the quickest of all first (of those
    as good, the one of the fewest microbatches); in pipelines as flow shops, with packs in no order. For at least one
    sequence.
    """
    return _Search(request).best_by_microbatches()


class _Begun(NamedTuple):
    """Placements with that many microbatches, of which the quick one has been tried."""

    bound: int
    num_microbatches: int
    placements: Iterator[IntArray | None]


def _quickest_by_1f1b(request: ScheduleRequest, found: list[Found]) -> Found:
    """With packs arranged; by simulation where pipelines are not too long for that, else the first."""
    if request.work.cost.size > MANY or not can_simulate(request.model, found[0].num_microbatches):
        found = found[:1]
    arranged = []
    for place, (_, num_microbatches, pack) in enumerate(found):
        if place > 0 and not can_simulate(request.model, num_microbatches):
            continue
        pack = arrange(
            *(request.work, pack),
            num_ranks=request.num_ranks,
            num_microbatches=num_microbatches,
            capacity=request.capacity,
            model=request.model,
        )
        costs = request.work.pack_costs(pack, request.num_ranks, num_microbatches)
        time = request.model.simulated_time_of(costs) if len(found) > 1 else 0
        arranged.append(Found(time, num_microbatches, pack))
    return min(arranged, key=lambda entry: entry[:2])


class _Search:
    """For the quickest placement, over numbers of microbatches in the order of their bounds."""

    def __init__(self, request: ScheduleRequest) -> None:
        self._request = request
        self._work = request.work
        size = self._work.cost.size
        self._only_ranks_matter = request.model == StepModel()
        passes = _EFFORT * (1024 / size) ** 0.4 if self._only_ranks_matter else _PIPELINE_EFFORT * (1024 / size) ** 0.3
        self._effort = Effort(int(min(passes, _PIPELINE_EFFORT) * size))
        self._try = size if self._only_ranks_matter else 3 * size
        self._found: dict[int, Found] = {}

    def best_by_microbatches(self) -> list[Found]:
        """First by a quick try for each number of microbatches, then by better ones where something is left to gain."""
        if self._work.cost.size <= self._request.num_ranks:  # each alone on a rank: no schedule is better
            number = self._request.bound.min_microbatches
            pack = np.arange(self._work.cost.size) * number
            return [Found(self._time_of(pack, number), number, pack)]
        begun = self._begin()
        if not self._found:  # capacity is so tight that only tight packs are left
            step = self._request.num_ranks * self._request.microbatch_multiple
            number = -(-self._tight[1] // step) * self._request.microbatch_multiple
            self._try_until_found(self._placements(self._request.bound.time, number), number)
            assert self._found, "as many places as packs"
        # Of many sequences, only the most promising numbers of microbatches are looked into.
        if self._work.cost.size > MANY:
            begun = begun[: 2 if self._only_ranks_matter else 1]
        tried = begun.copy()
        while begun:
            bound, number, placements = begun.pop(0)
            if self._is_good_enough(bound) or not self._try_next(placements, number):
                continue
            # In turn where capacity decides who gets anywhere; one after the other where placements take long.
            begun.insert(len(begun) if self._only_ranks_matter else 0, _Begun(bound, number, placements))
        if self._request.model.num_stages == 1 and self._work.cost.size <= _MOST_SPLIT:
            self._make_full_packs_even(tried)
        as_good = min(found.time for found in self._found.values()) * _GOOD_ENOUGH
        by_number = sorted(self._found.values(), key=lambda found: found.num_microbatches)
        return sorted(by_number, key=lambda found: found.time if found.time > as_good else 0)

    def _begin(self) -> list[_Begun]:
        """Try each promising number of microbatches once; what found a placement, the quickest first."""
        begun = []
        quick_effort = self._effort.part(3)
        for bound, number in self._promising():
            if self._found and self._is_good_enough(bound):
                continue
            if self._found and not quick_effort.spend(self._try):
                break
            placements = self._placements(bound, number)
            if self._try_until_found(placements, number):
                begun.append(_Begun(bound, number, placements))
        return sorted(begun, key=lambda entry: (self._found[entry.num_microbatches].time, entry[:2]))

    def _is_good_enough(self, bound: int) -> bool:
        """The quickest found, beside all that has this bound."""
        return min(found.time for found in self._found.values()) <= bound * _GOOD_ENOUGH

    def _try_until_found(self, placements: Iterator[IntArray | None], num_microbatches: int) -> bool:
        """Take placements up to the first that is one; whether there is."""
        while num_microbatches not in self._found:
            if not self._try_next(placements, num_microbatches):
                return False
        return True

    def _try_next(self, placements: Iterator[IntArray | None], num_microbatches: int) -> bool:
        """Take the next placement, with no pack left empty, where it is quicker; whether there may be more of them."""
        try:
            pack = next(placements)
        except StopIteration:
            return False
        if pack is not None:
            fill_empty(pack, self._request.num_ranks * num_microbatches)
            found = Found(self._time_of(pack, num_microbatches), num_microbatches, pack)
            best = self._found.get(num_microbatches)
            self._found[num_microbatches] = found if best is None or found.time < best.time else best
        return True

    def _make_full_packs_even(self, begun: list[_Begun]) -> None:
        """Where that is a gain, of the quickest placements first."""
        evener, (per_sequence, besides) = evener_rows, _SPLITS_OF_ROWS
        if self._only_ranks_matter:
            evener, (per_sequence, besides) = evener_ranks, _SPLITS_OF_RANKS
        splits, steps = Effort(per_sequence * self._work.cost.size + besides), _STEPS_OF_ROWS
        for bound, number, _ in sorted(begun, key=lambda entry: (self._found[entry.num_microbatches].time, entry[:2])):
            if not self._is_good_enough(bound + bound // _WORTH_SPLITTING):
                low, room = bound - self._work.fixed * number, self._room(number)
                if self._request.model.ranks_meet and not self._is_good_enough(bound + bound // _WORTH_ANNEALING):
                    steps //= 2
                    enough = int(low * _GOOD_ENOUGH)
                    pack = annealed_rows(self._work, room, self._found[number].pack, enough, steps)
                    self._try_next(iter((pack,)), number)
                pack = evener(self._work, room, self._found[number].pack, low, splits)
                self._try_next(iter(() if pack is None else (pack,)), number)

    def _promising(self) -> list[MicrobatchBound]:
        """Bounds and numbers of microbatches to try, the most promising first.

        Bounds promise too much of many microbatches, as packs of few sequences can't be even: so some between the
        fewest and the one of the lowest bound are tried too, and a pack's likely excess over the mean is added. That is
        less again where packs may stay empty, as there are too few sequences: then ranks of pipelines can hold long
        sequences alone.
        """
        bounds = self._request.bound.by_microbatches
        ascending = sorted(bounds, key=lambda entry: entry.num_microbatches)
        last = ascending.index(bounds[0])
        places = {round(last * part / (_MAX_TRIES - 3)) for part in range(_MAX_TRIES - 2)}
        numbers = [entry.num_microbatches for entry in ascending]
        more, work = self._request.model.num_stages - 1, self._work
        per_rank = work.cost.size / self._request.num_ranks
        more_room = [numbers[last] * percent // 100 for percent in _MORE_ROOM] + [int(per_rank) + 1] if more else []
        more_places = [bisect_left(numbers, number) for number in more_room]
        places |= {min(place, len(ascending) - 1) for place in (last + 1, last + 2, *more_places)}
        alike = max(int(bounds[0].time * (_GOOD_ENOUGH - 1)), 1)

        def hoped_for(entry: MicrobatchBound) -> tuple[float, int]:
            share = entry.num_microbatches / per_rank
            if share > 1:
                share = 1 if self._request.model.ranks_meet else _SHARE_WITH_EMPTY
            excess = int(work.cost[0]) - work.total / work.cost.size
            return (entry.time + more * share * share * excess) // alike, entry.num_microbatches

        return sorted((ascending[place] for place in places), key=hoped_for)

    def _placements(self, bound: int, num_microbatches: int) -> Iterator[IntArray | None]:
        """Some with that many microbatches per rank, a quick one first; None for each attempt that failed."""
        request, work, model = self._request, self._work, self._request.model
        room = self._room(num_microbatches)

        def tight() -> IntArray | None:
            packs, num_packs = self._tight
            fit = num_packs <= request.num_ranks * num_microbatches
            return deal(work.cost, packs, request.num_ranks, num_microbatches) if fit else None

        if model.ranks_meet:
            return even_rows(work, room, tight, lambda: self._short_last)
        if model.num_stages > 1:
            return even_pipelines(work, room, tight, model.num_stages, bound)
        return even_ranks(work, room, tight)

    def _room(self, num_microbatches: int) -> Room:
        return Room(
            num_ranks=self._request.num_ranks,
            num_microbatches=num_microbatches,
            capacity=self._request.capacity,
            effort=self._effort,
        )

    @cached_property
    def _tight(self) -> tuple[IntArray, int]:
        """As few packs as are known of, and how many."""
        packing = self._request.bound.packing
        if packing is not None:
            return packing, int(packing.max()) + 1
        return best_fit(self._work.length, capacity=self._request.capacity)

    @cached_property
    def _short_last(self) -> Rows | None:
        return rows_with_short_last(self._work, self._request.num_ranks, self._request.capacity)

    def _time_of(self, pack: IntArray, num_microbatches: int) -> int:
        return self._request.model.time_of(self._work.pack_costs(pack, self._request.num_ranks, num_microbatches))
