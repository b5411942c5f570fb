"""pure. What no schedule is quicker than where ranks meet at the end of the step; see `bounds`."""

from __future__ import annotations

from bisect import bisect_right
from functools import cached_property

import numpy as np
import numpy.typing as npt

from megatron.packing.scheduling import native
from megatron.packing.scheduling.native import address
from megatron.packing.scheduling.pack_bounds import Span
from megatron.packing.scheduling.work import Work, by_cost_per_token

IntArray = npt.NDArray[np.int64]

_NUM_LARGE = 1024
"""Costs of sequences that tell how many ranks of a pipeline must have long ones."""
_NUM_FIRST = 32
"""Of those ranks, the first ones are looked at one by one."""
_MOST_SHARED_OUT = 12
"""Sequences that two ranks share out in all ways."""
_MOST_WITH_COSTLIEST = 64
"""Ranks of the costliest sequences, of which it is counted what they must hold besides."""


def rank_cost_lower_bound(cost: IntArray, num_ranks: int) -> int:
    """A cost that the costliest rank reaches in every schedule of sequences of these costs (int64 [N], descending).

    The largest of: the mean over ranks; the costliest sequence; and for each k, the pigeonhole bound: of the k *
    num_ranks + 1 costliest sequences some rank holds k + 1, at the least the k + 1 cheapest of them; what pairs cost;
    and for two ranks, all ways to share out the costliest sequences. 0 without sequences.
    """
    if cost.size == 0:
        return 0
    sums = np.concatenate(([0], np.cumsum(cost)))
    # Position of the (k * num_ranks + 1)-th costliest, k = 1, 2, ...
    cheapest = np.arange(num_ranks, cost.size, num_ranks)
    k = np.arange(1, cheapest.size + 1)
    pigeonhole = sums[cheapest + 1] - sums[cheapest - k]
    mean = -(-int(sums[-1]) // num_ranks)
    bounds = [mean, int(cost[0]), int(pigeonhole.max(initial=0)), _pairs_lower_bound(cost, sums, num_ranks)]
    if num_ranks == 2:
        ways = np.zeros(1, np.int64)
        for one in cost[:_MOST_SHARED_OUT].tolist():
            ways = np.concatenate((ways, ways + one))
        bounds.append(int(np.maximum(ways, ways[-1] - ways).min()))
    return max(bounds)


def _pairs_lower_bound(cost: IntArray, sums: IntArray, num_ranks: int) -> int:
    """A cost that the costliest rank reaches because of the ranks that hold two of the costliest sequences, or three.

    Of the num_ranks + j costliest, some rank holds three, at the least the three cheapest; or j ranks or more hold two.
    Then the costliest pair costs no less than where the 2 j cheapest are paired from the outside in: were each pair
    below c[i] + c[k], i < k, the sequences up to i would have partners behind k only, of which there are too few.
    """
    num_pairs = min(num_ranks, cost.size - num_ranks)
    if num_pairs < 1:
        return 0
    places = np.arange(num_pairs)
    pairs = np.maximum.accumulate(cost[num_ranks - 1 - places] + cost[num_ranks + places])
    ends = num_ranks + places + 1
    triples = np.where(ends >= 3, sums[ends] - sums[np.maximum(ends - 3, 0)], pairs)
    return int(np.minimum(pairs, triples).max())


class CrowdedRanks:
    """What the ranks of the costliest sequences must hold, as the others together have too little room for the rest."""

    def __init__(self, work: Work, num_ranks: int, capacity: int) -> None:
        self._work, self._ranks, self._capacity = work, num_ranks, capacity
        most = min(max(num_ranks - 1, 1), _MOST_WITH_COSTLIEST)
        self._costs, self._tokens = np.cumsum(work.cost[:most]), int(work.length.sum())
        self._tokens_left = self._tokens - np.cumsum(work.length[:most])

    def costs(self, num_microbatches: int) -> tuple[int, int]:
        """Costs that the costliest rank and the one of the costliest sequence reach.

        The k costliest are on some k ranks, k = 1, 2, ...; these hold also what the others have no room for, and the
        costliest of them has at least the mean.
        """
        longest, most = int(self._work.cost[0]), self._costs.size
        room = min(num_microbatches * self._capacity, self._tokens)
        if (
            int(self._tokens_left[-1]) <= (self._ranks - most) * room
        ):  # nor beside fewer, as none is above a rank's room
            return longest, longest
        beyond = self._tokens_left - np.arange(self._ranks - 1, self._ranks - 1 - most, -1) * room
        first = int(np.searchsorted(beyond, 1))
        held = self._costs[first:] + self._least_cost(beyond[first:])
        costliest = int((-(-held // np.arange(first + 1, most + 1))).max())
        return costliest, longest if first else int(held[0])

    def _least_cost(self, tokens: IntArray) -> IntArray:
        """Of so many, at most all: of the cheapest per token, the last sequence in part."""
        lengths, costs, ends, sums = self._cheapest
        last = np.searchsorted(ends, tokens)
        length, cost, part = lengths[last], costs[last], tokens - (ends[last] - lengths[last])
        # cost * part // length, but that the product might be beyond int64.
        return sums[last] - cost + cost // length * part + cost % length * part // length

    @cached_property
    def _cheapest(self) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """Lengths and costs of all sequences by ascending cost per token, and the sums of either."""
        order = by_cost_per_token(self._work.length, self._work.cost)[::-1]
        length, cost = self._work.length[order], self._work.cost[order]
        return length, cost, np.cumsum(length), np.cumsum(cost)


class RankBounds:
    """Where ranks meet at the end of the step: `max over ranks of (sum of its packs + (stages - 1) * its costliest)`.

    T is that time without the fixed costs, which are the same in every schedule of M microbatches.
    """

    def __init__(self, work: Work, num_ranks: int, capacity: int, num_stages: int) -> None:
        self._work, self._ranks, self._capacity, self._more = work, num_ranks, capacity, num_stages - 1
        self._sums = np.concatenate(([0], np.cumsum(work.cost)))
        self._negative_cost, self._first_counts = -work.cost, np.arange(1, _NUM_LARGE + 1)
        self._rank_cost = rank_cost_lower_bound(work.cost, num_ranks)
        self._costliest = int(work.cost[0])
        self._shortest_sums = np.concatenate(([0], np.cumsum(work.cost[::-1])))
        any_number = Span(work.cost.size + 1, None)
        self._of_any_number = 0
        self._of_any_number = self._least_that_holds(self.quick(any_number) - self._fixed(any_number), None, any_number)

    def quick(self, span: Span) -> int:
        """At most `of`."""
        # The costliest rank's costliest pack has at least its mean.
        mean = 0 if span.last is None else -(-self._more * self._rank_cost // span.last)
        beside = int(self._shortest_sums[span.first - 1]) if self._every_pack_is_used(span.last) else 0
        longest = self._costliest * (self._more + 1) + beside
        return max(self._rank_cost + mean, longest, self._of_any_number) + self._fixed(span)

    def of(self, span: Span, rival: int | None) -> int:
        """Of these numbers of microbatches; `rival` where it is not below that."""
        time, fixed = self.quick(span) - self._fixed(span), self._fixed(span)
        if span.last is not None:
            time = max(time, self._crowded(span.last))
        if span.is_single:
            time = max(time, self._gathered(span.first))
        if rival is None:
            return self._least_that_holds(time, None, span) + fixed
        if time >= rival - fixed or not self._holds(rival - fixed, span):
            return max(time + fixed, rival)
        return self._least_that_holds(time, rival - fixed, span) + fixed

    def _least_that_holds(self, time: int, high: int | None, span: Span) -> int:
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

    def _fixed(self, span: Span) -> int:
        return self._work.fixed * (span.first + self._more)

    def _crowded(self, num_microbatches: int) -> int:
        """Time of the `CrowdedRanks`: a costliest pack has at least the mean of its rank's."""
        costliest, with_longest = self._crowded_ranks.costs(num_microbatches)
        mean = -(-self._more * costliest // num_microbatches)
        return max(costliest + mean, with_longest + self._more * self._costliest)

    @cached_property
    def _crowded_ranks(self) -> CrowdedRanks:
        return CrowdedRanks(self._work, self._ranks, self._capacity)

    @cached_property
    def _lists(self) -> tuple[list[int], list[int]]:
        """Costs, and their sums: for single looks, Python's lists are several times as fast as arrays."""
        return self._work.cost.tolist(), self._sums.tolist()

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

    def _holds(self, time: int, span: Span) -> bool:
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
        num_large = int(np.searchsorted(self._negative_cost, -mean))
        if num_large == 0:
            return room >= int(self._sums[-1])
        if time - more * int(cost[0]) < int(cost[0]):
            return False
        count = self._first_counts[:num_large] if num_large <= _NUM_LARGE else self._some_of(num_large)
        if native.LIBRARY is not None and room < 1 << 62:
            most = cost.size - (self._ranks - 1) * span.first if self._every_pack_is_used(span.last) else cost.size
            addresses = address(count), address(cost), address(self._sums)
            numbers = cost.size, self._ranks, time, more, mean, room, most, _NUM_FIRST
            return bool(native.LIBRARY.holds(count.size, *addresses, *numbers))
        # Between two of the costs that are looked at, as many ranks lose as at the higher one.
        ranks = self._ranks_with(count, time, span)
        large = cost[count - 1]
        steps = large - np.append(large[1:], min(mean, int(large[-1])))
        return int(ranks.max()) <= self._ranks and room - more * int((ranks * steps).sum()) >= int(self._sums[-1])

    def _some_of(self, num_large: int) -> IntArray:
        return np.unique(np.linspace(1, num_large, _NUM_LARGE, dtype=np.int64))

    def _ranks_with(self, count: IntArray, time: int, span: Span) -> IntArray:
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
        costs, sums = self._lists
        costliest: list[int] = []  # of the first ranks
        held, place, end = 0, 0, int(count[-1])
        while place < end and len(costliest) < min(self._ranks, _NUM_FIRST):
            costliest.append(place)
            held += time - more * costs[place]
            place = bisect_right(sums, held) - 1
        ranks_so_far = np.searchsorted(np.array(costliest), count)
        if place < end:
            ranks_so_far += count > place
        return np.maximum(ranks, ranks_so_far)
