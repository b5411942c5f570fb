"""pure. The most price that a pack holds beside its costliest sequence, by dynamic programming; see `row_search`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

_NEVER = -(1 << 62)


class _Pass(NamedTuple):
    """One step of the dynamic programme: so many of a tier were offered to packs of all rooms."""

    tier: int
    copies: int
    size: int
    """Of all these copies."""
    most: IntArray
    """What packs hold at the most after it, int64 [room + 1]."""


class HeldBeside:
    """The most price that packs of each room up to `room` hold beside one of a tier, with none of a costlier tier and
    no more of any than there are. Sizes, prices and counts are int64 [tiers], the costliest first.
    """

    def __init__(self, size: IntArray, price: IntArray, count: IntArray, room: int) -> None:
        self.size = size
        self._passes = [_Pass(-1, 0, 0, np.zeros(room + 1, np.int64))]
        self._last = np.zeros(size.size, np.int64)
        """Of each tier the number of the last pass of it or cheaper ones."""
        for tier in range(size.size - 1, -1, -1):
            if price[tier] > 0:
                self._offer(tier, int(size[tier]), int(price[tier]), int(count[tier]))
            self._last[tier] = len(self._passes) - 1

    def _offer(self, tier: int, one: int, worth: int, left: int) -> None:
        """In powers of two."""
        room, copies = self._passes[0].most.size - 1, 1
        left = min(left, room // one) if one else left
        while left:
            copies = min(copies, left) if one else left
            before = self._passes[-1].most
            most = before.copy()
            offered = before[: room + 1 - one * copies] + worth * copies
            np.maximum(before[one * copies :], offered, out=most[one * copies :])
            self._passes.append(_Pass(tier, copies, one * copies, most))
            left -= copies
            copies *= 2

    def of(self, tier: int) -> IntArray:
        """For each room, int64 [room + 1], beside the one: what is cheaper and others of the tier."""
        return self._passes[self._last[tier]].most

    def most_beside(self, room: int) -> IntArray:
        """In a pack of `room`, int64 [tiers]; of tiers that have no room in it much less than nothing."""
        beside = (room - self.size).tolist()
        return np.array([int(self.of(tier)[left]) if left >= 0 else _NEVER for tier, left in enumerate(beside)])

    def held_beside(self, tiers: IntArray, room: int) -> list[list[int]]:
        """What that is: tiers, each as often as the pack of `room` holds one of it, for each of `tiers`."""
        held: list[list[int]] = [[] for _ in range(tiers.size)]
        left, last = room - self.size[tiers], self._last[tiers]
        for number in range(len(self._passes) - 1, 0, -1):
            after, before = self._passes[number], self._passes[number - 1]
            taken = (last >= number) & (after.most[left] != before.most[left])
            for pack in np.flatnonzero(taken).tolist():
                held[pack] += [after.tier] * after.copies
            left = left - taken * after.size
        return held


def most_held(price: IntArray, by_cost: HeldBeside, by_tokens: HeldBeside) -> IntArray:
    """That a pack of each cost holds, within its capacity too, whichever tier is its costliest: int64 [room + 1]."""
    within = by_tokens.most_beside(by_tokens.of(0).size - 1)
    most = np.zeros_like(by_cost.of(0))
    for tier, (size, worth) in enumerate(zip(by_cost.size.tolist(), price.tolist(), strict=True)):
        beside = np.minimum(by_cost.of(tier)[: max(most.size - size, 0)], within[tier])
        np.maximum(most[size:], worth + beside, out=most[size:])
    return np.maximum.accumulate(most)
