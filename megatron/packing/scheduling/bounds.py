"""pure. What no schedule can be better than, to start schedulers from and to judge them by.

Invariant, tested by brute force: a bound is never above the optimum of the schedules that leave no pack empty, unless
there are fewer sequences than packs. All is exact in integers (see `work`), rounded towards the weaker bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.packing.scheduling.step_time import StepModel
from megatron.packing.scheduling.work import Work

IntArray = npt.NDArray[np.int64]

_NUM_SINGLE = 32
"""Numbers of microbatches that are bounded one by one."""
_NUM_SPANS = 24
"""Spans of numbers of microbatches that follow, each a quarter longer than the one before it; the last has no end."""
_NUM_LARGE = 1024
"""Costs of sequences that the bound for pipelines looks at."""
_NUM_FIRST = 32
"""Ranks, those with the costliest sequences, that it looks at one by one."""
_NUM_ROWS = 64
"""Microbatches, the costliest ones, that the bound for ranks that meet looks at one by one."""


class MicrobatchBound(NamedTuple):
    """No schedule of so many microbatches per rank takes less than `time`."""

    time: int
    num_microbatches: int


@dataclass(frozen=True, kw_only=True)
class StepBound:
    """Lower bounds of the modelled step time (`StepModel.time_of`), in its unit."""

    time: int
    """No schedule takes less."""
    min_microbatches: int
    """No schedule has fewer per rank."""
    by_microbatches: tuple[MicrobatchBound, ...]
    """Numbers of microbatches from the fewest on, with gaps, the lowest bound first; each bound holds up to the next
    number.
    """


def step_bound(work: Work, num_ranks: int, capacity: int, multiple: int, model: StepModel) -> StepBound:
    """The least over all numbers of microbatches of what a step with that many takes at the least. O(N log N)."""
    fewest = microbatch_lower_bound(work.length, num_ranks, capacity, multiple)
    if work.cost.size == 0:
        time = work.fixed * (fewest + model.num_stages - 1)
        return StepBound(time=time, min_microbatches=fewest, by_microbatches=(MicrobatchBound(time, fewest),))
    bounds: _RankBounds | _MeetingBounds
    bounds = (_MeetingBounds if model.ranks_meet else _RankBounds)(work, num_ranks, capacity, model.num_stages)
    spans = sorted((bounds.quick(span), span) for span in _spans(fewest, multiple))
    found: list[MicrobatchBound] = []
    for quick, span in spans:
        rival = found[0].time if found else None
        time = quick if rival is not None and quick >= rival else bounds.of(span, rival)
        found.append(MicrobatchBound(time, span.first))
        found.sort()
    return StepBound(time=found[0].time, min_microbatches=fewest, by_microbatches=tuple(found))


class _Span(NamedTuple):
    """Numbers of microbatches from `first` to `last`; None: any from `first` on."""

    first: int
    last: int | None

    @property
    def is_single(self) -> bool:
        return self.first == self.last


def _spans(fewest: int, multiple: int) -> list[_Span]:
    singles = [_Span(number, number) for number in range(fewest, fewest + _NUM_SINGLE * multiple, multiple)]
    firsts = [singles[-1].first + multiple]
    for _ in range(_NUM_SPANS - 1):
        firsts.append(firsts[-1] + -(-firsts[-1] // (4 * multiple)) * multiple)
    return singles + [_Span(a, b - multiple) for a, b in pairwise(firsts)] + [_Span(firsts[-1], None)]


def rank_cost_lower_bound(cost: IntArray, num_ranks: int) -> int:
    """A cost that the costliest rank reaches in every schedule of sequences of these costs (int64 [N], descending).

    The largest of: the mean over ranks; the costliest sequence; and for each k, the pigeonhole bound: of the k *
    num_ranks + 1 costliest sequences some rank holds k + 1, at the least the k + 1 cheapest of them. 0 without
    sequences.
    """
    if cost.size == 0:
        return 0
    sums = np.concatenate(([0], np.cumsum(cost)))
    # Position of the (k * num_ranks + 1)-th costliest, k = 1, 2, ...
    cheapest = np.arange(num_ranks, cost.size, num_ranks)
    k = np.arange(1, cheapest.size + 1)
    pigeonhole = sums[cheapest + 1] - sums[cheapest - k]
    return max(-(-int(sums[-1]) // num_ranks), int(cost[0]), int(pigeonhole.max(initial=0)))


def microbatch_lower_bound(length: IntArray, num_ranks: int, capacity: int, multiple: int) -> int:
    """Microbatches per rank that every schedule needs, a positive multiple of `multiple`, for packs of at most
    `capacity` tokens.

    `length` is int64 [N], descending, each in 1..capacity. Bound L2 of Martello and Toth, "Lower bounds and reduction
    procedures for the bin packing problem" (1990). O(N).
    """
    packs = int(packs_needed(length, capacity).max(initial=0))
    return max(1, math.ceil(packs / (num_ranks * multiple))) * multiple


def packs_needed(length: IntArray, capacity: int) -> IntArray:
    """Packs of at most `capacity` tokens that the i longest sequences need at the least, i = 1 ... N, int64 [N].

    `length` is int64 [N], descending, each in 1..capacity. Let t be the shortest of those i. Two sequences longer than
    capacity / 2 never share a pack; one longer than capacity - t has no room for t tokens, so that those of t to
    capacity / 2 tokens fit only beside the ones in between, or into packs of their own (Martello and Toth); and no
    pack holds more than capacity / t of them.
    """
    sums = np.concatenate(([0], np.cumsum(length)))
    count = np.arange(1, length.size + 1)
    num_large = np.minimum(int(np.searchsorted(-length, -(capacity // 2))), count)
    num_alone = np.minimum(np.searchsorted(-length, -(capacity - length)), num_large)
    room_beside_large = (num_large - num_alone) * capacity - (sums[num_large] - sums[num_alone])
    overflow = np.maximum(sums[1:] - sums[num_large] - room_beside_large, 0)
    packs = np.maximum(num_large + -(-overflow // capacity), -(-count // (capacity // np.maximum(length, 1))))
    return np.maximum.accumulate(packs)


class _RankBounds:
    """Where ranks meet at the end of the step: `max over ranks of (sum of its packs + (stages - 1) * its costliest)`.

    T is that time without the fixed costs, which are the same in every schedule of M microbatches.
    """

    def __init__(self, work: Work, num_ranks: int, capacity: int, num_stages: int) -> None:
        self._work, self._ranks, self._capacity, self._more = work, num_ranks, capacity, num_stages - 1
        self._sums = np.concatenate(([0], np.cumsum(work.cost)))
        self._rank_cost = rank_cost_lower_bound(work.cost, num_ranks)
        self._costliest = int(work.cost[0])
        self._tokens_beside_longest = int(work.length[1:].sum())
        self._shortest_sums = np.concatenate(([0], np.cumsum(work.cost[::-1])))
        any_number = _Span(work.cost.size + 1, None)
        self._of_any_number = 0
        self._of_any_number = self._least_that_holds(self.quick(any_number) - self._fixed(any_number), None, any_number)

    def quick(self, span: _Span) -> int:
        """At most `of`."""
        # The costliest rank's costliest pack has at least its mean.
        mean = 0 if span.last is None else -(-self._more * self._rank_cost // span.last)
        forced = 0 if span.last is None else self._forced_beside_longest(span.last)
        if self._every_pack_is_used(span.last):
            forced = max(forced, int(self._shortest_sums[span.first - 1]))
        longest = self._costliest * (self._more + 1) + forced
        return max(self._rank_cost + mean, longest, self._of_any_number) + self._fixed(span)

    def of(self, span: _Span, rival: int | None) -> int:
        """Of these numbers of microbatches; `rival` where it is not below that."""
        time, fixed = self.quick(span) - self._fixed(span), self._fixed(span)
        if span.is_single:
            time = max(time, self._gathered(span.first))
        if rival is None:
            return self._least_that_holds(time, None, span) + fixed
        if time >= rival - fixed or not self._holds(rival - fixed, span):
            return max(time + fixed, rival)
        return self._least_that_holds(time, rival - fixed, span) + fixed

    def _least_that_holds(self, time: int, high: int | None, span: _Span) -> int:
        """`time`, or a later one that no schedule is quicker than; `high` is known to hold."""
        if self._more == 0 or self._holds(time, span):
            return time
        low = time
        if high is None:
            high = time + (time >> 6) + 1
            while not self._holds(high, span):
                low, high = high, high + 2 * (high - time)
        while high - low > max(low >> 11, 1):
            middle = (low + high) // 2
            low, high = (low, middle) if self._holds(middle, span) else (middle, high)
        return low + 1

    def _fixed(self, span: _Span) -> int:
        return self._work.fixed * (span.first + self._more)

    def _forced_beside_longest(self, num_microbatches: int) -> int:
        """Cost that the rank of the longest sequence holds besides, as all the others together have too few packs."""
        tokens = self._tokens_beside_longest - (self._ranks - 1) * num_microbatches * self._capacity
        if tokens <= 0:
            return 0
        # The least cost of so many tokens: the last of the sequences that cost least per token counts in part.
        length, cost = self._cheapest_beside_longest
        last = int(np.searchsorted(np.cumsum(length), tokens))
        before = int(length[:last].sum())
        return int(cost[:last].sum()) + int(cost[last]) * (tokens - before) // int(length[last])

    @cached_property
    def _cheapest_beside_longest(self) -> tuple[IntArray, IntArray]:
        """Lengths and costs of all sequences but the longest, the cheapest per token first."""
        length, cost = self._work.length[1:], self._work.cost[1:]
        order = _by_cost_per_token(length, cost)[::-1]
        return length[order], cost[order]

    def _every_pack_is_used(self, num_microbatches: int | None) -> bool:
        return num_microbatches is not None and self._work.cost.size >= self._ranks * num_microbatches

    def _gathered(self, num_microbatches: int) -> int:
        """Cost of the costliest rank where each must hold a sequence per pack.

        The i costliest sequences are on some s ranks, which hold s * M sequences at the least: those, and others that
        cost no less than the cheapest ones. The costliest of the s ranks has at least the mean.
        """
        if not self._every_pack_is_used(num_microbatches):
            return 0
        cost = self._work.cost
        if cost.size == 2 * self._ranks and num_microbatches == 2:  # pairs: the costliest with the cheapest is best
            return int((cost[: self._ranks] + cost[: self._ranks - 1 : -1]).max())
        best = 0
        for num_costliest in {1 << power for power in range(self._ranks.bit_length())} | {self._ranks}:
            ranks = np.arange(-(-num_costliest // num_microbatches), num_costliest + 1)
            others = np.maximum(ranks * num_microbatches - num_costliest, 0)
            costs = -(-(self._sums[num_costliest] + self._shortest_sums[others]) // ranks)
            # More ranks than i can't hold one of them each; fewer may not hold them all: the least of all counts.
            fewest = cost.size - (self._ranks - 1) * num_microbatches
            best = max(best, int(costs[ranks * fewest >= num_costliest].min()))
        return best

    def _holds(self, time: int, span: _Span) -> bool:
        """Whether ranks that each end within `time` could hold all sequences, were these divisible.

        A rank whose costliest pack is c holds at most time - (stages - 1) c; c is at least its costliest sequence, and
        if the rank is full at least the mean of its packs, m = time / (M + stages - 1); m = 0 for any number. So each
        rank with a sequence of cost b > m loses (stages - 1)(b - m) beside one without: what all of them lose tells
        `_ranks_with`.
        """
        more = self._more
        mean, room = 0, self._ranks * time
        if span.last is not None:
            mean = -(-time // (span.last + more))
            room = self._ranks * (time * span.last // (span.last + more) + 1)
        cost = self._work.cost
        num_large = int(np.searchsorted(-cost, -mean))
        if num_large == 0:
            return room >= int(self._sums[-1])
        if time - more * int(cost[0]) < int(cost[0]):
            return False
        # Between two of the costs that are looked at, as many ranks lose as at the higher one.
        count = np.arange(1, num_large + 1) if num_large <= _NUM_LARGE else self._some_of(num_large)
        ranks = self._ranks_with(count, time, span)
        large = cost[count - 1]
        steps = large - np.append(large[1:], min(mean, int(large[-1])))
        return int(ranks.max()) <= self._ranks and room - more * int((ranks * steps).sum()) >= int(self._sums[-1])

    def _some_of(self, num_large: int) -> IntArray:
        return np.unique(np.linspace(1, num_large, _NUM_LARGE, dtype=np.int64))

    def _ranks_with(self, count: IntArray, time: int, span: _Span) -> IntArray:
        """At the least so many ranks have one of the `count` costliest sequences, int64 as `count`.

        Were all of these ranks' costliest no costlier than the last of the `count`, each would hold a limited cost and
        a limited number. But the first has the costliest of all; the next one at the least the costliest sequence that
        the first can't hold; and so on.
        """
        more, cost = self._more, self._work.cost
        large = cost[count - 1]
        room_beside = time - more * large
        most = room_beside // large
        if self._every_pack_is_used(span.last):
            most = np.minimum(most, cost.size - (self._ranks - 1) * span.first)
        ranks = np.maximum(-(-self._sums[count] // room_beside), -(-count // most))
        costliest: list[int] = []  # of the first ranks
        held = place = 0
        while place < int(count[-1]) and len(costliest) < min(self._ranks, _NUM_FIRST):
            costliest.append(place)
            held += time - more * int(cost[place])
            place = int(np.searchsorted(self._sums, held, side="right")) - 1
        ranks_so_far = np.searchsorted(np.array(costliest), count)
        if place < int(count[-1]):
            ranks_so_far += count > place
        return np.maximum(ranks, ranks_so_far)


class _MeetingBounds:
    """Where ranks meet at every microbatch: `sum of the microbatches' costliest packs + (stages - 1) * the costliest`.

    With the packs in descending order of cost, those at places 1, D + 1, 2 D + 1 ... cost no more, in sum, than the
    costliest of the microbatches, however the packs are arranged.
    """

    def __init__(self, work: Work, num_ranks: int, capacity: int, num_stages: int) -> None:
        self._work, self._ranks, self._more = work, num_ranks, num_stages - 1
        self._costs = np.concatenate(([0], np.cumsum(work.cost)))
        self._mean = -(-int(self._costs[-1]) // num_ranks)
        needed = packs_needed(work.length, capacity)
        # Of the packs at places 1, D + 1, ...: what those before can hold at the most; and the costliest sequence that
        # one of these or a later one must hold.
        before = np.arange(_NUM_ROWS) * num_ranks
        self._held_before = _most_cost(work, before * capacity)
        self._sequence = self._cost_at(np.searchsorted(needed, before + 1))
        self._of_any_number = self._sum_of(self._sequence, int(self._costs[-1]) - self._held_before)

    def quick(self, span: _Span) -> int:
        """At most `of`."""
        costliest = int(self._work.cost[0])
        if span.last is not None:
            costliest = max(costliest, -(-self._mean // span.last))
        return self._of_any_number + self._more * costliest + self._fixed(span)

    def of(self, span: _Span, rival: int | None) -> int:
        """Of these numbers of microbatches; `rival` is not needed."""
        if not span.is_single:
            return self.quick(span)
        num_microbatches = span.first
        rows = min(num_microbatches, _NUM_ROWS)
        held, sequence = self._held_before[:rows], self._sequence[:rows]
        before = np.arange(rows) * self._ranks
        spare = self._work.cost.size - self._ranks * num_microbatches
        if spare >= 0:
            # Every pack holds a sequence: those before hold at most one each and the spare ones.
            held = np.minimum(held, self._costs[np.minimum(before + spare * (before > 0), self._work.cost.size)])
            sequence = np.maximum(sequence, self._cost_at(before + spare))
        left = int(self._costs[-1]) - held
        packs_left = self._ranks * num_microbatches - before
        costliest = np.maximum(sequence, -(-left // packs_left))
        best = self._sum_of(costliest, left)
        largest = max(int(costliest[0]), -(-best // num_microbatches))
        return best + self._more * largest + self._fixed(span)

    def _sum_of(self, costliest: IntArray, left: IntArray) -> int:
        """Of the microbatches' costliest packs, of which the first are at least `costliest`: the first of them take at
        least their sum; the others share out what those can't hold.
        """
        sums = np.concatenate(([0], np.cumsum(costliest)))
        return max(int((sums[:-1] + -(-left // self._ranks)).max()), int(sums[-1]))

    def _fixed(self, span: _Span) -> int:
        return self._work.fixed * (span.first + self._more)

    def _cost_at(self, index: IntArray) -> IntArray:
        return np.append(self._work.cost, 0)[np.minimum(index, self._work.cost.size)]


def _most_cost(work: Work, room: IntArray) -> IntArray:
    """The cost of so many tokens at most, int64 as `room`: that of the sequences that cost most per token, the last in
    part.
    """
    order = _by_cost_per_token(work.length, work.cost)
    length, cost = np.append(work.length[order], 1), np.append(work.cost[order], 0)
    ends = np.cumsum(length[:-1])
    last = np.searchsorted(ends, room, side="right")
    tokens_left = room - np.append(0, ends)[last]
    # Products beyond int64 where a sequence is of millions of tokens: Python's integers.
    parts = [-(-c * t // n) for c, t, n in zip(cost[last].tolist(), tokens_left.tolist(), length[last].tolist())]
    return np.append(0, np.cumsum(cost))[last] + np.array(parts, np.int64)


def _by_cost_per_token(length: IntArray, cost: IntArray) -> IntArray:
    """The indices that sort sequences by descending cost per token: descending length, but for costs being rounded.

    Float division may swap only what differs by less than a unit in all.
    """
    return np.argsort(-(cost / length), kind="stable")
