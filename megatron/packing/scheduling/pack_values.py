"""pure. Values of sequences that tell how many packs they need at the least; see `bounds`.

Give sequences any values, and let no pack be able to hold more than W of them: then all values together, divided by W,
are a lower bound of packs. The best values are the dual of Gilmore and Gomory's linear programme ("A linear programming
approach to the cutting-stock problem", Operations Research 1961), for which columns are generated: patterns, each worth
the most that a pack can hold. Here a value is a step function of the length, as dual feasible functions mostly are
(Lueker 1983; Fekete and Schepers, "New classes of fast lower bounds for bin packing problems", 2001): of as few tiers
of lengths as will do, for a long one's place may go to a shorter one of the same tier, and tiers are split where the
patterns don't have room for their longer sequences.

Floating point only chooses the values. They are rounded to integers, and W of those is found by dynamic programming: it
makes a proof of whatever was chosen, and a bound of every step on the way to the optimum (Farley, "A note on bounding a
class of linear programming problems, including cutting stock problems", Operations Research 1990).

All exists twice, in C++ (see `native`) and in Python (below), and gives the same result in both forms and on every
machine: the budget counts steps, not time.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.packing.scheduling import native
from megatron.packing.scheduling.native import address as _at
from megatron.packing.scheduling.simplex import Basis

IntArray = npt.NDArray[np.int64]
Pattern = tuple[int, ...]
"""Tiers, ascending by number, each as often as the pack holds one of it."""

_MOST_UNITS = 8192
"""Of capacity; lengths are rounded down to such units."""
_MOST_SEQUENCES = 8192
"""Of which products of values fit 64 bits."""
_SHORTEST_SHARE = 128
"""Of what is shorter than so small a part of capacity the value is 0."""
_SCALE, _SLACK = 1 << 24, 16
"""A pack's value in integers, but for what packs turn out to hold above it; and what of that doesn't count."""
_NUM_PARTS, _MOST_TIERS = 5, 96
_LEAST_GAIN, _MOST_LOST = 1e-8, 0.1
"""Packs that a column saves, by the values, to be chosen; that one wastes to be forgotten."""
_LEAST_MISSING = 1e-6
"""Places, to split a tier for."""


class Values(NamedTuple):
    """What sequences are worth, and packs."""

    value: IntArray
    """Of each sequence, int64 [N], none below 0."""
    most: int
    """No pack holds more."""

    @property
    def num_packs(self) -> int:
        """So many packs are needed."""
        return -(-int(self.value.sum()) // self.most)


def pack_values(length: IntArray, *, capacity: int, num_packs: int, budget: int) -> Values:
    """Values by which sequences need as many packs as can be proven, or more than `num_packs`.

    `length` is int64 [N], descending, each in 1..capacity, N at most 8192. A step of the `budget` is about a number
    changed: a million take 0.6 milliseconds, up to thirty times that in Python.
    """
    assert length.size <= _MOST_SEQUENCES
    if native.LIBRARY is None:
        return _Search(length, capacity, num_packs, budget).run()
    value = np.empty(length.size, np.int64)
    most = native.LIBRARY.pack_values(length.size, _at(length), capacity, num_packs, budget, _at(value))
    return Values(value, most)


class _Column(NamedTuple):
    """A pack's pattern, or what gives the longer tier's place to one of the shorter (of none: -1)."""

    pattern: Pattern = ()
    shorter: int = -1
    longer: int = -1


class _Search:
    """In Python, with the same steps as in C++."""

    def __init__(self, length: IntArray, capacity: int, num_packs: int, budget: int) -> None:
        unit = -(-capacity // _MOST_UNITS)
        self._units, self._capacity = length // unit, capacity // unit
        self._num_packs, self._budget = num_packs, budget
        ascending = np.unique(self._units)
        ascending = ascending[ascending * _SHORTEST_SHARE >= self._capacity]
        self._lengths: list[int] = ascending[ascending > 0].tolist()
        self._num_from: list[int] = [*np.searchsorted(-self._units, -np.array(self._lengths), "right").tolist(), 0]
        """How many sequences are that long or longer."""
        self._best_sum, self._best_most = 0, 1
        self._best_units, self._best_value = np.zeros(0, np.int64), np.zeros(1, np.int64)

    def run(self) -> Values:
        if self._lengths:
            self._begin()
            while self._budget > 0:
                self._improve()
                is_new = self._price()
                if self._best_sum > self._num_packs * self._best_most or not (is_new or self._refine()):
                    break
        value = self._best_value[np.searchsorted(self._best_units, self._units, "right")]
        return Values(value, self._best_most)

    def _begin(self) -> None:
        self._first, self._order = [0], [0]
        """Of a tier its first length; tiers, ascending by length."""
        self._pool: dict[Pattern, None] = {}
        alone = self._alone(0)
        self._basis = Basis(1.0, alone * self._num_from[0], alone)
        self._basic = [_Column(self._add_single(0))]
        num_short = self._first_above(self._capacity // 2)
        starts = {num_short}
        for part in range(_NUM_PARTS + 1 if num_short else 0):
            start = part * (num_short - 1) // _NUM_PARTS
            starts |= {start, self._first_above(self._capacity - self._lengths[start])}
        for start in sorted(starts):
            self._split(start)

    def _units_of(self, tier: int) -> int:
        return self._lengths[self._first[tier]]

    def _alone(self, tier: int) -> float:
        return 1.0 / (self._capacity // self._units_of(tier))

    def _first_above(self, units: int) -> int:
        return bisect_right(self._lengths, units)

    def _end_of(self, place: int) -> int:
        """The first length of the tier after the place-th."""
        return self._first[self._order[place + 1]] if place + 1 < len(self._order) else len(self._lengths)

    def _add_single(self, tier: int) -> Pattern:
        pattern = (tier,) * (self._capacity // self._units_of(tier))
        self._pool.setdefault(pattern)
        return pattern

    def _split(self, start: int) -> None:
        """Makes a tier of what is of length number `start` or longer, in its tier."""
        added = len(self._order)
        if start == len(self._lengths) or added == _MOST_TIERS:
            return
        place = next(place for place in range(added) if self._end_of(place) > start)
        tier, end = self._order[place], self._end_of(place)
        if self._first[tier] == start:
            return
        self._order.insert(place + 1, added)
        self._first.append(start)
        self._basis.grow(tier, self._alone(added), float(self._num_from[start] - self._num_from[end]))
        self._basic.append(_Column())
        self._add_single(added)

    def _improve(self) -> None:
        """The simplex method, until no known pattern is worth more than a pack and no tier less than a shorter one."""
        self._basis.revalue()
        patterns, order = [*self._pool], np.array(self._order)
        tiers = self._padded(patterns)
        while self._budget > 0:
            self._budget -= order.size * order.size + 4 * len(patterns)
            ordered = self._basis.value[order]
            gain = np.concatenate((ordered - np.append(0.0, ordered[:-1]), self._gain(tiers)))
            chosen = int(gain.argmin())
            least = float(gain[chosen])
            if not least < -_LEAST_GAIN:
                return
            if chosen >= order.size:
                column = _Column(patterns[chosen - order.size])
                basic = self._basis.enter([*column.pattern], -1, 1.0, least)
            else:
                shorter = self._order[chosen - 1] if chosen else -1
                column = _Column((), shorter, self._order[chosen])
                basic = self._basis.enter([shorter] if chosen else [], column.longer, 0.0, least)
            if basic < 0:
                return
            self._basic[basic] = column

    def _padded(self, patterns: list[Pattern]) -> IntArray:
        tiers = np.full((max(map(len, patterns), default=0), len(patterns)), len(self._order))
        for number, pattern in enumerate(patterns):
            tiers[: len(pattern), number] = pattern
        return tiers

    def _gain(self, tiers: IntArray) -> npt.NDArray[np.float64]:
        """Of each pattern, what a pack is worth above it."""
        gain, value = np.ones(tiers.shape[1]), np.append(self._basis.value, 0.0)
        for row in tiers:
            gain = gain - value[row]
        return gain

    def _price(self) -> bool:
        """Rounds values, finds the most of a pack, and patterns worth more than a pack; whether there are new ones."""
        order, capacity = self._order, self._capacity
        self._tier_units = [self._units_of(tier) for tier in order]
        scaled = self._basis.value[order] * float(_SCALE)
        most = _SCALE // (capacity // np.array(self._tier_units))
        rounded = np.where(scaled > 0.0, np.minimum(scaled, most), 0.0).astype(np.int64)
        self._tier_value: list[int] = np.maximum.accumulate(rounded).tolist()
        counts = [self._num_from[self._first[tier]] - self._num_from[self._end_of(k)] for k, tier in enumerate(order)]
        total = sum(value * count for value, count in zip(self._tier_value, counts, strict=True))
        self._num_short = bisect_right(self._tier_units, capacity // 2)
        self._within = self._knapsack()
        longer = zip(self._tier_value[self._num_short :], self._tier_units[self._num_short :], strict=True)
        most_of_pack = max(
            [self._within[capacity], *(value + self._within[capacity - units] for value, units in longer)]
        )
        if self._best_sum * most_of_pack < total * self._best_most:
            self._best_sum, self._best_most = total, most_of_pack
            self._best_units, self._best_value = np.array(self._tier_units), np.array([0, *self._tier_value])
        if most_of_pack <= _SCALE + _SLACK:
            return False
        return sum([self._add_best_with(place) for place in range(len(order))]) > 0

    def _knapsack(self) -> list[int]:
        """The most value of sequences that fit twice or more, within 0, 1, ... units."""
        within = np.zeros(self._capacity + 1, np.int64)
        for units, value in zip(self._tier_units[: self._num_short], self._tier_value, strict=False):
            if value == 0:
                continue
            self._budget -= self._capacity // 4
            for start in range(units, self._capacity + 1, units):
                span = within[start : start + units]
                np.maximum(span, within[start - units : start - units + span.size] + value, out=span)
        return within.tolist()

    def _add_best_with(self, place: int) -> bool:
        """Adds the pattern that is worth most with one of a tier, if more than a pack; whether it is new."""
        units, value, within = self._tier_units, self._tier_value, self._within
        room, beside = self._capacity - units[place], -1
        most = value[place] + within[room]
        for other in range(self._num_short, bisect_right(units, room)) if place < self._num_short else ():
            worth = value[place] + value[other] + within[room - units[other]]
            if worth > most:
                most, beside = worth, other
        if most <= _SCALE + _SLACK:
            return False
        places = [place]
        if beside >= 0:
            places.append(beside)
            room -= units[beside]
        while within[room] > 0:
            fitting = range(bisect_left(value, 1), len(value))
            places.append(next(k for k in fitting if within[room] == value[k] + within[room - units[k]]))
            room -= units[places[-1]]
        pattern = tuple(sorted(self._order[place] for place in places))
        is_new = pattern not in self._pool
        self._pool.setdefault(pattern)
        return is_new

    def _refine(self) -> bool:
        """Splits tiers, of which those of equal values have been merged; False where there is nothing to split."""
        self._merge()
        if len(self._order) == _MOST_TIERS:
            return False
        found = sorted(self._lacking(shares_room=False) or self._lacking(shares_room=True))
        for _, start in found[: max(4, len(self._order) // 8)]:
            self._split(start)
            self._split(self._first_above(self._capacity - self._lengths[start]))
        return bool(found)

    def _lacking(self, *, shares_room: bool) -> list[tuple[float, int]]:
        """Where the patterns lack places for the longer sequences of a tier, most of them: minus how many, and length
        number. Room that a pattern leaves goes to each of its places, or in equal shares to all.
        """
        places: list[list[tuple[int, float]]] = [[] for _ in self._order]
        for column, amount in zip(self._basic, self._basis.amount.tolist(), strict=True):
            room = self._capacity - sum(self._units_of(tier) for tier in column.pattern)
            for k, tier in enumerate(column.pattern):
                parts = len(column.pattern) if shares_room else k + 1 - column.pattern.index(tier)
                places[tier].append((self._units_of(tier) + room // parts, amount))
        found = []
        for k, tier in enumerate(self._order):
            start, end = self._first[tier] + 1, self._end_of(k)
            missing = np.array(self._num_from[start:end], np.float64) - float(self._num_from[end])
            for longest, amount in places[tier]:
                missing[: bisect_right(self._lengths, longest, start, end) - start] -= amount
            if missing.size and missing.max() > _LEAST_MISSING:
                found.append((-float(missing.max()), start + int(missing.argmax())))
        return found

    def _merge(self) -> None:
        """Joins tiers of no more value than the next shorter one with it, and forgets patterns that waste much."""
        patterns = [*self._pool]
        is_kept = (self._gain(self._padded(patterns)) <= _MOST_LOST).tolist()
        new_number = [*range(len(self._order))]
        for i in range(len(self._order) - 1, -1, -1):
            _, shorter, longer = self._basic[i]
            if shorter < 0:
                continue
            place = self._order.index(longer)
            if place == 0 or self._order[place - 1] != shorter:
                continue
            del self._order[place], self._first[longer], self._basic[i]
            self._basis.shrink(longer, i)

            def renamed(tier: int, gone: int = longer, other: int = shorter) -> int:
                tier = other if tier == gone else tier
                return tier - (tier > gone)

            self._order = [renamed(tier) for tier in self._order]
            new_number = [renamed(tier) for tier in new_number]
            self._basic = [
                _Column(tuple(sorted(map(renamed, pattern))), renamed(shorter), renamed(longer))
                for pattern, shorter, longer in self._basic
            ]
        kept = (pattern for pattern, is_one in zip(patterns, is_kept, strict=True) if is_one)
        self._pool = dict.fromkeys(tuple(sorted(new_number[tier] for tier in pattern)) for pattern in kept)
