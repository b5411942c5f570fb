"""pure. Schedules of pipelines, where ranks wait for one another at the end of the step.

Several numbers of microbatches are tried and the quickest by simulated 1F1B is taken: more microbatches fill the
pipeline better, fewer have less fixed cost, and what packs the sequences allow shows only then. For each number,
placements come from the flow shop, in which a rank takes the sum of its packs and, for each further stage, its
costliest pack once more. There a sequence that costs more than a fair pack takes its rank's time several times over:
such sequences gather on as few ranks as hold them, and the others make packs of even cost on the other ranks. Then
packs are put in order and made of uneven size (`pipeline_order`), and sequences are traded from ranks that end late to
such that end early.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from megatron.packing.scheduling.bounds import rank_cost_bound
from megatron.packing.scheduling.pipeline_order import can_simulate, in_pipeline_order
from megatron.packing.scheduling.placement import (
    Packs,
    TightPacks,
    bisect_ranks,
    deal,
    first_fit,
    pack_costs,
    split_ranks,
    spread,
    tight_packs,
    trade,
)
from megatron.packing.scheduling.problem import ScheduleRequest
from megatron.packing.scheduling.ranks import Placed, further_apart
from megatron.packing.scheduling.step_time import simulate

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

_FEW, _MANY = 2048, 1 << 14
"""Sequences, of more of which numbers of microbatches are compared on a sample, and less is tried."""
_SAMPLE, _SAMPLED_RANKS = 1024, 16
"""Sequences of a sample, and its ranks at the least."""
_SWEPT, _SWEPT_OF_MORE = 12, 7
"""Numbers of microbatches tried, ever further apart, of a few sequences and of more; then those beside the best."""
_EXCESSES = (1.004, 1.03, 1.1, 1.2, 1.3)
"""Times over the bound that are tried one after the other."""
_AS_GOOD = 1.001
"""Times the quickest time, within which fewer microbatches are preferred: empty packs count for little in the model."""
_IMPROVED = 4
"""The best numbers, which are looked into."""
_ROUNDS = 3
"""Of trades."""
_MAX_BISECTIONS, _FINEST = 8, 1 / 2048
"""Bisection ends after so many, or at such a part of a time."""


def even_pipelines(request: ScheduleRequest, numbers: list[int]) -> Placed:
    """The quickest placement found with one of these numbers of microbatches, of which the last has a pack for each
    sequence.
    """
    size = request.sorted.length.size
    tight = _tight(request)
    numbers = [number for number in numbers if number >= tight.num_microbatches]
    sample = _sample(request)
    swept = _swept(sample, tight if sample is request else _tight(sample), numbers, is_quick=size > _FEW)
    if sample is request and size <= _FEW:
        return _fewest_as_good([search.improved(placed) for placed, search in swept[:_IMPROVED]])
    # The fewer ranks there are in the sample, the less it says.
    is_sure = sample is not request and sample.num_ranks > 2 * _SAMPLED_RANKS
    if sample is not request:
        best = [placed.num_microbatches for placed, _ in swept[: 1 if is_sure and size > _MANY else 2]]
        swept = [
            (search.first(is_quick=True), search) for search in (_Pipelines(request, number, tight) for number in best)
        ]
    placed, search = min(swept, key=lambda entry: entry[0].time)
    if not is_sure and size <= _MANY:
        return search.improved(placed)
    return search.traded(placed, num_shapes=1) if size <= _MANY else placed


def _sample(request: ScheduleRequest) -> ScheduleRequest:
    """Every so many-th sequence, and the longest, on as many times fewer ranks: what number of microbatches is best for
    them is so for all. The request itself where sequences are few.
    """
    length = request.sorted.length
    num_ranks = max(request.num_ranks * _SAMPLE // length.size, _SAMPLED_RANKS)
    if length.size <= _FEW or num_ranks >= request.num_ranks:
        return request
    chosen = length[np.arange(0, length.size * num_ranks, request.num_ranks) // num_ranks]
    nowhere = np.zeros(chosen.size, np.int64)
    return replace(
        request,
        lengths=chosen,
        source_rank=nowhere,
        source_draw=nowhere,
        steps_delayed=None,
        loss_tokens=None,
        num_ranks=num_ranks,
    )


def _tight(request: ScheduleRequest) -> TightPacks:
    return tight_packs(request.sorted.length, request.num_ranks, request.capacity, request.microbatch_multiple)


def _swept(
    request: ScheduleRequest, tight: TightPacks, numbers: list[int], is_quick: bool
) -> list[tuple[Placed, _Pipelines]]:
    """Some of the numbers tried, the quickest first."""
    count = min(len(numbers), _SWEPT if request.sorted.length.size <= 2 * _FEW else _SWEPT_OF_MORE)
    places = further_apart(len(numbers), count)
    found: dict[int, tuple[Placed, _Pipelines]] = {}

    def attempt(place: int) -> None:
        search = _Pipelines(request, max(numbers[place], tight.num_microbatches), tight)
        found[place] = search.first(is_quick), search

    for place in places:
        attempt(place)
    best = places.index(min(found, key=lambda place: found[place][0].time))
    for one, other in pairwise(places[max(best - 1, 0) : best + 2]):
        if (one + other) // 2 not in found:
            attempt((one + other) // 2)
    by_time = sorted(found.values(), key=lambda entry: entry[0].time)
    fewest = _fewest_as_good([placed for placed, _ in by_time])
    return sorted(by_time, key=lambda entry: entry[0] is not fewest)


def _fewest_as_good(placed: list[Placed]) -> Placed:
    """The one of the fewest microbatches among those about as quick as the quickest."""
    enough = min(each.time for each in placed) * _AS_GOOD
    return min((each for each in placed if each.time <= enough), key=lambda each: each.num_microbatches)


def _time(placed: Placed) -> float:
    return placed.time


class _Pipelines:
    """Placements with so many microbatches."""

    def __init__(self, request: ScheduleRequest, number: int, tight: TightPacks) -> None:
        _, self._length, self._cost = request.sorted
        self._request, self._tight = request, tight
        self._packs = Packs(request.num_ranks, number, request.capacity)
        # Even packs of interleaved pipelines make smaller bubbles; a costly one among others passes all stages alone.
        self._more = request.model.num_stages - 1
        of_rank = rank_cost_bound(self._cost, request.num_ranks)
        self._low = max(of_rank * (1 + request.model.bubble_packs / number), float(self._cost.max()) * (1 + self._more))

    def first(self, is_quick: bool) -> Placed:
        """By few ways; or by the better one in the flow shop, and a single shape."""
        tries = (self._gathered(self._low * excess) for excess in _EXCESSES)
        pack = next((pack for pack in tries if pack is not None), None)
        ways = [] if pack is None else [pack]
        if pack is None or self._cost.size <= _MANY:
            ways.append(self._dealt())
        if is_quick:
            return self._arranged(min(ways, key=self._flow_shop_time_of), num_shapes=1)
        return min((self._arranged(pack) for pack in ways), key=_time)

    def improved(self, placed: Placed) -> Placed:
        """The placement, or a quicker one by more ways."""
        ways = sorted(self._bisected(), key=self._flow_shop_time_of)[:2]
        even = self._evener()
        ways += [] if even is None else [even]
        return self.traded(min([placed, *(self._arranged(pack) for pack in ways)], key=_time))

    def _arranged(self, pack: IntArray, num_shapes: int = 3) -> Placed:
        """With packs in the best order found, by simulation."""
        pack = in_pipeline_order(self._request, pack, self._packs, num_shapes)
        return Placed(float(self._ends(pack).max()), self._packs.num_microbatches, pack)

    def _ends(self, pack: IntArray) -> FloatArray:
        """When each rank's pipeline ends, [num_ranks]; of pipelines too long to simulate, at most so."""
        costs, model = pack_costs(self._cost, pack, self._packs, self._request.cost.fixed), self._request.model
        if can_simulate(model, self._packs.num_microbatches):
            return simulate(costs, model)
        return (costs.sum(axis=1) + self._more * costs.max(axis=1)) / model.num_stages

    def traded(self, placed: Placed, num_shapes: int = 3) -> Placed:
        """With sequences traded from ranks that end late to such that end early."""
        for _ in range(_ROUNDS):
            costs = pack_costs(self._cost, placed.pack, self._packs)
            loads = self._ends(placed.pack) * self._request.model.num_stages - costs.sum(axis=1)
            pack = trade(self._length, self._cost, placed.pack, self._packs, loads=loads)
            other = self._arranged(pack, num_shapes)
            if other.time >= placed.time:
                break
            placed = other
        return placed

    def _flow_shop_time_of(self, pack: IntArray) -> float:
        """In the flow shop, without fixed costs."""
        costs = pack_costs(self._cost, pack, self._packs)
        return float((costs.sum(axis=1) + self._more * costs.max(axis=1)).max())

    def _dealt(self) -> IntArray:
        """Even packs, dealt to ranks."""
        packs = spread(self._length, self._cost, self._packs.each_alone())
        return self._resplit(deal(self._cost, self._tight.pack if packs is None else packs, self._packs))

    def _evener(self) -> IntArray | None:
        """The same with packs more even, by bisection."""
        packs = bisect_ranks(self._length, self._cost, self._packs.each_alone(), 2 * self._low)
        return None if packs is None else self._resplit(deal(self._cost, packs, self._packs))

    def _bisected(self) -> Iterator[IntArray]:
        """By bisection, pipelines that take less and less time."""
        low, high = self._low, 2 * self._low
        for _ in range(_MAX_BISECTIONS):
            if high - low <= low * _FINEST:
                break
            time = (low + high) / 2
            pack = self._gathered(time)
            if pack is None:
                low = time
            else:
                high = min(time, self._flow_shop_time_of(pack))
                yield pack

    def _gathered(self, time: float) -> IntArray | None:
        """Pipelines that each end within about `time`: the costliest sequences on the first ranks, even packs on the
        others.
        """
        number, more = self._packs.num_microbatches, self._more
        fair_pack = time / (number + more)
        pack, in_use = first_fit(
            *(self._length, self._cost, self._packs),
            limit=fair_pack * number,
            ceiling=time,
            overhead=more,
            opens_above=fair_pack,
        )
        rest = np.flatnonzero(pack < 0)
        if rest.size == 0:
            return self._resplit(pack)
        if in_use == self._packs.num_ranks:
            return None
        others = Packs(self._packs.num_ranks - in_use, number, self._packs.capacity)
        length, cost = self._length[rest], self._cost[rest]
        limit = (time - cost.sum() / others.num_ranks) / more
        if limit < cost.max():
            return None
        even, _ = first_fit(length, cost, others.each_alone(), limit=limit)
        if even.min() < 0:
            return None
        pack[rest] = in_use * number + deal(cost, even, others)
        return self._resplit(pack)

    def _resplit(self, pack: IntArray) -> IntArray:
        """Each rank's sequences split anew into even packs, where that lowers its costliest pack."""
        return split_ranks(self._length, self._cost, pack, self._packs, only_where_lower=True)
