"""pure. What no schedule is quicker than where ranks meet at every microbatch; see `bounds`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megatron.packing.scheduling.pack_bounds import Span, packs_needed
from megatron.packing.scheduling.work import Work, by_cost_per_token

IntArray = npt.NDArray[np.int64]

_NUM_ROWS = 64
"""Microbatches, the costliest ones, that are looked at one by one."""


class RowBounds:
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

    def _fixed(self, span: Span) -> int:
        return self._work.fixed * (span.first + self._more)

    def _cost_at(self, index: IntArray) -> IntArray:
        return np.append(self._work.cost, 0)[np.minimum(index, self._work.cost.size)]


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
