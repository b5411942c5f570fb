"""pure. Mode "ranks": no pipeline, and ranks wait for one another at the end of the step only.

A step takes as long as its costliest rank, however that is divided into packs. Another microbatch
only adds its fixed cost. So for each number of microbatches, from the fewest on:

    1. LPT places sequences on ranks; where capacity is too tight for that, tight packs are dealt;
    2. while ranks are not even enough, trades balance them, then bisection;
    3. the search ends when the bound is reached, or when more microbatches bring nothing.

Notation as in `placement`: `pack` is an array, the pack of each sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.packing.scheduling.placement import (
    IntArray,
    PackGrid,
    Placed,
    bisect_ranks,
    deal,
    largest_rank,
    place_longest_first,
    trade,
)
from megatron.packing.scheduling.problem import ScheduleRequest
from megatron.packing.scheduling.step_time import GOOD_ENOUGH
from megatron.packing.scheduling.tight_packs import TightPacks, tight_packs


@dataclass(frozen=True, kw_only=True)
class RankLimits:
    """Limits of the search of this mode."""

    large_batch: int = 1 << 14
    """Sequences, above which a batch is large: each heuristic takes milliseconds, and ranks of many
    sequences are nearly even anyhow."""
    good_enough: float = GOOD_ENOUGH
    """Modelled time over its bound, at which the search ends."""
    good_enough_large: float = 1.005
    """Modelled time over its bound, at which the search ends for large batches."""
    max_fruitless: int = 2
    """Numbers of microbatches in a row without a gain, after which the search ends. For large
    batches, numbers in all."""
    tight_trades: int = 2_000_000
    """Pairs of sequences considered to balance dealt tight packs, about 10 ms. Such ranks are the
    least even, and nearly full, so that most trades do not fit."""


LIMITS = RankLimits()


def balance_ranks(
    request: ScheduleRequest, microbatch_counts: list[int], limits: RankLimits = LIMITS
) -> Placed:
    """Returns the quickest placement found with one of these numbers of microbatches.

    Args:
        microbatch_counts: numbers to try, ascending. The last one has a pack for each sequence.
    """
    bound, is_large = request.rank_cost_bound, request.lengths.size > limits.large_batch
    good_enough = limits.good_enough_large if is_large else limits.good_enough
    best: Placed | None = None
    tight: TightPacks | None = None
    fruitless = 0
    for num_microbatches in microbatch_counts:
        if tight is not None and num_microbatches < tight.num_microbatches:
            continue  # LPT finds no room either
        fixed = request.cost.fixed * num_microbatches
        is_done = best is not None and best.time <= (bound + fixed) * good_enough
        if is_done or fruitless >= limits.max_fruitless:
            break
        packs = PackGrid(request.num_ranks, num_microbatches, request.capacity)
        pack = place_longest_first(*request.sorted[1:], packs)
        if pack is None:  # capacity is too tight for that
            tight = tight or tight_packs(request, request.microbatch_multiple)
            if tight.num_microbatches > num_microbatches:
                continue
            pack = _deal_tight(request, tight, packs, bound * good_enough, limits)
        largest, pack = _refine(request, pack, packs, bound * good_enough, limits)
        fruitless += 1
        if best is None or largest + fixed < best.time:
            best = Placed(largest + fixed, num_microbatches, pack)
            fruitless = fruitless if is_large else 0
    assert best is not None, "the last number has a pack for each sequence"
    return best


def _deal_tight(
    request: ScheduleRequest, tight: TightPacks, packs: PackGrid, enough: float, limits: RankLimits
) -> IntArray:
    """Returns tight packs dealt to ranks, and traded if the costliest rank costs more than
    `enough`.
    """
    _, length, cost = request.sorted
    pack = deal(cost, tight.pack, packs)
    if length.size > limits.large_batch or largest_rank(cost, pack, packs) <= enough:
        return pack
    return trade(length, cost, pack, packs, aim=enough, budget=limits.tight_trades)


def _refine(
    request: ScheduleRequest, pack: IntArray, packs: PackGrid, enough: float, limits: RankLimits
) -> tuple[float, IntArray]:
    """Returns the costliest rank's cost and the placement, balanced until that cost is `enough`."""
    _, length, cost = request.sorted
    largest = largest_rank(cost, pack, packs)
    placements = [(largest, pack)]
    if largest > enough:
        traded = trade(length, cost, pack, packs)
        placements.append((largest_rank(cost, traded, packs), traded))
    if placements[-1][0] > enough:
        found = bisect_ranks(length, cost, packs, largest)
        if found is not None and length.size <= limits.large_batch:
            found = trade(length, cost, found, packs)
        if found is not None:
            placements.append((largest_rank(cost, found, packs), found))
    return min(placements, key=lambda placement: placement[0])
