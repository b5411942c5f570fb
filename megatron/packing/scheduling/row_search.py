"""pure. A closer bound than `row_bounds` of steps whose ranks meet at every microbatch, by a search of seconds.

A row is the packs of all ranks at one microbatch; it takes as long as its costliest. That no schedule takes as little
as some time is shown for each box of costs that the first and the second row, the costliest ones, may have: all that
they can't hold must be in later rows, which have what is left of the time. Where that is not enough, the third row is
looked at as well.

What two rows can't hold tells a linear programme with a column for each pattern of a pack (Gilmore and Gomory, "A
linear programming approach to the cutting-stock problem", Operations Research 1961), in its dual: give each sequence a
price that is at most its cost, if it may be in a later row, and let no pack of a row hold more than W; then what all
prices sum to above the two rows' packs times W is a lower bound of the cost in later rows. Floating point only chooses
the prices; they are rounded to integers, and W of those is found by dynamic programming, over costs and over tokens.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.packing.scheduling.held_beside import HeldBeside, most_held
from megatron.packing.scheduling.schedule import ScheduleRequest
from megatron.packing.scheduling.simplex import Basis
from megatron.packing.scheduling.work import Work

IntArray = npt.NDArray[np.int64]

_NUM_HALVINGS = 6
"""Of the span between the bound and the time, to find the longest time that is shown to be too short."""
_MOST_ALONE, _NUM_SHARED = 40, 96
"""Tiers of one sequence each, the costliest ones, and tiers that the others share: the price is as of its cheapest."""
_MOST_SEQUENCES = 2048
_UNITS = 4096
"""Costs and tokens are counted in such parts of the most, rounded down."""
_NARROWEST, _MOST_BOXES = 400, 4000
"""Boxes are halved down to such a part of the time, up to so many in all."""
_MOST_ROUNDS, _MOST_PIVOTS = 30, 600
_LEAST_GAIN = 1e-7


def closer_bound(request: ScheduleRequest, time: int) -> int:
    """No schedule takes less: from the request's bound up to `time`, that of some schedule, in units of the work.

    Nothing is gained where ranks do not meet, in pipelines, or of more than 2048 sequences, which tiers tell too little
    of.
    """
    low, high = request.bound.time, time
    is_for_rows = request.model.ranks_meet and request.model.num_stages == 1
    if not is_for_rows or low >= high or request.lengths.size > _MOST_SEQUENCES:
        return low
    search = RowSearch(request.work, request.num_ranks, request.capacity, high)
    fewest, fixed = request.bound.min_microbatches, request.work.fixed
    more = fewest + request.microbatch_multiple
    for _ in range(_NUM_HALVINGS):
        middle = (low + high) // 2
        if search.takes_longer(middle - fixed * fewest, fewest) and search.takes_longer(middle - fixed * more, None):
            low = middle
        else:
            high = middle
    return low


_Box = tuple[tuple[int, int], ...]
"""Costs that the first rows may have: the least and the most of each."""


class _Rows(NamedTuple):
    """What rows may cost at the most."""

    tops: tuple[int, int, int]
    """The first three."""
    left: int
    """Those after them, in all; none of these costs more than the third."""
    later: int
    """The third and those after it, in all."""


class _Prices(NamedTuple):
    """Prices that were chosen once."""

    left: int
    """Cheaper sequences may be in later rows, so that their prices are at most their costs."""
    total: int
    most: IntArray
    """That a pack of so many units of cost holds."""


class RowSearch:
    """Whether rows can be that short; times are without fixed costs, at most `most`."""

    def __init__(self, work: Work, num_ranks: int, capacity: int, most: int) -> None:
        size = work.cost.size
        self._num_ranks, self._total = num_ranks, work.total
        self._costliest = int(work.cost[0])
        alone = min(size, _MOST_ALONE)
        shared = np.linspace(alone, size, _NUM_SHARED + 1).astype(np.int64)[:-1]
        starts = np.unique(np.concatenate((np.arange(alone), shared[shared < size])))
        self._count = np.diff(np.append(starts, size))
        cheapest = starts + self._count - 1
        self._cost = work.cost[cheapest]
        self._unit, token_unit = -(-most // _UNITS), -(-capacity // _UNITS)
        self._units, self._tokens = self._cost // self._unit, work.length[cheapest] // token_unit
        self._capacity = capacity // token_unit
        self._prices: list[_Prices] = []

    def takes_longer(self, time: int, num_rows: int | None) -> bool:
        """Whether no schedule of so many rows (None: of any number) takes `time` or less, shown box by box: of two
        rows, and where that fails of three.
        """
        most_second = time - self._costliest
        if most_second < 0:
            return True
        box: _Box = ((self._costliest, time), (0, most_second))
        if self._is_shown(box, time, num_rows):
            return True
        return (num_rows is None or num_rows > 3) and self._is_shown((*box, (0, most_second // 2)), time, num_rows)

    def _is_shown(self, box: _Box, time: int, num_rows: int | None) -> bool:
        boxes = [box]
        for _ in range(_MOST_BOXES):
            if not boxes:
                return True
            box = boxes.pop()
            rows = self._rows_of(box, time, num_rows)
            if rows is None or self._is_known_to_be_impossible(rows):
                continue
            if max(high - low for low, high in box) * _NARROWEST > time:
                boxes += _halves(box)
            elif not self._is_impossible(rows):
                return False
        return False

    def _rows_of(self, box: _Box, time: int, num_rows: int | None) -> _Rows | None:
        """None where there are no such rows."""
        left = time - sum(low for low, _ in box)
        if left < 0 or any(later[0] > row[1] for row, later in pairwise(box)):
            return None
        tops = list(accumulate((min(high, low + left) for low, high in box), min))
        if num_rows is not None and num_rows <= 3:
            tops = [*tops, min(left, tops[1])][:num_rows] + [0] * (3 - num_rows)
            return _Rows((tops[0], tops[1], tops[2]), 0, tops[2])
        if len(box) == 2:
            later = left if num_rows is None else min(left, (num_rows - 2) * tops[1])
            return _Rows((tops[0], tops[1], min(left, tops[1])), later, later)
        later = left + box[2][0]
        if num_rows is not None:
            left = min(left, (num_rows - 3) * tops[2])
            later = min(later, tops[2] + left)
        return _Rows((tops[0], tops[1], tops[2]), left, later)

    def _is_known_to_be_impossible(self, rows: _Rows) -> bool:
        """By the sum of all costs, or prices that were chosen before."""
        first, second, third = rows.tops
        if self._total > self._num_ranks * (first + second + rows.later):
            return True
        for prices in reversed(self._prices):
            if third <= prices.left:
                above = self._above(prices, (first, second))
                if above > rows.later * self._num_ranks:
                    return True
                if above - (prices.total - self._above(prices, (third,))) > rows.left * self._num_ranks:
                    return True
        return False

    def _is_impossible(self, rows: _Rows) -> bool:
        """As prices show, with the third row as one of the later ones, or as a row of packs."""
        dearest = rows.tops[2]
        return any(
            _Programme(self, tops, left, dearest).is_refuted()
            for tops, left in ((rows.tops[:2], rows.later), (rows.tops, rows.left))
        )

    def _above(self, prices: _Prices, tops: tuple[int, ...]) -> int:
        """What these rows can't hold of the prices."""
        return prices.total - self._num_ranks * sum(int(prices.most[top // self._unit]) for top in tops)


class _Programme:
    """The least cost in later rows, in floating point: packs hold what fits their row's cost or their capacity, the
    lesser of both beside the costliest sequence of each.

    Its rows are the tiers, costliest first, and the packs of the two rows; a column is the pattern of a pack, or one of
    a tier in a later row, or a place of a tier given to the next cheaper one, or an empty pack.
    """

    def __init__(self, search: RowSearch, tops: tuple[int, ...], left: int, dearest: int) -> None:
        self._search, self._tops, self._left, self._dearest = search, tops, left, dearest
        self._scale = float(search._costliest)
        self._num_tiers = search._count.size
        self._may_be_left = search._cost <= dearest
        # What may not be in a later row costs much more there: were it all costs, fractions would get inexact.
        self._cost = np.where(self._may_be_left, search._cost, 10 * search._cost) / self._scale
        amount = np.append(search._count, [search._num_ranks] * len(tops)).astype(np.float64)
        self._basis = Basis.of_ones(np.append(self._cost, [0.0] * len(tops)), amount)
        self._patterns: dict[tuple[int, ...], None] = {}

    def is_refuted(self) -> bool:
        """Whether prices show that more must be in later rows than there may be."""
        search, pivots = self._search, 0
        for _ in range(_MOST_ROUNDS):
            pivots += self._improve()
            price = self._prices()
            by_cost = HeldBeside(search._units, price, search._count, _UNITS)
            by_tokens = HeldBeside(search._tokens, price, search._count, search._capacity)
            total = int((price * search._count).sum())
            prices = _Prices(self._dearest, total, most_held(price, by_cost, by_tokens))
            if search._above(prices, self._tops) > self._left * search._num_ranks:
                search._prices.append(prices)
                return True
            least = float((self._basis.cost * self._basis.amount).sum())
            if least <= self._left * search._num_ranks / self._scale + _LEAST_GAIN:
                return False
            is_new = False
            for row in range(len(self._tops)):
                is_new |= self._add_patterns(row, price, by_cost, by_tokens)
            if not is_new or pivots >= _MOST_PIVOTS:
                return False
        return False

    def _improve(self) -> int:
        """The simplex method over the known columns; the number of pivots."""
        patterns = [list(pattern) for pattern in self._patterns]
        longest = max(map(len, patterns), default=1)
        nothing = self._num_tiers + len(self._tops)
        padded = np.array([pattern + [nothing] * (longest - len(pattern)) for pattern in patterns], np.int64)
        padded = padded.reshape(-1, longest)
        self._basis.revalue()
        for pivot in range(_MOST_PIVOTS):
            values = np.append(self._basis.value, 0.0)
            of_tiers = values[: self._num_tiers]
            given = of_tiers - np.append(of_tiers[1:], 0.0)
            gains = np.concatenate(
                (given, self._cost - of_tiers, -values[self._num_tiers : -1], -values[padded].sum(axis=1))
            )
            chosen = int(gains.argmin())
            gain, tier = float(gains[chosen]), chosen % self._num_tiers
            if not gain < -_LEAST_GAIN:
                return pivot
            if chosen < self._num_tiers:
                cheaper = [tier + 1] if tier + 1 < self._num_tiers else []
                basic = self._basis.enter(cheaper, tier, 0.0, gain)
            elif chosen < 2 * self._num_tiers:
                basic = self._basis.enter([tier], -1, float(self._cost[tier]), gain)
            elif chosen < self._num_tiers + nothing:
                basic = self._basis.enter([chosen - self._num_tiers], -1, 0.0, gain)
            else:
                basic = self._basis.enter(patterns[chosen - self._num_tiers - nothing], -1, 0.0, gain)
            if basic < 0:
                return pivot
        return _MOST_PIVOTS

    def _prices(self) -> IntArray:
        """In integers, that of a costlier tier no lower."""
        values = np.maximum(self._basis.value[: self._num_tiers], 0.0)
        price = np.floor(values * self._scale).astype(np.int64)
        price = np.where(self._may_be_left, np.minimum(price, self._search._cost), price)
        return np.maximum.accumulate(price[::-1])[::-1]

    def _add_patterns(self, row: int, price: IntArray, by_cost: HeldBeside, by_tokens: HeldBeside) -> bool:
        """Of each tier the pack of the row whose costliest sequence is one of it and that holds most beside, if that is
        worth more than a pack.
        """
        room, before = self._tops[row] // self._search._unit, len(self._patterns)
        least = (1e-6 - self._basis.value[self._num_tiers + row]) * self._scale
        most = np.stack([by_cost.most_beside(room), by_tokens.most_beside(self._search._capacity)])
        for number, (table, table_room) in enumerate(((by_cost, room), (by_tokens, self._search._capacity))):
            tiers = np.flatnonzero((most.argmin(axis=0) == number) & (price + most.min(axis=0) > least))
            for tier, held in zip(tiers.tolist(), table.held_beside(tiers, table_room)):
                self._patterns.setdefault(tuple(sorted([tier, *held, self._num_tiers + row])))
        return len(self._patterns) > before


def _halves(box: _Box) -> tuple[_Box, _Box]:
    """Of the longest side."""
    longest = max(range(len(box)), key=lambda row: box[row][1] - box[row][0])
    low, high = box[longest]
    middle = (low + high) // 2
    before, after = box[:longest], box[longest + 1 :]
    return (*before, (min(middle + 1, high), high), *after), (*before, (low, middle), *after)
