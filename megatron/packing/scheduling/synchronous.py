"""pure. Mode "synchronous": ranks wait for one another at every microbatch.

They do where experts are spread over them. A microbatch takes as long as its costliest pack, and a
step takes the sum of these. For each number of microbatches:

    1. while a sequence costs more than a fair pack, a microbatch is filled up to its cost on all
       ranks; the other sequences make microbatches of even packs (`_Search`);
    2. where capacity is tight, tight packs are sorted into microbatches as well;
    3. the best placements are refined: bisection makes even packs more even, and trades between
       packs lower one microbatch after the other (`_Search.refine`).

    2 ranks, costs 12 7 5 3 3 2    ->    microbatch 0: 12 | 7 5,  microbatch 1: 3 2 | 3,
                                         12 + 5 in all

In a pipeline the best few are ordered by simulated 1F1B, and the quickest is taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.packing.scheduling.bounds import GOOD_ENOUGH
from megatron.packing.scheduling.pipeline_order import order_microbatches
from megatron.packing.scheduling.placement import (
    Packs,
    Placed,
    bisect_ranks,
    by_descending,
    costs_as_run,
    first_fit,
    geometric_grid,
    place_longest_first,
    trade,
)
from megatron.packing.scheduling.problem import ScheduleRequest
from megatron.packing.scheduling.tight_packs import tight_packs

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class SynchronousLimits:
    """Limits of the search of this mode."""

    small_batch: int = 2048
    """Sequences, up to which more ways to fill microbatches are tried, and several numbers of
    microbatches refined."""
    large_batch: int = 1 << 14
    """Sequences, above which few ways are tried and nothing is refined, to bound the time."""
    good_enough: float = GOOD_ENOUGH
    """Modelled time over its bound, at which the search ends."""
    max_numbers: int = 24
    """Numbers of microbatches that are tried. In a pipeline each of thousands may bring a little.
    """
    max_fruitless: int = 3
    """Numbers of microbatches in a row without a gain, after which the search ends."""
    max_fruitless_of_more: int = 1
    """Numbers in a row without a gain above `small_batch`, where each takes longer."""
    max_refined: int = 2
    """Numbers of microbatches, the best ones, that are refined; one above `small_batch`."""
    max_ordered: int = 4
    """Numbers of microbatches, the best ones, that are ordered by simulation in a pipeline."""
    max_full: int = 64
    """Full microbatches. Of more, those that follow hardly count."""
    num_full_tried: int = 3
    """Numbers of full microbatches that are tried: the largest ones, and none."""
    num_spread_full_tried: int = 2
    """Numbers of full microbatches of similar sequences on all ranks, for small batches."""
    heights: tuple[float, ...] = (1.0625, 1.125, 1.1875, 1.25, 1.375, 1.5)
    """Times the costliest sequence left, up to which microbatches are filled as well in small
    batches: the cost of one sequence alone may leave gaps on all ranks."""
    max_lowered: int = 100_000
    """Microbatches times sequences that `_lower_peaks` goes through, to bound its time."""
    lower_rounds: int = 2
    """Rounds in which each microbatch is lowered."""
    lower_parts: tuple[float, ...] = (1 / 4, 1 / 32)
    """Parts of its time by which a microbatch is lowered at most: a coarse pass, then a fine one.
    """
    lower_trades: int = 50_000
    """Pairs of sequences considered in all microbatches, for each of the parts."""


LIMITS = SynchronousLimits()
_TIME = attrgetter("time")


class _Full(NamedTuple):
    """Some first microbatches, filled up to their costliest sequence on all ranks."""

    number: int
    pack: IntArray
    """The placement, -1 for sequences that are left."""
    rest: IntArray
    """The sequences that are left."""


class _Way(NamedTuple):
    """Full microbatches, and some of even packs after them."""

    placed: Placed
    full: _Full
    num_even: int


def balance_microbatches(
    request: ScheduleRequest, numbers: list[int], limits: SynchronousLimits = LIMITS
) -> Placed:
    """The quickest placement found with one of these numbers of microbatches.

    Args:
        numbers: ascending. The last one has a pack for each sequence.
    """
    searches = sorted(_sweep(request, numbers, limits), key=lambda search: search.best.time)
    is_small = request.sorted.length.size <= limits.small_batch
    for search in searches[: limits.max_refined if is_small else 1]:
        search.refine()
    placed = sorted((search.best for search in searches), key=_TIME)
    if request.model.num_stages == 1:
        return placed[0]
    ordered = []
    for _, number, pack in placed[: limits.max_ordered]:
        packs = Packs(request.num_ranks, number, request.capacity)
        pack = order_microbatches(request, pack, packs)
        costs = costs_as_run(request, pack, packs)
        ordered.append(Placed(request.model.time_of(costs), number, pack))
    return min(ordered, key=_TIME)


def _sweep(
    request: ScheduleRequest, numbers: list[int], limits: SynchronousLimits
) -> list[_Search]:
    """A search for each number of microbatches tried, until more bring nothing."""
    length = request.sorted.length
    is_small = length.size <= limits.small_batch
    max_fruitless = limits.max_fruitless if is_small else limits.max_fruitless_of_more
    # The bound without fixed costs, which grow with the number of microbatches.
    floor = request.work_bound - request.cost.fixed * numbers[0] / request.model.num_stages
    # Not a multiple: microbatches without a sequence cost no more than their fixed cost.
    tight = tight_packs(request, multiple=1)
    numbers = [number for number in numbers if number >= tight.num_microbatches]
    if len(numbers) > limits.max_numbers:
        numbers = [numbers[place] for place in geometric_grid(len(numbers), limits.max_numbers)]

    searches: list[_Search] = []
    least, fruitless = math.inf, 0
    for number in numbers:
        bound = floor + request.cost.fixed * number / request.model.num_stages
        enough = bound * limits.good_enough
        if least <= enough or fruitless == max_fruitless:
            break
        search = _Search(request, number, enough, limits)
        search.try_quick_ways(tight.pack)
        searches.append(search)
        fruitless = 0 if search.best.time < least else fruitless + 1
        least = min(least, search.best.time)
    return searches


class _Search:
    """Search for the best placement with a given number of microbatches."""

    best: Placed
    """The quickest placement found so far."""

    def __init__(
        self, request: ScheduleRequest, number: int, enough: float, limits: SynchronousLimits
    ) -> None:
        """Takes what is sought; `enough` is a time that needs no refinement."""
        _, self._length, self._cost = request.sorted
        self._request, self._enough, self._limits = request, enough, limits
        self._packs = Packs(request.num_ranks, number, request.capacity)
        self._ways: list[_Way] = []

    def try_quick_ways(self, tight: IntArray) -> None:
        """Finds a first placement.

        Args:
            tight: tight packs [N], numbered from 0; at most one per rank and microbatch.
        """
        ways = [way for full in self._fulls() for way in self._with_even(full)]
        self._ways = sorted(ways, key=lambda way: way.placed.time)
        microbatch, rank = np.divmod(tight, self._packs.num_ranks)
        pack = rank * self._packs.num_microbatches + microbatch
        placed = [*(way.placed for way in self._ways), self._placed(pack)]
        if self._cost.size <= self._limits.small_batch:
            pack = trade(self._length, self._cost, pack, self._packs.each_alone())
            placed.append(self._placed(pack))
        self.best = min(placed, key=_TIME)

    def refine(self) -> None:
        """Looks for a quicker placement by ways that take longer."""
        if self.best.time <= self._enough or self._cost.size > self._limits.large_batch:
            return
        refined = [self._refine_even(way) for way in self._ways[:2]]
        self.best = min([self.best, *refined], key=_TIME)
        for _ in range(self._limits.lower_rounds):
            lowered = self._lower_peaks(self.best)
            if lowered.time >= self.best.time:
                break
            self.best = lowered

    def _fulls(self) -> list[_Full]:
        """Full microbatches to start from: few for large batches, many for small ones."""
        limits, size = self._limits, self._cost.size
        fulls = self._fill()
        tried = fulls[-1:]
        if size <= limits.large_batch:
            # The most full microbatches, and none: of 0 1 2 3 4 5    ->    3 4 5 0
            count = limits.num_full_tried
            tried = fulls[-count:] + fulls[: max(len(fulls) - count, 0)][:1]
        if size <= limits.small_batch:
            tried += self._fill(by_first_fit=False)[-limits.num_spread_full_tried :][::-1]
            tried += [self._fill(height)[-1] for height in limits.heights]
        return tried

    def _fill(self, height: float = 1.0, by_first_fit: bool = True) -> list[_Full]:
        """Lists 0, 1, 2 ... full microbatches, while a sequence costs more than a fair pack.

        Each is filled up to `height` times the costliest sequence left: by first-fit, or else with
        similar sequences on all ranks.
        """
        num_ranks, number, capacity = self._packs
        one = Packs(num_ranks, 1, capacity)
        full = [_Full(0, np.full(self._cost.size, -1, np.int64), np.arange(self._cost.size))]
        while full[-1].rest.size and len(full) <= min(number, self._limits.max_full):
            done, pack, rest = full[-1]
            length, cost = self._length[rest], self._cost[rest]
            limit = float(cost.max()) * height
            if limit * num_ranks * (number - done) <= cost.sum():
                break
            if by_first_fit:
                rank, _ = first_fit(length, cost, one, limit=limit)
            else:
                placed = place_longest_first(length, cost, one, limit=limit)
                assert placed is not None, "with a limit, sequences are left out instead"
                rank = placed
            pack = pack.copy()
            pack[rest] = np.where(rank < 0, -1, rank * number + done)
            full.append(_Full(done + 1, pack, rest[rank < 0]))
        return full

    def _with_even(self, full: _Full) -> Iterator[_Way]:
        """The rest in even packs, in as many microbatches as its costliest sequence fills or all.

        2 ranks, rest 9 9 5 5 4 4    ->    36 / (2 * 9) = 2 microbatches of 9 9 and 9 9
        """
        if full.rest.size == 0:
            yield _Way(self._placed(full.pack), full, 0)
            return
        num_ranks, number, capacity = self._packs
        length, cost = self._length[full.rest], self._cost[full.rest]
        fewest = max(int(cost.sum() / (num_ranks * cost.max())), 1)
        wanted = [fewest, number]
        if self._cost.size <= self._limits.large_batch:
            wanted.append(fewest + 1)
        for num_even in sorted({min(each, number - full.number) for each in wanted} - {0}):
            even = place_longest_first(length, cost, Packs(num_ranks * num_even, 1, capacity))
            if even is not None:
                yield _Way(self._placed(self._join(full, even)), full, num_even)

    def _join(self, full: _Full, even: IntArray) -> IntArray:
        """The placement with the rest of `full` in `even` packs after the full microbatches."""
        # Even packs are numbered over ranks first: 2 ranks, pack 3    ->    microbatch 1, rank 1
        microbatch, rank = np.divmod(even, self._packs.num_ranks)
        pack = full.pack.copy()
        pack[full.rest] = rank * self._packs.num_microbatches + full.number + microbatch
        return pack

    def _refine_even(self, way: _Way) -> Placed:
        """The placement with its even packs more even, by bisection."""
        if way.num_even == 0:
            return way.placed
        rest = way.full.rest
        packs = Packs(self._packs.num_ranks * way.num_even, 1, self._packs.capacity)
        high = float(np.bincount(way.placed.pack[rest], weights=self._cost[rest]).max())
        even = bisect_ranks(self._length[rest], self._cost[rest], packs, high)
        return way.placed if even is None else self._placed(self._join(way.full, even))

    def _lower_peaks(self, placed: Placed) -> Placed:
        """The placement after trades that lower one microbatch after the other, where they gain."""
        limits, alone = self._limits, self._packs.each_alone()
        num_ranks, number, _ = self._packs
        pack = placed.pack
        for microbatch in range(min(number, -(-limits.max_lowered // self._cost.size))):
            for part in limits.lower_parts:
                costs = costs_as_run(self._request, pack, self._packs).max(axis=0)
                # Packs of other microbatches may grow up to their costliest: loads besides what
                # they hold make up the difference to this one, less what it is to gain, or else
                # nothing would ever be below it.
                loads = costs[microbatch] * (1 - part) - costs
                loads[microbatch] = 0
                other = trade(
                    *(self._length, self._cost, pack, alone),
                    loads=np.tile(loads, num_ranks),
                    partners=2,
                    offered=8,
                    budget=limits.lower_trades // number,
                )
                if costs_as_run(self._request, other, self._packs).max(axis=0).sum() < costs.sum():
                    pack = other
        return self._placed(pack)

    def _placed(self, pack: IntArray) -> Placed:
        """The placement with packs sorted by cost into microbatches, and its time.

        2 ranks, packs 9 5 | 4 8    ->    9 5 | 8 4: microbatch 0 takes 9, microbatch 1 takes 5
        """
        num_ranks, number, _ = self._packs
        costs = costs_as_run(self._request, pack, self._packs).ravel()
        by_cost = by_descending(costs)
        place = np.empty(costs.size, np.int64)
        # The k-th costliest pack goes to microbatch k // num_ranks of rank k % num_ranks.
        k = np.arange(costs.size)
        place[by_cost] = k % num_ranks * number + k // num_ranks
        time = self._request.model.even_time_of(costs[by_cost].reshape(number, num_ranks).T)
        return Placed(time, number, place[pack])
