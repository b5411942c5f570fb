"""pure. Schedules where ranks wait for one another at every microbatch, as experts spread over them make them do.

A microbatch takes as long as its costliest pack, and a step the sum of these. So while a sequence costs more than a
fair pack, a microbatch is filled up to its cost on all ranks (by first-fit); the other sequences make microbatches of
even packs. Then sequences are traded between packs to lower one microbatch after the other: what makes one of them
long fits beside what makes another one longer. Where capacity is tight, the fewest packs that are found are sorted
into microbatches as well.

    2 ranks, costs 12 7 5 3 3 2    ->    microbatch 0: 12 | 7 5,  microbatch 1: 3 2 | 3;  12 + 5 in all
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.packing.scheduling.pipeline_order import in_pipeline_order
from megatron.packing.scheduling.placement import (
    Packs,
    bisect_ranks,
    by_descending,
    first_fit,
    pack_costs,
    spread,
    tight_packs,
    trade,
)
from megatron.packing.scheduling.problem import ScheduleRequest
from megatron.packing.scheduling.ranks import GOOD_ENOUGH, Placed, further_apart

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

_MAX_FRUITLESS = 3
"""Numbers of microbatches in a row that bring nothing, before the search ends."""
_SWEPT = 24
"""Numbers of microbatches that are tried at the most: in a pipeline each further one may bring a little."""
_MANY = 1 << 14
"""Sequences, of more of which no placement is improved."""
_MOST_IMPROVED = 2
"""Numbers of microbatches, the best ones found, whose placements are improved."""
_MOST_ARRANGED = 4
"""Numbers of microbatches, the best ones found, that are simulated."""
_MOST_FULL = 3
"""Numbers of full microbatches that are tried: the largest ones, and none."""
_MAX_FULL = 64
"""Full microbatches; of more, those that follow hardly count."""
_FEW, _HEIGHTS = 2048, (1.0625, 1.125, 1.1875, 1.25, 1.375, 1.5)
"""Sequences, of up to so many of which other ways to fill microbatches are tried: up to so many times the costliest."""
_MOST_LOWERED = 100_000
"""Microbatches, times sequences, that are lowered."""
_ROUNDS, _PARTS = 2, (1 / 4, 1 / 32)
"""Times that each microbatch is lowered, by such parts of its time at the most."""
_TRADES = 50_000
"""Pairs of sequences considered in all microbatches, for each of the parts."""


class _Full(NamedTuple):
    """Some first microbatches, filled up to their costliest sequence on all ranks."""

    number: int
    pack: IntArray
    """The placement, -1 for sequences that are left."""
    rest: IntArray
    """Those that are left."""


class _Way(NamedTuple):
    """Full microbatches, and some of even packs after them."""

    placed: Placed
    full: _Full
    num_even: int


def even_microbatches(request: ScheduleRequest, numbers: list[int]) -> Placed:
    """The quickest placement found with one of these numbers of microbatches, of which the last has a pack for each
    sequence; in pipelines, by simulated 1F1B of the best few.
    """
    floor = request.bound - request.cost.fixed * numbers[0] / request.model.num_stages
    # Not a multiple of them: microbatches without a sequence cost no more than their fixed cost.
    tight = tight_packs(request.sorted.length, request.num_ranks, request.capacity, multiple=1)
    found: list[_Search] = []
    fruitless, is_many = 0, request.sorted.length.size > _FEW
    numbers = [number for number in numbers if number >= tight.num_microbatches]
    if len(numbers) > _SWEPT:
        numbers = [numbers[place] for place in further_apart(len(numbers), _SWEPT)]
    for number in numbers:
        least = min((search.best.time for search in found), default=math.inf)
        enough = (floor + request.cost.fixed * number / request.model.num_stages) * GOOD_ENOUGH
        if least <= enough or fruitless == (1 if is_many else _MAX_FRUITLESS):
            break
        found.append(_Search(request, number, tight.pack, enough))
        fruitless = 0 if found[-1].best.time < least else fruitless + 1
    found.sort(key=lambda search: search.best.time)
    for search in found[: 1 if is_many else _MOST_IMPROVED]:
        search.improve()
    placed = sorted((search.best for search in found), key=lambda placed: placed.time)
    if request.model.num_stages == 1:
        return placed[0]
    return min((_arranged(request, each) for each in placed[:_MOST_ARRANGED]), key=lambda placed: placed.time)


def _arranged(request: ScheduleRequest, placed: Placed) -> Placed:
    """With microbatches in the best order found for a pipeline."""
    packs = Packs(request.num_ranks, placed.num_microbatches, request.capacity)
    pack = in_pipeline_order(request, placed.pack, packs)
    costs = pack_costs(request.sorted.cost, pack, packs, request.cost.fixed)
    return Placed(request.model.time_of(costs), placed.num_microbatches, pack)


class _Search:
    """For placements with so many microbatches."""

    def __init__(self, request: ScheduleRequest, number: int, tight: IntArray, enough: float) -> None:
        """tight: as few packs as are found, no more than these. enough: time that needs no improvement."""
        _, self._length, self._cost = request.sorted
        self._request, self._enough = request, enough
        self._packs = Packs(request.num_ranks, number, request.capacity)
        full = self._full()
        some = full[-1:]
        if self._cost.size <= _MANY:
            some = full[-_MOST_FULL:] + full[: max(len(full) - _MOST_FULL, 0)][:1]
        if self._cost.size <= _FEW:
            some += self._full(by_first_fit=False)[:-3:-1]
            some += [each for height in _HEIGHTS for each in self._full(height=height)[:-2:-1]]
        self._ways = sorted((way for each in some for way in self._with_even(each)), key=lambda way: way.placed.time)
        microbatch, rank = np.divmod(tight, request.num_ranks)
        pack = rank * number + microbatch
        packs = [self._placed(pack)]
        if self._cost.size <= _FEW:
            packs.append(self._placed(trade(self._length, self._cost, pack, self._packs.each_alone())))
        self.best = self._best_of([*(way.placed for way in self._ways), *packs])

    def improve(self) -> None:
        """Look for a quicker placement by ways that take longer."""
        if self.best.time <= self._enough or self._cost.size > _MANY:
            return
        self.best = self._best_of([self.best, *(self._evener(way) for way in self._ways[:2])])
        for _ in range(_ROUNDS):
            lowered = self._lowered(self.best)
            if lowered.time >= self.best.time:
                break
            self.best = lowered

    @staticmethod
    def _best_of(placed: list[Placed]) -> Placed:
        return min(placed, key=lambda each: each.time)

    def _full(self, height: float = 1.0, by_first_fit: bool = True) -> list[_Full]:
        """No full microbatch, one, two ... filled up to `height` times the costliest sequence left: by first-fit, or
        else with like sequences on all ranks.
        """
        num_ranks, number, capacity = self._packs
        one = Packs(num_ranks, 1, capacity)
        full = [_Full(0, np.full(self._cost.size, -1, np.int64), np.arange(self._cost.size))]
        while full[-1].rest.size and len(full) <= min(number, _MAX_FULL):
            done, pack, rest = full[-1]
            length, cost = self._length[rest], self._cost[rest]
            limit = float(cost.max()) * height
            if limit * num_ranks * (number - done) <= cost.sum():
                break
            rank = (
                first_fit(length, cost, one, limit=limit)[0] if by_first_fit else spread(length, cost, one, limit=limit)
            )
            assert rank is not None
            pack = pack.copy()
            pack[rest] = np.where(rank < 0, -1, rank * number + done)
            full.append(_Full(done + 1, pack, rest[rank < 0]))
        return full

    def _with_even(self, full: _Full) -> Iterator[_Way]:
        """The rest in even packs: of microbatches about as costly as their costliest sequence, or of all."""
        if full.rest.size == 0:
            yield _Way(self._placed(full.pack), full, 0)
            return
        left = self._packs.num_microbatches - full.number
        length, cost = self._length[full.rest], self._cost[full.rest]
        fewest = max(int(cost.sum() / (self._packs.num_ranks * cost.max())), 1)
        some = (fewest, fewest + 1) if self._cost.size <= _MANY else (fewest,)
        for num_even in sorted({min(number, left) for number in (*some, self._packs.num_microbatches)} - {0}):
            even = spread(length, cost, Packs(self._packs.num_ranks * num_even, 1, self._packs.capacity))
            if even is not None:
                yield _Way(self._placed(full.pack, full, even), full, num_even)

    def _evener(self, way: _Way) -> Placed:
        """The placement with its even packs made more even by bisection."""
        if way.num_even == 0:
            return way.placed
        rest = way.full.rest
        packs = Packs(self._packs.num_ranks * way.num_even, 1, self._packs.capacity)
        high = float(np.bincount(way.placed.pack[rest], weights=self._cost[rest]).max())
        even = bisect_ranks(self._length[rest], self._cost[rest], packs, high)
        return way.placed if even is None else self._placed(way.full.pack, way.full, even)

    def _lowered(self, placed: Placed) -> Placed:
        """With sequences traded between packs to lower one microbatch after the other, where that is a gain."""
        alone, number = self._packs.each_alone(), self._packs.num_microbatches
        pack = placed.pack
        for microbatch in range(min(number, -(-_MOST_LOWERED // self._cost.size))):
            for part in _PARTS:
                costs = self._costs(pack).max(axis=0)
                # Packs of other microbatches may grow up to their costliest: loads besides what they hold make up the
                # difference to this one, less what it is to gain, or else nothing would ever be below it.
                loads = costs[microbatch] * (1 - part) - costs
                loads[microbatch] = 0
                other = trade(
                    *(self._length, self._cost, pack, alone),
                    loads=np.tile(loads, self._packs.num_ranks),
                    partners=2,
                    offered=8,
                    budget=_TRADES // number,
                )
                if self._costs(other).max(axis=0).sum() < costs.sum():
                    pack = other
        return self._placed(pack)

    def _costs(self, pack: IntArray) -> FloatArray:
        return pack_costs(self._cost, pack, self._packs, self._request.cost.fixed)

    def _placed(self, pack: IntArray, full: _Full | None = None, even: IntArray | None = None) -> Placed:
        """The placement, with the rest of `full` in `even` packs after the full microbatches; with packs of like cost
        in each microbatch, the costliest first.
        """
        number, num_ranks = self._packs.num_microbatches, self._packs.num_ranks
        if full is not None and even is not None:
            microbatch, rank = np.divmod(even, num_ranks)
            pack = pack.copy()
            pack[full.rest] = rank * number + full.number + microbatch
        costs = self._costs(pack).ravel()
        by_cost = by_descending(costs)
        place = np.empty(costs.size, np.int64)
        place[by_cost] = np.arange(costs.size) % num_ranks * number + np.arange(costs.size) // num_ranks
        time = self._request.model.even_time_of(costs[by_cost].reshape(number, num_ranks).T)
        return Placed(time, number, place[pack])
