"""pure. A closer bound than `row_bounds` of steps whose ranks meet at every microbatch, by a search of seconds.

A row is the packs of all ranks at one microbatch; it takes as long as its costliest. That no schedule takes less than
some time is shown for each box of costs that the first and the second row may have, the costliest ones: all of that
sequences that they can't hold must be in later rows, which have what is left of the time.

What two rows can't hold tells a linear programme with a column for each pattern of a pack (Gilmore and Gomory, "A linear
programming approach to the cutting-stock problem", Operations Research 1961), in its dual: give each sequence a price
that is at most its cost, and let no pack of a row hold more than W; then what all prices sum to above the two rows'
packs times W is a lower bound of the cost in later rows. Floating point only chooses the prices; they are rounded to
integers, and W of those is found by dynamic programming, over costs and over tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.packing.scheduling.simplex import Basis
from megatron.packing.scheduling.work import Work

IntArray = npt.NDArray[np.int64]

_MOST_ALONE, _NUM_SHARED = 40, 16
"""Tiers of one of the costliest sequences, and tiers that others share, of each of which the price is that of the
cheapest.
"""
_UNITS = 4096
"""Costs of rows and tokens of packs are counted in such parts of the most."""
_NARROWEST = 400
"""A box is not halved below such a part of the time."""
_MOST_BOXES = 400
_NUM_HALVINGS = 5
"""Of the span between the bounds, to find the highest time that is shown."""
_MOST_ROUNDS, _MOST_PIVOTS = 30, 600
_LEAST_GAIN = 1e-7


class _Box(NamedTuple):
    """Costs that the first row and the second may have, from the least up to the most of each."""

    first: tuple[int, int]
    second: tuple[int, int]


class RowSearch:
    """See the module's docstring."""

    def __init__(self, work: Work, num_ranks: int, capacity: int) -> None:
        self._cost, self._length, self._ranks = work.cost, work.length, num_ranks
        self._total = work.total
        self._capacity = capacity
        size = work.cost.size
        shared = np.linspace(min(size, _MOST_ALONE), size, _NUM_SHARED + 1).astype(np.int64)
        starts = np.unique(np.concatenate((np.arange(min(size, _MOST_ALONE)), shared[:-1])))
        starts = starts[starts < size]
        self._count = np.diff(np.append(starts, size))
        cheapest = starts + self._count - 1
        self._tier_cost, tier_length = work.cost[cheapest], work.length[cheapest]
        self._unit = -(-2 * int(work.cost[0]) // _UNITS)
        self._by_cost = self._tier_cost // self._unit
        token_unit = -(-capacity // _UNITS)
        self._by_tokens, self._room = tier_length // token_unit, capacity // token_unit
        self._prices: list[_Prices] = []

    def least(self, *, low: int, high: int, num_microbatches: int, fixed: int) -> int: 
        """x"""
        while True:
            pass

    def is_refuted(self, time: int, least_second: int, later: bool) -> bool:
        """Whether no two rows, and `later` ones, cost less than `time` in all."""
        costliest = int(self._cost[0])
        boxes = [_Box((costliest, time - least_second), (least_second, max(time - costliest, least_second)))]
        looked = 0
        self.log = []
        while boxes:
            box = boxes.pop()
            (low, high), (second_low, second_high) = box
            left = time - low - second_low
            if left < 0 or second_low > high:
                continue
            looked += 1
            if looked > _MOST_BOXES:
                return False
            if self._is_box_refuted(box, left if later else 0):
                continue
            if max(high - low, second_high - second_low) * _NARROWEST <= time:
                return False
            if high - low >= second_high - second_low:
                middle = (low + high) // 2
                boxes += [_Box((middle + 1, high), box.second), _Box((low, middle), box.second)]
            else:
                middle = (second_low + second_high) // 2
                boxes += [_Box(box.first, (middle + 1, second_high)), _Box(box.first, (second_low, middle))]
        self.looked = looked
        return True

    def _is_box_refuted(self, box: _Box, left: int) -> bool:
        tops = (box.first[1], min(box.second[1], box.first[1]))
        most_left = left * self._ranks
        if self._total > self._ranks * sum(tops) + most_left:
            return True
        for prices in self._prices[::-1]:
            if left <= prices.most_single and self._above(prices, tops) > most_left:
                return True
        for by_tokens in (False, True):
            if self._solve(tops, left, by_tokens):
                return True
        return False

    def _above(self, prices: _Prices, tops: tuple[int, int]) -> int:
        most = [min(int(prices.by_cost[min(top // self._unit, _UNITS)]), prices.by_tokens) for top in tops]
        return prices.total - self._ranks * sum(most)

    def _solve(self, tops: tuple[int, int], left: int, by_tokens: bool) -> bool:
        num_tiers, scale = self._count.size, float(self._cost[0])
        may_be_left = self._tier_cost <= left
        cost = np.where(may_be_left, self._tier_cost / scale, self._total / scale)
        basis = Basis(0.0, 0.0, 1.0)
        basis.cost = np.concatenate((cost, [0.0, 0.0]))
        basis.amount = np.concatenate((self._count.astype(float), [float(self._ranks)] * 2))
        basis._inverse = np.eye(num_tiers + 2)
        basis.value = basis.cost.copy()
        caps = [min(top // self._unit, _UNITS) for top in tops]
        sizes = [self._by_tokens if by_tokens else self._by_cost, self._by_cost]
        rooms = [self._room if by_tokens else caps[0], caps[1]]
        pool: list[list[int]] = []
        known: set[tuple[int, ...]] = set()
        padded = np.zeros((0, 1), np.int64)
        limit = left * self._ranks / scale
        pivots = 0
        for _ in range(_MOST_ROUNDS):
            basis.revalue()
            while pivots < _MOST_PIVOTS:
                values = np.append(basis.value, 0.0)
                y = values[:num_tiers]
                # order: tiers descending in cost
                drops = y - np.append(y[1:], 0.0)  # a costlier one's price is at least that of a cheaper one
                gains = -values[padded].sum(axis=1) if len(pool) else np.zeros(0)
                slack = -values[num_tiers:num_tiers + 2]
                fluid = cost - y
                every = np.concatenate((drops, gains, slack, fluid))
                k = int(every.argmin())
                if every[k] >= -_LEAST_GAIN:
                    break
                g = float(every[k])
                pivots += 1
                if k < num_tiers:
                    r = basis.enter([k + 1] if k + 1 < num_tiers else [], k, 0.0, g)
                elif k < num_tiers + len(pool):
                    r = basis.enter(pool[k - num_tiers], -1, 0.0, g)
                elif k < num_tiers + len(pool) + 2:
                    r = basis.enter([num_tiers + k - num_tiers - len(pool)], -1, 0.0, g)
                else:
                    j = k - num_tiers - len(pool) - 2
                    r = basis.enter([j], -1, float(cost[j]), g)
                if r < 0:
                    break
            objective = float((basis.cost * basis.amount).sum())
            y = np.maximum(basis.value[:num_tiers], 0.0)
            price = np.floor(y * scale).astype(np.int64)
            price = np.where(may_be_left, np.minimum(price, self._tier_cost), price)
            price = np.maximum.accumulate(price[::-1])[::-1]
            by_cost = _passes(self._by_cost, price, self._count, _UNITS)
            tokens = _passes(self._by_tokens, price, self._count, self._room)
            prices = _Prices(
                int(self._tier_cost[~may_be_left].min(initial=0)) if False else int(left),
                int((price * self._count).sum()),
                by_cost[-1][1],
                int(tokens[-1][1][-1]),
            )
            if self._above(prices, tops) > left * self._ranks:
                self._prices.append(prices)
                return True
            if objective <= limit:
                return False
            added = 0
            for row in (0, 1):
                passes = tokens if by_tokens and row == 0 else by_cost
                table = passes[-1][1]
                allowed = -basis.value[num_tiers + row] * scale
                for k in range(num_tiers):
                    if sizes[row][k] > rooms[row] or self._tier_cost[k] > tops[row]:
                        continue
                    if table[rooms[row] - sizes[row][k]] + price[k] <= allowed + 1e-6 * scale:
                        continue
                    pattern = sorted([k, *_traced(passes, rooms[row] - int(sizes[row][k])), num_tiers + row])
                    if tuple(pattern) not in known:
                        known.add(tuple(pattern))
                        pool.append(pattern)
                        added += 1
            if not added or pivots >= _MOST_PIVOTS:
                return False
            most = max(map(len, pool))
            padded = np.array([p + [num_tiers + 2] * (most - len(p)) for p in pool], np.int64)
        return False


class _Prices(NamedTuple):
    """Prices that were chosen once: what they sum to, and what packs hold of them at the most."""

    most_single: int
    total: int
    by_cost: IntArray
    """Of packs of so many units of cost."""
    by_tokens: int
    """Of packs of full capacity."""


def _passes(size: IntArray, price: IntArray, count: IntArray, room: int) -> list[tuple[tuple[int, int, int], IntArray]]:
    """The most price within each room, after each of some passes: (tier, copies, size) and int64 [room + 1]."""
    table = np.zeros(room + 1, np.int64)
    passes = [((-1, 0, 0), table)]
    for tier in range(size.size):
        if price[tier] == 0:
            continue
        s, copies = int(size[tier]), 1
        left = min(int(count[tier]), room // s if s else int(count[tier]))
        if s == 0:
            table = table + int(price[tier]) * left
            passes.append(((tier, left, 0), table))
            continue
        while left > 0:
            copies = min(copies, left)
            table = table.copy()
            shift = s * copies
            before = passes[-1][1]
            np.maximum(before[shift:], before[: room + 1 - shift] + int(price[tier]) * copies, out=table[shift:])
            passes.append(((tier, copies, shift), table))
            left -= copies
            copies *= 2
    return passes


def _traced(passes: list[tuple[tuple[int, int, int], IntArray]], room: int) -> list[int]:
    found: list[int] = []
    for number in range(len(passes) - 1, 0, -1):
        (tier, copies, shift), table = passes[number]
        if shift == 0 or table[room] != passes[number - 1][1][room]:
            found += [tier] * copies
            room -= shift
    return found
