"""pure. Mode "pipelines": each rank runs a pipeline, and ranks wait at the end of the step only.

More microbatches fill a pipeline better, fewer have less fixed cost. So some numbers of them are
tried, the quickest by simulated 1F1B are refined, and the quickest of these is taken:

    1. `_sweep` tries numbers of microbatches, for large batches on a sample of the sequences;
    2. for each number `_place` places sequences and orders the packs;
    3. for the best numbers `_refine` tries more heuristics and trades between ranks.

Placements come from the flow shop, a simpler model than 1F1B: a rank takes the sum of its packs
and, for each further stage, its costliest pack once more. There a sequence that costs more than a
fair pack takes its rank's time several times over. Such long sequences are grouped on as few ranks
as hold them, and the others make packs of even cost on the other ranks.

    4 stages, 2 ranks, costs 100 100 and 60 times 10    ->    100 100 | the others

With a 100 on each rank, both ranks would take (400 + 3 * 100) / 4 instead of less than 150.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from megatron.packing.scheduling.pipeline_order import PlacedPipelines, order_each_rank
from megatron.packing.scheduling.placement import (
    BISECTION,
    BisectionLimits,
    PackGrid,
    Placed,
    bisect_ranks,
    deal,
    first_fit,
    geometric_grid,
    place_longest_first,
    split_ranks,
    sums_of_packs,
    trade,
)
from megatron.packing.scheduling.problem import ScheduleRequest
from megatron.packing.scheduling.tight_packs import TightPacks, tight_packs

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class PipelineLimits:
    """Limits of the search of this mode."""

    small_batch: int = 2048
    """Sequences, up to which several numbers of microbatches are refined. Above it numbers are
    compared on a sample where there are ranks enough for one."""
    large_batch: int = 1 << 14
    """Sequences, above which nothing is refined, to bound the time."""
    sample_size: int = 1024
    """Sequences of a sample, at least. Ranks are fewer in the same proportion."""
    min_sample_ranks: int = 16
    """Ranks of a sample, at least. One or five ranks chose wrong numbers, 15 % slower at worst."""
    trusted_sample_ranks: int = 32
    """Ranks of a sample, above which its choice stands and little is refined."""
    grid: int = 12
    """Numbers of microbatches swept, ever further apart, then those halfway to the neighbours of
    the best. Each takes a simulation.
    """
    grid_of_more: int = 7
    """Numbers swept for batches of more than twice `small_batch`, where each takes longer."""
    excesses: tuple[float, ...] = (1.004, 1.03, 1.1, 1.2, 1.3)
    """Times over the bound for which long sequences are grouped, one after the other until it
    succeeds. The lowest comes first: at 1.06 alone the ranks of long sequences are filled by 6 %.
    """
    tie: float = 1.001
    """Time over the quickest, within which fewer microbatches are preferred. Empty packs count for
    little in the model."""
    max_refined: int = 4
    """Numbers of microbatches that are refined."""
    max_trade_rounds: int = 3
    """Rounds of trades. Each changes when ranks end, by which the next one trades."""


LIMITS = PipelineLimits()
_TIME = attrgetter("time")


def balance_pipelines(
    request: ScheduleRequest, microbatch_counts: list[int], limits: PipelineLimits = LIMITS
) -> Placed:
    """Returns the quickest placement found with one of these numbers of microbatches.

    Args:
        microbatch_counts: numbers to try, ascending. The last one has a pack for each sequence.
    """
    size = request.sorted.length.size
    tight = tight_packs(request, request.microbatch_multiple)
    microbatch_counts = [count for count in microbatch_counts if count >= tight.num_microbatches]
    sample = _sample_of(request, limits)
    if size <= limits.small_batch:
        swept = _sweep(request, tight, microbatch_counts, limits, is_quick=False)
        refined = [_refine(request, each, limits) for each in swept[: limits.max_refined]]
        best = _fewest_as_good(refined, limits)
    elif sample is None:
        best = min(_sweep(request, tight, microbatch_counts, limits, is_quick=True), key=_TIME)
        best = best if size > limits.large_batch else _refine(request, best, limits)
    else:
        best = _by_sample(request, sample, tight, microbatch_counts, limits)
    return Placed(best.time, best.num_microbatches, best.pack)


def _by_sample(
    request: ScheduleRequest,
    sample: ScheduleRequest,
    tight: TightPacks,
    microbatch_counts: list[int],
    limits: PipelineLimits,
) -> PlacedPipelines:
    """Returns the quickest placement with one of the two numbers that are best for a sample."""
    # The fewer ranks there are in the sample, the less its choice says.
    is_trusted = sample.num_ranks > limits.trusted_sample_ranks
    is_large = request.sorted.length.size > limits.large_batch
    tight_sample = tight_packs(sample, sample.microbatch_multiple)
    swept = _sweep(sample, tight_sample, microbatch_counts, limits, is_quick=True)
    chosen = [each.num_microbatches for each in swept[: 1 if is_trusted and is_large else 2]]
    best = min((_place(request, each, tight, limits, is_quick=True) for each in chosen), key=_TIME)
    if is_large:
        return best
    return _trade(request, best, limits, 1) if is_trusted else _refine(request, best, limits)


def _sample_of(request: ScheduleRequest, limits: PipelineLimits) -> ScheduleRequest | None:
    """Returns every k-th sequence, the longest first, on about k times fewer ranks.

    The number of microbatches that is best for a sample is so for all. None where sequences or
    ranks are too few.
    """
    length = request.sorted.length
    num_ranks = max(request.num_ranks * limits.sample_size // length.size, limits.min_sample_ranks)
    if length.size <= limits.small_batch or num_ranks >= request.num_ranks:
        return None
    # 10 sequences, 5 ranks, a sample of 2    ->    [0, 5, 10, 15] // 2 = sequences 0, 2, 5, 7
    places = np.arange(0, length.size * num_ranks, request.num_ranks) // num_ranks
    chosen = request.sorted.order[places]
    nowhere = np.zeros(chosen.size, np.int64)
    return replace(
        request,
        lengths=length[places],
        squares=None if request.squares is None else request.squares[chosen],
        payload_costs=None if request.payload_costs is None else request.payload_costs[chosen],
        source_rank=nowhere,
        source_fetch=nowhere,
        steps_delayed=None,
        loss_tokens=None,
        num_ranks=num_ranks,
    )


def _sweep(
    request: ScheduleRequest,
    tight: TightPacks,
    microbatch_counts: list[int],
    limits: PipelineLimits,
    *,
    is_quick: bool,
) -> list[PlacedPipelines]:
    """Returns first placements with some of the numbers, the quickest first."""
    is_many = request.sorted.length.size > 2 * limits.small_batch
    grid = limits.grid_of_more if is_many else limits.grid
    places = geometric_grid(len(microbatch_counts), min(len(microbatch_counts), grid))

    def attempt(place: int) -> PlacedPipelines:
        num_microbatches = max(microbatch_counts[place], tight.num_microbatches)
        return _place(request, num_microbatches, tight, limits, is_quick=is_quick)

    found = {place: attempt(place) for place in places}
    best = places.index(min(found, key=lambda place: found[place].time))
    # Halfway to the neighbours of the best: places 0 2 9 31 with 9 the best    ->    5 and 20
    for one, other in pairwise(places[max(best - 1, 0) : best + 2]):
        middle = (one + other) // 2
        if middle not in found:
            found[middle] = attempt(middle)
    by_time = sorted(found.values(), key=_TIME)
    fewest = _fewest_as_good(by_time, limits)
    return sorted(by_time, key=lambda placed: placed is not fewest)


def _fewest_as_good(placed: list[PlacedPipelines], limits: PipelineLimits) -> PlacedPipelines:
    """Returns the one with the fewest microbatches among those about as quick as the quickest."""
    enough = min(each.time for each in placed) * limits.tie
    as_good = [each for each in placed if each.time <= enough]
    return min(as_good, key=lambda each: each.num_microbatches)


def _place(
    request: ScheduleRequest,
    num_microbatches: int,
    tight: TightPacks,
    limits: PipelineLimits,
    *,
    is_quick: bool,
) -> PlacedPipelines:
    """Returns the better one of two placements: long sequences grouped on few ranks, or even packs.

    Both are ordered and simulated; if `is_quick`, only the one that is better in the flow shop, and
    with a single shape.
    """
    _, length, cost = request.sorted
    packs = PackGrid(request.num_ranks, num_microbatches, request.capacity)
    low = _flow_shop_bound(request, num_microbatches)
    tries = (_group_long_sequences(request, packs, low * excess) for excess in limits.excesses)
    grouped = next((pack for pack in tries if pack is not None), None)
    placements = [] if grouped is None else [grouped]
    if not placements or length.size <= limits.large_batch:
        even = place_longest_first(length, cost, packs.each_alone())
        placements.append(_deal_and_split(request, tight.pack if even is None else even, packs))
    if is_quick:
        best = min(placements, key=lambda pack: _flow_shop_time(request, pack, packs))
        return order_each_rank(request, best, packs, num_shapes=1)
    return min((order_each_rank(request, pack, packs) for pack in placements), key=_TIME)


def _refine(
    request: ScheduleRequest, placed: PlacedPipelines, limits: PipelineLimits
) -> PlacedPipelines:
    """Returns the placement or a quicker one, by bisection and then by trades."""
    _, length, cost = request.sorted
    packs = PackGrid(request.num_ranks, placed.num_microbatches, request.capacity)
    low = _flow_shop_bound(request, packs.num_microbatches)
    bisected = _bisect_flow_shop(request, packs, low)
    placements = sorted(bisected, key=lambda pack: _flow_shop_time(request, pack, packs))[:2]
    even = bisect_ranks(length, cost, packs.each_alone(), 2 * low)
    if even is not None:
        placements.append(_deal_and_split(request, even, packs))
    ordered = [order_each_rank(request, pack, packs) for pack in placements]
    return _trade(request, min([placed, *ordered], key=_TIME), limits)


def _deal_and_split(request: ScheduleRequest, pack: IntArray, packs: PackGrid) -> IntArray:
    """Returns packs that are numbered anyhow on ranks of even cost, each rank's made even again."""
    _, length, cost = request.sorted
    return split_ranks(length, cost, deal(cost, pack, packs), packs, only_where_lower=True)


def _trade(
    request: ScheduleRequest,
    placed: PlacedPipelines,
    limits: PipelineLimits,
    num_shapes: int | None = None,
) -> PlacedPipelines:
    """Returns the placement after trades from ranks that end late to ranks that end early."""
    _, length, cost = request.sorted
    packs = PackGrid(request.num_ranks, placed.num_microbatches, request.capacity)
    for _ in range(limits.max_trade_rounds):
        # What a rank's pipeline takes beside its sequences: bubbles and fixed costs.
        of_rank = sums_of_packs(cost, placed.pack, packs).sum(axis=1)
        loads = placed.ends * request.model.effective_stages - of_rank
        pack = trade(length, cost, placed.pack, packs, loads=loads)
        traded = order_each_rank(request, pack, packs, num_shapes)
        if traded.time >= placed.time:
            break
        placed = traded
    return placed


def _flow_shop_bound(request: ScheduleRequest, num_microbatches: int) -> float:
    """Returns a lower bound of the flow shop's time with even packs, times the number of stages."""
    # Even packs of interleaved pipelines make smaller bubbles (`bubble_packs`), but a costly pack
    # among others passes all further stages alone.
    even = request.rank_cost_bound * (1 + request.model.bubble_packs / num_microbatches)
    return max(even, float(request.sorted.cost.max()) * request.model.effective_stages)


def _flow_shop_time(request: ScheduleRequest, pack: IntArray, packs: PackGrid) -> float:
    """Returns the time in the flow shop times the number of stages, without fixed costs."""
    costs = sums_of_packs(request.sorted.cost, pack, packs)
    more = request.model.effective_stages - 1
    return float((costs.sum(axis=1) + more * costs.max(axis=1)).max())


def _bisect_flow_shop(
    request: ScheduleRequest, packs: PackGrid, low: float, limits: BisectionLimits = BISECTION
) -> Iterator[IntArray]:
    """Yields placements that take ever less time in the flow shop, by bisection of that time."""
    high = 2 * low
    for _ in range(limits.max_rounds):
        if high - low <= low * limits.resolution:
            break
        time = (low + high) / 2
        pack = _group_long_sequences(request, packs, time)
        if pack is None:
            low = time
        else:
            high = min(time, _flow_shop_time(request, pack, packs))
            yield pack


def _group_long_sequences(
    request: ScheduleRequest, packs: PackGrid, time: float
) -> IntArray | None:
    """Returns pipelines that end within about `time` in the flow shop; None if none are found.

    Long sequences are grouped on the first ranks, and the others make even packs.
    """
    _, length, cost = request.sorted
    num_microbatches, more = packs.num_microbatches, request.model.effective_stages - 1
    # A rank of even packs takes number + more of them. A costlier sequence is long.
    fair_pack = time / (num_microbatches + more)
    pack, in_use = first_fit(
        length=length,
        cost=cost,
        packs=packs,
        limit=fair_pack * num_microbatches,
        ceiling=time,
        overhead=more,
        opens_above=fair_pack,
    )
    rest = np.flatnonzero(pack < 0)
    if rest.size > 0:
        others = packs._replace(num_ranks=packs.num_ranks - in_use)
        if others.num_ranks == 0:
            return None
        # A rank of mean cost has `time - mean` left for its costliest pack on the further stages.
        slack = time - cost[rest].sum() / others.num_ranks
        limit = slack / more if more else math.inf  # one stage may take all of a pack's time
        if slack < 0 or limit < cost[rest].max():
            return None
        even, _ = first_fit(length[rest], cost[rest], others.each_alone(), limit=limit)
        if even.min() < 0:
            return None
        pack[rest] = in_use * num_microbatches + deal(cost[rest], even, others)
    return split_ranks(length, cost, pack, packs, only_where_lower=True)
