"""pure. How costly later microbatches must be where the second is no costlier than so much; see `row_bounds`.

A row is the packs of all ranks at one microbatch; rows are in descending order of their costliest packs. Packs of all
rows but the first then hold limited costs, so that long sequences there leave as little room beside them as in the
first row, which capacity limits.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megatron.packing.scheduling.work import Work

IntArray = npt.NDArray[np.int64]

_NUM_LOOKS = 24
"""Sequences of which it is asked whether all up to them find room in the rows before."""


class LaterRows:
    """What sequences the third row and later ones must hold."""

    def __init__(self, work: Work, num_ranks: int, capacity: int, num_rows: int) -> None:
        self._ranks, self._capacity = num_ranks, min(capacity, int(work.length.sum()))
        num_long = int(np.searchsorted(-work.length, -(capacity // 2)))
        self._long, self._long_cost = work.length[:num_long], work.cost[:num_long]
        # Each look is at one of the short sequences and all that are longer.
        looks = np.unique(np.linspace(0, work.cost.size - num_long - 1, _NUM_LOOKS).astype(np.int64))
        self._looks = looks if num_long < work.cost.size else looks[:0]
        short, short_cost = work.length[num_long:], work.cost[num_long:]
        self._short, self._short_cost = short[self._looks], short_cost[self._looks]
        self._short_total = np.cumsum(short_cost)[self._looks]
        # No short sequence costs more per token.
        self._price = int(np.max(-(-short_cost // np.maximum(short, 1)), initial=0))
        self._rows = np.arange(2, num_rows)

    def least(self, second: int) -> IntArray:
        """For each row from the third on, a cost that it reaches where the second costs less than `second`: int64.

        Of the long sequences, those above half the capacity, no two share a pack. One in the first row leaves the rest
        of the capacity to short ones, one in another row the rest of `second`; nothing where that is less than the
        sequence that is looked at. The long ones are divided so that most is left. If all short ones up to that
        sequence need more room even so, a row after these holds one of them, or a long one. O(N log N) for each look.
        """
        room_in_first = self._price * self._capacity
        left_in_first = np.where(
            self._capacity - self._long < self._short[:, None], 0, self._price * (self._capacity - self._long)
        )
        left_in_others = np.where(second - self._long_cost < self._short_cost[:, None], 0, second - self._long_cost)
        fits_only_first = int(np.searchsorted(-self._long_cost, -second))
        gain = (left_in_first - room_in_first) - (left_in_others - second)
        gain = -np.sort(-gain[:, fits_only_first:], axis=1)
        forced = left_in_first[:, :fits_only_first].sum(axis=1) - fits_only_first * room_in_first
        others = (left_in_others - second)[:, fits_only_first:].sum(axis=1)
        gains = np.pad(np.cumsum(gain, axis=1), ((0, 0), (1, 0)))
        least = []
        for rows in self._rows.tolist():
            packs = (rows - 1) * self._ranks
            fewest = max(self._long.size - packs - fits_only_first, 0)
            most = min(self._ranks - fits_only_first, gains.shape[1] - 1)
            if fewest > most:  # more long ones than packs: what a row must hold is known without this
                least.append(0)
                continue
            room = self._ranks * room_in_first + packs * second
            room = room + forced + others + gains[:, fewest : most + 1].max(axis=1)
            over = np.flatnonzero(self._short_total > room)
            least.append(int(self._short_cost[over[0]]) if over.size else 0)
        return np.array(least, np.int64)
