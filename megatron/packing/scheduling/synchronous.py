"""pure. Mode "synchronous": ranks wait for one another at every microbatch.

They do where experts are spread over them. A microbatch takes as long as its costliest pack, and a
step takes the sum of these. For each number of microbatches:

    1. while a sequence costs more than a fair pack, a microbatch is filled up to its cost on all
       ranks (`_FilledPrefix`); the remaining sequences make microbatches of even packs
       (`_Candidate`);
    2. where capacity is tight, tight packs are sorted into microbatches as well;
    3. the best placements are refined: bisection makes even packs more even, and trades between
       packs lower one microbatch after the other (`_Search.refine`).

    2 ranks, costs 12 7 5 3 3 2    ->    microbatch 0: 12 | 7 5,  microbatch 1: 3 2 | 3,
                                         12 + 5 in all

In a pipeline the best few are ordered by simulated 1F1B, and the quickest is taken. Notation as in
`placement`: `pack` is an array, the pack of each sequence.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.packing.scheduling.pipeline_order import order_microbatches
from megatron.packing.scheduling.placement import (
    PackGrid,
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
from megatron.packing.scheduling.step_time import GOOD_ENOUGH
from megatron.packing.scheduling.tight_packs import tight_packs

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class SynchronousLimits:
    """Limits of the search of this mode."""

    small_batch: int = 2048
    """Sequences, up to which more filled prefixes are tried, and several numbers of microbatches
    refined."""
    large_batch: int = 1 << 14
    """Sequences, above which few prefixes are tried and nothing is refined, to bound the time."""
    good_enough: float = GOOD_ENOUGH
    """Modelled time over its bound, at which the search ends."""
    max_counts: int = 24
    """Numbers of microbatches that are tried. In a pipeline each of thousands may bring a little.
    """
    max_fruitless: int = 3
    """Numbers of microbatches in a row without a gain, after which the search ends."""
    max_fruitless_large: int = 1
    """The same for batches of more than `small_batch` sequences, where each number takes longer."""
    max_refined: int = 2
    """Numbers of microbatches, the best ones, that are refined; one above `small_batch`."""
    max_ordered: int = 4
    """Numbers of microbatches, the best ones, that are ordered by simulation in a pipeline."""
    max_filled: int = 64
    """Most microbatches of a filled prefix. Later ones hardly change the time."""
    num_prefixes_tried: int = 3
    """Longest filled prefixes that are tried, beside the empty one."""
    num_similar_prefixes_tried: int = 2
    """Longest prefixes filled with similar sequences on all ranks. Small batches only."""
    fill_factors: tuple[float, ...] = (1.0625, 1.125, 1.1875, 1.25, 1.375, 1.5)
    """Fill limits to try, as multiples of the costliest remaining sequence: its cost alone may
    leave gaps on all ranks. Small batches only."""
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


class _FilledPrefix(NamedTuple):
    """The first microbatches, filled on all ranks up to their costliest sequence.

    The module's example, 2 microbatches: number 0 holds 12 | 7 5. Packs are 0 1 on rank 0 and 2 3
    on rank 1:

        costs 12 7 5 3 3 2    ->    num_filled 1, pack [0 2 2 -1 -1 -1], remaining [3 4 5]
    """

    num_filled: int
    """Microbatches that are filled."""
    pack: IntArray
    """int64 [N]: the pack of each sequence; -1 if it remains."""
    remaining: IntArray
    """Indices of the sequences that remain, ascending."""


class _Candidate(NamedTuple):
    """A placement: filled microbatches, and then some of even packs."""

    placed: Placed
    prefix: _FilledPrefix
    num_even: int
    """Microbatches of even packs, which hold the prefix's remaining sequences."""


def balance_microbatches(
    request: ScheduleRequest, microbatch_counts: list[int], limits: SynchronousLimits = LIMITS
) -> Placed:
    """Returns the quickest placement found with one of these numbers of microbatches.

    Args:
        microbatch_counts: numbers to try, ascending. The last one has a pack for each sequence.
    """
    searches = sorted(
        _sweep(request, microbatch_counts, limits), key=lambda search: search.best.time
    )
    is_small = request.sorted.length.size <= limits.small_batch
    for search in searches[: limits.max_refined if is_small else 1]:
        search.refine()
    placed = sorted((search.best for search in searches), key=_TIME)
    if request.model.num_stages == 1:
        return placed[0]
    ordered = []
    for _, num_microbatches, pack in placed[: limits.max_ordered]:
        packs = PackGrid(request.num_ranks, num_microbatches, request.capacity)
        pack = order_microbatches(request, pack, packs)
        costs = costs_as_run(request, pack, packs)
        ordered.append(Placed(request.model.time_of(costs), num_microbatches, pack))
    return min(ordered, key=_TIME)


def _sweep(
    request: ScheduleRequest, microbatch_counts: list[int], limits: SynchronousLimits
) -> list[_Search]:
    """Returns a search for each number of microbatches tried, until more bring nothing."""
    length = request.sorted.length
    is_small = length.size <= limits.small_batch
    max_fruitless = limits.max_fruitless if is_small else limits.max_fruitless_large
    # The bound without fixed costs, which grow with the number of microbatches.
    floor = (
        request.work_bound - request.cost.fixed * microbatch_counts[0] / request.model.num_stages
    )
    # Not a multiple: microbatches without a sequence cost no more than their fixed cost.
    tight = tight_packs(request, multiple=1)
    microbatch_counts = [count for count in microbatch_counts if count >= tight.num_microbatches]
    if len(microbatch_counts) > limits.max_counts:
        grid = geometric_grid(len(microbatch_counts), limits.max_counts)
        microbatch_counts = [microbatch_counts[i] for i in grid]

    searches: list[_Search] = []
    least, fruitless = math.inf, 0
    for num_microbatches in microbatch_counts:
        bound = floor + request.cost.fixed * num_microbatches / request.model.num_stages
        enough = bound * limits.good_enough
        if least <= enough or fruitless == max_fruitless:
            break
        search = _Search(request, num_microbatches, enough, limits)
        search.place_quickly(tight.pack)
        searches.append(search)
        fruitless = 0 if search.best.time < least else fruitless + 1
        least = min(least, search.best.time)
    return searches


class _Search:
    """Search for the best placement with a given number of microbatches."""

    best: Placed
    """The quickest placement found so far."""

    def __init__(
        self,
        request: ScheduleRequest,
        num_microbatches: int,
        enough: float,
        limits: SynchronousLimits,
    ) -> None:
        """Takes the request; a placement that takes `enough` time is not refined."""
        _, self._length, self._cost = request.sorted
        self._request, self._enough, self._limits = request, enough, limits
        self._packs = PackGrid(request.num_ranks, num_microbatches, request.capacity)
        self._candidates: list[_Candidate] = []

    def place_quickly(self, tight: IntArray) -> None:
        """Finds a first placement, by heuristics that take little time.

        Args:
            tight: tight packs [N], numbered from 0; at most one per rank and microbatch.
        """
        candidates = [
            candidate
            for prefix in self._candidate_prefixes()
            for candidate in self._pack_remaining(prefix)
        ]
        self._candidates = sorted(candidates, key=lambda candidate: candidate.placed.time)
        # 2 ranks, 3 microbatches: tight pack 3 is rank 1's in microbatch 1    ->    pack 1 * 3 + 1
        microbatch, rank = np.divmod(tight, self._packs.num_ranks)
        pack = rank * self._packs.num_microbatches + microbatch
        placed = [*(candidate.placed for candidate in self._candidates), self._placed(pack)]
        if self._cost.size <= self._limits.small_batch:
            pack = trade(self._length, self._cost, pack, self._packs.each_alone())
            placed.append(self._placed(pack))
        self.best = min(placed, key=_TIME)

    def refine(self) -> None:
        """Looks for a quicker placement by heuristics that take longer."""
        if self.best.time <= self._enough or self._cost.size > self._limits.large_batch:
            return
        refined = [self._refine_even(candidate) for candidate in self._candidates[:2]]
        self.best = min([self.best, *refined], key=_TIME)
        for _ in range(self._limits.lower_rounds):
            lowered = self._lower_peaks(self.best)
            if lowered.time >= self.best.time:
                break
            self.best = lowered

    def _candidate_prefixes(self) -> list[_FilledPrefix]:
        """Returns the prefixes to start from: few for large batches, many for small ones."""
        limits, size = self._limits, self._cost.size
        prefixes = self._fill_prefixes()
        tried = prefixes[-1:]
        if size <= limits.large_batch:
            # The longest three and the empty one: of 0 1 2 3 4 5 filled    ->    3 4 5 0
            count = limits.num_prefixes_tried
            tried = prefixes[-count:] + prefixes[: max(len(prefixes) - count, 0)][:1]
        if size <= limits.small_batch:
            tried += self._fill_prefixes(by_first_fit=False)[-limits.num_similar_prefixes_tried :][
                ::-1
            ]
            tried += [self._fill_prefixes(fill_factor)[-1] for fill_factor in limits.fill_factors]
        return tried

    def _fill_prefixes(
        self, fill_factor: float = 1.0, by_first_fit: bool = True
    ) -> list[_FilledPrefix]:
        """Returns the prefixes of 0, 1, 2 ... microbatches, while a sequence costs more than a fair
        pack.

        Each microbatch is filled up to `fill_factor` times the costliest remaining sequence: by
        first-fit, or else with similar sequences on all ranks.
        """
        num_ranks, num_microbatches, capacity = self._packs
        one = PackGrid(num_ranks, 1, capacity)
        size = self._cost.size
        prefixes = [_FilledPrefix(0, np.full(size, -1, np.int64), np.arange(size))]
        max_filled = min(num_microbatches, self._limits.max_filled)
        while prefixes[-1].remaining.size and len(prefixes) <= max_filled:
            num_filled, pack, remaining = prefixes[-1]
            length, cost = self._length[remaining], self._cost[remaining]
            limit = float(cost.max()) * fill_factor
            # A fair pack of all that remains costs as much: even packs are the better choice.
            if limit * num_ranks * (num_microbatches - num_filled) <= cost.sum():
                break
            if by_first_fit:
                rank, _ = first_fit(length, cost, one, limit=limit)
            else:
                placed = place_longest_first(length, cost, one, limit=limit)
                assert placed is not None, "with a limit, sequences are left out instead"
                rank = placed
            pack = pack.copy()
            pack[remaining] = np.where(rank < 0, -1, rank * num_microbatches + num_filled)
            prefixes.append(_FilledPrefix(num_filled + 1, pack, remaining[rank < 0]))
        return prefixes

    def _pack_remaining(self, prefix: _FilledPrefix) -> Iterator[_Candidate]:
        """Yields candidates with the remaining sequences in even packs: in as many microbatches as
        the costliest of them fills, one more, or all.

        2 ranks, remaining 9 9 5 5 4 4    ->    36 / (2 * 9) = 2 microbatches of 9 9 and 9 9
        """
        if prefix.remaining.size == 0:
            yield _Candidate(self._placed(prefix.pack), prefix, 0)
            return
        num_ranks, num_microbatches, capacity = self._packs
        length, cost = self._length[prefix.remaining], self._cost[prefix.remaining]
        fewest = max(int(cost.sum() / (num_ranks * cost.max())), 1)
        wanted = [fewest, num_microbatches]
        if self._cost.size <= self._limits.large_batch:
            wanted.append(fewest + 1)
        most = num_microbatches - prefix.num_filled
        for num_even in sorted({min(each, most) for each in wanted} - {0}):
            even = place_longest_first(length, cost, PackGrid(num_ranks * num_even, 1, capacity))
            if even is not None:
                yield _Candidate(self._placed(self._combine(prefix, even)), prefix, num_even)

    def _combine(self, prefix: _FilledPrefix, even: IntArray) -> IntArray:
        """Returns the placement with the remaining sequences in `even` packs after the prefix."""
        # Even packs are numbered over ranks first: 2 ranks, pack 3    ->    microbatch 1, rank 1
        microbatch, rank = np.divmod(even, self._packs.num_ranks)
        microbatch += prefix.num_filled
        pack = prefix.pack.copy()
        pack[prefix.remaining] = rank * self._packs.num_microbatches + microbatch
        return pack

    def _refine_even(self, candidate: _Candidate) -> Placed:
        """Returns the placement with its even packs more even, by bisection."""
        if candidate.num_even == 0:
            return candidate.placed
        remaining = candidate.prefix.remaining
        packs = PackGrid(self._packs.num_ranks * candidate.num_even, 1, self._packs.capacity)
        length, cost = self._length[remaining], self._cost[remaining]
        high = float(np.bincount(candidate.placed.pack[remaining], weights=cost).max())
        even = bisect_ranks(length, cost, packs, high)
        if even is None:
            return candidate.placed
        return self._placed(self._combine(candidate.prefix, even))

    def _lower_peaks(self, placed: Placed) -> Placed:
        """Returns the placement after trades that lower one microbatch after the other."""
        limits, alone = self._limits, self._packs.each_alone()
        num_ranks, num_microbatches, _ = self._packs
        pack = placed.pack
        for microbatch in range(min(num_microbatches, -(-limits.max_lowered // self._cost.size))):
            for part in limits.lower_parts:
                costs = costs_as_run(self._request, pack, self._packs).max(axis=0)
                # Packs of other microbatches may grow up to their costliest for nothing. `trade`
                # lowers the costliest pack of all, so each gets a load that brings it to this
                # microbatch's cost, less the part to gain: microbatches of 12 and 5, part 1/4
                #     ->    loads 0 and 12 * 3/4 - 5 = 4
                loads = costs[microbatch] * (1 - part) - costs
                loads[microbatch] = 0
                other = trade(
                    length=self._length,
                    cost=self._cost,
                    pack=pack,
                    packs=alone,
                    loads=np.tile(loads, num_ranks),
                    partners=2,
                    offered=8,
                    budget=limits.lower_trades // num_microbatches,
                )
                if costs_as_run(self._request, other, self._packs).max(axis=0).sum() < costs.sum():
                    pack = other
        return self._placed(pack)

    def _placed(self, pack: IntArray) -> Placed:
        """Returns the placement with packs sorted by cost into microbatches, and its time.

        2 ranks, packs 9 5 | 4 8    ->    9 5 | 8 4: microbatch 0 takes 9, microbatch 1 takes 5
        """
        num_ranks, num_microbatches, _ = self._packs
        costs = costs_as_run(self._request, pack, self._packs).ravel()
        by_cost = by_descending(costs)
        renumbered = np.empty(costs.size, np.int64)
        # The k-th costliest pack goes to microbatch k // num_ranks of rank k % num_ranks.
        k = np.arange(costs.size)
        renumbered[by_cost] = k % num_ranks * num_microbatches + k // num_ranks
        by_microbatch = costs[by_cost].reshape(num_microbatches, num_ranks)
        time = self._request.model.even_time_of(by_microbatch.T)
        return Placed(time, num_microbatches, renumbered[pack])
