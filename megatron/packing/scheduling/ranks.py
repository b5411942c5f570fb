"""pure. Schedules where ranks wait for one another at the end of the step only, without a pipeline.

A step takes as long as its costliest rank, however that is divided into packs; a microbatch more only adds its fixed
cost. So from the fewest microbatches on, ranks are made even: by LPT (see `spread`), or where capacity is too tight for
that, from as few packs as are found; then by trades between ranks, and by bisection. A further number of microbatches
is tried as long as it could be quicker.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megatron.packing.scheduling.bounds import rank_cost_bound
from megatron.packing.scheduling.placement import (
    IntArray,
    Packs,
    TightPacks,
    bisect_ranks,
    deal,
    largest_rank,
    spread,
    tight_packs,
    trade,
)
from megatron.packing.scheduling.problem import ScheduleRequest

GOOD_ENOUGH, _GOOD_ENOUGH_OF_MANY = 1.0002, 1.005
"""Times the bound: what is left to gain is less than any cost model is accurate to."""
_MANY = 1 << 14
"""Sequences, of more of which less is tried."""
_TRADES = 2_000_000
"""Pairs of sequences considered to make tight packs even: some 10 ms."""
_MAX_FRUITLESS = 2
"""Numbers of microbatches in a row that bring nothing, before the search ends; of many sequences, numbers in all."""


class Placed(NamedTuple):
    """A placement of sequences, the longest first."""

    time: float
    """Modelled, in the unit of the cost."""
    num_microbatches: int
    pack: IntArray
    """int64 [N], rank * num_microbatches + microbatch."""


def further_apart(size: int, count: int) -> list[int]:
    """At most `count` of the places from 0 to `size` - 1, the first and the last among them, ever further apart."""
    return sorted(set((np.geomspace(1, size, count).round().astype(int) - 1).tolist()))


def even_ranks(request: ScheduleRequest, numbers: list[int]) -> Placed:
    """The quickest placement found with one of these numbers of microbatches, of which the last has a pack for each
    sequence.
    """
    _, length, cost = request.sorted
    bound = rank_cost_bound(cost, request.num_ranks)
    best: Placed | None = None
    tight: TightPacks | None = None
    is_many, fruitless = length.size > _MANY, 0
    enough = _GOOD_ENOUGH_OF_MANY if is_many else GOOD_ENOUGH
    for number in numbers:
        if tight is not None and number < tight.num_microbatches:
            continue  # LPT finds no room either
        fixed = request.cost.fixed * number
        if best is not None and (best.time <= (bound + fixed) * enough or fruitless >= _MAX_FRUITLESS):
            break
        packs = Packs(request.num_ranks, number, request.capacity)
        pack = spread(length, cost, packs)
        if pack is None:
            tight = tight or tight_packs(length, request.num_ranks, request.capacity, request.microbatch_multiple)
            if tight.num_microbatches > number:
                continue
            pack = deal(cost, tight.pack, packs)
            if not is_many and largest_rank(cost, pack, packs) > bound * enough:
                pack = trade(length, cost, pack, packs, aim=bound * enough, budget=_TRADES)
        largest, pack = _evener(request, packs, pack, bound * enough)
        time = largest + fixed
        fruitless += 1
        if best is None or time < best.time:
            best = Placed(time, number, pack)
            fruitless = fruitless if is_many else 0
    assert best is not None, "the last number has a pack for each sequence"
    return best


def _evener(request: ScheduleRequest, packs: Packs, pack: IntArray, enough: float) -> tuple[float, IntArray]:
    """The cost of the costliest rank and the placement, with ranks more even until that costs no more than `enough`."""
    _, length, cost = request.sorted

    def costed(pack: IntArray) -> tuple[float, IntArray]:
        return largest_rank(cost, pack, packs), pack

    ways = [costed(pack)]
    if ways[0][0] > enough:
        ways.append(costed(trade(length, cost, pack, packs)))
    if min(high for high, _ in ways) > enough:
        found = bisect_ranks(length, cost, packs, ways[0][0])
        if found is not None:
            ways.append(costed(found if length.size > _MANY else trade(length, cost, found, packs)))
    return min(ways, key=lambda way: way[0])
