"""pure. What no schedule is quicker than where ranks meet at every microbatch; see `bounds`."""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from megatron.packing.scheduling.pack_bounds import Span, longest_that_need_more, packs_needed
from megatron.packing.scheduling.rank_bounds import CrowdedRanks, rank_cost_lower_bound
from megatron.packing.scheduling.second_row import LaterRows
from megatron.packing.scheduling.work import Work, by_cost_per_token

IntArray = npt.NDArray[np.int64]

_NUM_ROWS = 64
"""Microbatches, the costliest ones, that are looked at one by one."""
_MOST_SEARCHED_ROWS = 4
"""First rows, of which searches tell what has no room in them: later ones are a smaller part of the sum."""
_MOST_ROWS_WITH_SECOND = 6
"""Times the costliest sequence that a rank's mean may be, for the second row to be looked at: of more rows it is but a
small part.
"""
_STEPS_OF_SECOND = (12, 80)
"""So many costs that the second row is above or below, in steps of such a part of the sum of all rows."""
_NUM_PRICES = 4
"""Prices per token that what packs hold is bounded with, those of some short sequences."""
_MANY = 2048
"""Sequences, of more of which it is bounded with one price."""


class RowBounds:
    """Where ranks meet at every microbatch: `sum of the microbatches' costliest packs + (stages - 1) * the costliest`.

    With the packs in descending order of cost, those at places 1, D + 1, 2 D + 1 ... cost no more, in sum, than the
    costliest of the microbatches, however the packs are arranged. Nor does any rank. A microbatch is a row here.
    """

    def __init__(self, work: Work, num_ranks: int, capacity: int, num_stages: int, fewest: int) -> None:
        """At least `fewest` microbatches hold sequences."""
        self._work, self._ranks, self._capacity, self._more = work, num_ranks, capacity, num_stages - 1
        self._costs = np.concatenate(([0], np.cumsum(work.cost)))
        self._mean = -(-int(self._costs[-1]) // num_ranks)
        needed = packs_needed(work.length, capacity)
        # Of the packs at places 1, D + 1, ...: what those before can hold at the most; and the costliest sequence that
        # one of these or a later one must hold.
        before = np.arange(_NUM_ROWS) * num_ranks
        self._rank_cost = rank_cost_lower_bound(work.cost, num_ranks)
        self._held_before = _most_cost(work, before * capacity)
        self._sequence = self._cost_at(np.searchsorted(needed, before + 1))
        for row in range(1, min(fewest, _MOST_SEARCHED_ROWS) + 1):
            number = longest_that_need_more(work.length, needed, capacity, row * num_ranks)
            self._sequence[row] = self._cost_at(np.array(number - 1))
        self._sequence[:fewest] = np.maximum(self._sequence[:fewest], work.cost[-1])
        self._held_by_packs = _HeldByPacks(work, capacity, before)
        self._held_before = np.minimum(self._held_before, self._held_by_packs.most(None))
        self._of_any_number = self._sum_of(self._sequence, self._held_before)

    @cached_property
    def _later_rows(self) -> LaterRows:
        return LaterRows(self._work, self._ranks, self._capacity, _MOST_ROWS_WITH_SECOND + 2)

    @cached_property
    def _crowded_ranks(self) -> CrowdedRanks:
        return CrowdedRanks(self._work, self._ranks, self._capacity)

    def quick(self, span: Span) -> int:
        """At most `of`."""
        costliest = int(self._work.cost[0])
        if span.last is not None:
            costliest = max(costliest, -(-self._mean // span.last))
        return self._of_any_number + self._more * costliest + self._fixed(span)

    def of(self, span: Span, rival: int | None) -> int:
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
        packs_left = self._ranks * num_microbatches - before
        costliest = np.maximum(sequence, -(-(int(self._costs[-1]) - held) // packs_left))
        crowded, _ = self._crowded_ranks.costs(num_microbatches)
        best = max(self._sum_with_second(costliest, held), crowded)
        largest = max(int(costliest[0]), -(-best // num_microbatches))
        return best + self._more * largest + self._fixed(span)

    def _sum_with_second(self, costliest: IntArray, held: IntArray) -> int:
        """`_sum_of` with the second row between two costs, or above all that are looked at: the least of all ways.

        The less the second row takes, the more must later ones hold (see `LaterRows`).
        """
        least = self._sum_of(costliest, held)
        if costliest.size < 3 or self._mean > _MOST_ROWS_WITH_SECOND * int(self._work.cost[0]):
            return least
        step = -(-int(costliest.sum()) // _STEPS_OF_SECOND[1])
        edges = [int(costliest[1]) + step * number for number in range(_STEPS_OF_SECOND[0] + 1)]
        with_second = costliest.copy()
        with_second[1] = edges[-1]
        best = self._sum_of(with_second, held)
        for low, high in pairwise(edges):
            if best <= least:
                return least
            with_second = costliest.copy()
            with_second[1] = low
            later = self._later_rows.least(high)[: costliest.size - 2]
            with_second[2 : 2 + later.size] = np.maximum(with_second[2 : 2 + later.size], later)
            best = min(best, self._sum_of(with_second, held))
        return max(best, least)

    def _sum_of(self, costliest: IntArray, held: IntArray) -> int:
        """Of rows, the first of which are at least `costliest`: the first of them take at least their sum; the others
        share out what those can't hold, which is all but `held`, or all but what packs no costlier than that hold.

        Where a row is costlier, its packs may hold as much more, but the sum is as much higher.
        """
        costliest = np.maximum.accumulate(costliest[::-1])[::-1]
        sums = np.concatenate(([0], np.cumsum(costliest)))
        held = np.minimum(held, self._held_by_packs.most(np.repeat(costliest, self._ranks))[: held.size])
        left = int(self._costs[-1]) - held
        return max(int((sums[:-1] + -(-left // self._ranks)).max()), int(sums[-1]), self._rank_cost)

    def _fixed(self, span: Span) -> int:
        return self._work.fixed * (span.first + self._more)

    def _cost_at(self, index: IntArray) -> IntArray:
        return np.append(self._work.cost, 0)[np.minimum(index, self._work.cost.size)]


class _HeldByPacks:
    """What so many packs can hold at the most, where of the sequences longer than capacity / 2 each holds one at most.

    Such a pack has room for no more than what is shorter, and none if all are longer than that. At a price per token
    of short sequences, a pack is worth its long sequence and the price of what fits beside it; the costliest packs and
    what short sequences cost above the price are at least what they hold, whatever the price is (Lagrange).
    """

    def __init__(self, work: Work, capacity: int, num_packs: IntArray) -> None:
        length, cost = work.length, work.cost
        num_long = int(np.searchsorted(-length, -(capacity // 2)))
        room = capacity - length[:num_long]
        longest_within = np.append(length, 0)[np.searchsorted(-length, -room)]
        # Where there is no room for two, only for the longest one that fits.
        room = np.where(room < 2 * int(length[-1]), longest_within, room)
        short, short_cost = length[num_long:], cost[num_long:]
        prices = np.zeros((1, 1), np.int64)
        if short.size:
            places = np.linspace(0, short.size - 1, _NUM_PRICES if length.size <= _MANY else 1).astype(np.int64)
            prices = (short_cost[places] // short[places])[:, None]
        tokens = min(capacity, int(short.sum()))
        worth = np.maximum(cost[:num_long] + prices * np.minimum(room, tokens), prices * tokens)
        worth = -np.sort(-worth, axis=1)
        self._worth = np.hstack((worth, np.repeat(prices * tokens, short.size, axis=1)))
        self._above_price = np.maximum(short_cost - prices * short, 0).sum(axis=1)
        self._num_packs = np.minimum(num_packs, length.size)

    def most(self, ceilings: IntArray | None) -> IntArray:
        """For each of the numbers of packs; with the costliest packs no costlier than `ceilings`, in their order."""
        worth = self._worth
        if ceilings is not None:
            worth = worth[:, : ceilings.size]
            worth = np.minimum(worth, ceilings[: worth.shape[1]])
        held = np.pad(np.cumsum(worth, axis=1), ((0, 0), (1, 0))) + self._above_price[:, None]
        return held.min(axis=0)[np.minimum(self._num_packs, worth.shape[1])]


def _most_cost(work: Work, room: IntArray) -> IntArray:
    """The cost of so many tokens at most, int64 as `room`: that of the sequences that cost most per token, the last in
    part.
    """
    order = by_cost_per_token(work.length, work.cost)
    length, cost = np.append(work.length[order], 1), np.append(work.cost[order], 0)
    ends = np.cumsum(length[:-1])
    last = np.searchsorted(ends, room, side="right")
    tokens_left = room - np.append(0, ends)[last]
    # Products beyond int64 where a sequence is of millions of tokens: Python's integers.
    parts = [-(-c * t // n) for c, t, n in zip(cost[last].tolist(), tokens_left.tolist(), length[last].tolist())]
    return np.append(0, np.cumsum(cost))[last] + np.array(parts, np.int64)
