"""pure. Ways to place sequences where ranks meet at every microbatch, for a given number of microbatches; see `even`.

A row is the packs of all ranks at one microbatch; it takes as long as its costliest. So while a sequence costs more
than a fair pack, a row is filled up to its cost; the others make rows of even packs. Then sequences are traded between
rows: what makes one row long fits beside what makes another one longer. Where capacity is tight, rows of packs by
best-fit decreasing, too, with even packs of the shortest sequences after them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.packing.scheduling.even import Effort, Room, Tight, evener_packs
from megatron.packing.scheduling.pack_fit import find_packing, fit_into
from megatron.packing.scheduling.placement import best_fit, fill, first_fit, spread, trade
from megatron.packing.scheduling.work import Work, stable_order

IntArray = npt.NDArray[np.int64]

_MOST_ROWS = 16
_MAX_BISECTIONS = 7
"""To find how many sequences have room in rows that can't hold all."""
_MAX_SEARCHES, _MOST_SEARCHED, _WORTH_SEARCHING = 6, 1024, 150
"""For packings of more sequences than best-fit finds room for, of up to so many; where the last row may get cheaper by
such a part of a rank's mean.
"""
_FEW_FULL = 2
"""Rows beside which a last one counts for so much that more than quick searches are worth it."""
_FULL = 98
"""Percent: where first-fit fills the first row less, another way is tried, of up to so many sequences:"""
_MOST_OTHERWISE = 2048
_FEW_ROWS, _HEIGHTS = 6, (32, 20)
"""Times that the costliest sequence's cost makes up a rank's mean at most, for higher first rows to be tried: by up to
so many of such parts of it.
"""
_ROUNDS = 2
"""Times that each row is lowered."""
_PARTS = (4, 32)
"""A row is lowered by such a part of its time at the most, the other ones may grow by as much less."""
_TRADES = 50_000
"""Pairs of sequences looked at in all rows, for each of the parts."""


class Rows(NamedTuple):
    """Sequences in rows, of as many packs each as there are ranks."""

    pack: IntArray
    """int64 [N], row * num_ranks + rank."""
    num_rows: int


def rows_with_short_last(work: Work, num_ranks: int, capacity: int) -> Rows | None:
    """A row less than best-fit decreasing needs, with as many sequences as are found room for, and the shortest ones in
    even packs of a row after it: best-fit would leave a longer one for that. None where that is one row in all, or
    many, of which the last hardly matters, or where the shortest ones take more than one.
    """
    _, num_packs = best_fit(work.length, capacity=capacity)
    num_rows = (num_packs - 1) // num_ranks
    if not 0 < num_rows <= _MOST_ROWS:
        return None
    low, high = num_rows * num_ranks, work.length.size  # so many fit, so many don't
    packs = np.arange(low)
    for _ in range(_MAX_BISECTIONS):
        middle = (low + high) // 2
        middle_packs, num_packs = best_fit(work.length[:middle], capacity=capacity)
        if num_packs <= num_rows * num_ranks:
            low, packs = middle, middle_packs
        else:
            high = middle
    high = work.length.size
    are_few = num_rows <= _FEW_FULL
    search = partial(fit_into, is_thorough=False) if are_few else find_packing
    for _ in range(_MAX_SEARCHES if high <= _MOST_SEARCHED else 0):
        least = 0 if are_few else int(work.cost[high - 1])
        if high - low <= 1 or (int(work.cost[low]) - least) * num_ranks * _WORTH_SEARCHING < work.total:
            break
        middle = (low + high) // 2
        answer = search(work.length[:middle], capacity=capacity, num_packs=num_rows * num_ranks)
        if answer.pack is not None:
            low, packs = middle, answer.pack
        else:
            high = middle
    last = spread(work.cost[low:], work.length[low:], num_ranks=num_ranks, capacity=capacity)
    return None if last is None else Rows(np.concatenate((packs, last + num_rows * num_ranks)), num_rows + 1)


def even_rows(work: Work, room: Room, tight: Tight, short_last: Callable[[], Rows | None]) -> Iterator[IntArray | None]:
    """Microbatches whose packs cost the same on all ranks; `tight` as in `even_ranks`, and `rows_with_short_last`."""
    ways = []
    for way in _quick_ways(work, room):
        ways.append(way)
        yield way.pack
    found = [way.pack for way in ways if way.pack is not None]

    def time_of_way(way: _Way) -> float:
        return math.inf if way.pack is None else _time_of(work, room, way.pack)

    tight_packs, rows = tight(), short_last()
    if tight_packs is not None:
        found.append(in_rows(work, room, tight_packs))
        yield found[-1]
    if rows is not None and rows.num_rows <= room.num_microbatches:
        row, column = np.divmod(rows.pack, room.num_ranks)
        found.append(in_rows(work, room, column * room.num_microbatches + row))
        yield found[-1]
    if not found:
        return
    for way in sorted(_higher_ways(work, room), key=time_of_way)[:2]:
        ways.append(way)
        found += [] if way.pack is None else [way.pack]
        yield way.pack
    for way in sorted(ways, key=time_of_way):
        pack = _evener(work, room, way)
        found += [] if pack is None else [pack]
        yield pack
    best = min(found, key=lambda pack: _time_of(work, room, pack))
    for _ in range(_ROUNDS):
        lowered = in_rows(work, room, _lowered(work, room, best))
        if _time_of(work, room, lowered) >= _time_of(work, room, best):
            return
        best = lowered
        yield best


class _Full(NamedTuple):
    """Some first rows, filled up to their costliest sequence."""

    num_rows: int
    pack: IntArray
    """The placement, -1 for sequences that are left."""
    rest: IntArray
    """Those that are left, int64."""


class _Way(NamedTuple):
    """Full rows, and rows of even packs after them."""

    full: _Full
    num_rows: int
    """Rows of even packs."""
    even: IntArray | None
    """Number of the even pack of each sequence that is left for them; None where a quick way found none."""
    pack: IntArray | None
    """The placement of all."""


def _quick_ways(work: Work, room: Room) -> Iterator[_Way]:
    """The last few numbers of full rows, and none, with several numbers of even rows."""
    full = _full_rows(work, room, by_first_fit=True)
    fulls = [full[number] for number in sorted({*range(max(len(full) - 3, 0), len(full)), 0}, reverse=True)]
    if work.cost.size <= _MOST_OTHERWISE and len(full) > 1 and _is_room_left(work, room, full[1]):
        fulls += _full_rows(work, room, by_first_fit=False)[:-3:-1]
    for entry in fulls:
        yield from _ways_with(work, room, entry)


def _ways_with(work: Work, room: Room, full: _Full) -> Iterator[_Way]:
    """Several numbers of even rows after these full ones."""
    rest, num_left = full.rest, room.num_microbatches - full.num_rows
    if rest.size == 0:
        yield _Way(full, 0, None, in_rows(work, room, full.pack))
        return
    # Rows about as costly as the costliest sequence left, or all rows that there are.
    fewest = int(work.cost[rest].sum()) // (room.num_ranks * int(work.cost[rest[0]]))
    for num_rows in sorted({min(max(fewest, 1), num_left), min(fewest + 1, num_left), num_left} - {0}):
        if not room.effort.spend(rest.size):
            return
        num_packs = room.num_ranks * num_rows
        even = spread(work.cost[rest], work.length[rest], num_ranks=num_packs, capacity=room.capacity)
        yield _Way(full, num_rows, even, None if even is None else _placed(work, room, full, even))


def _higher_ways(work: Work, room: Room) -> Iterator[_Way]:
    """A first row that costs more than the costliest sequence: where rows are few, another one may cost so much less,
    for sequences that leave no room for one another there have room for each other in the first row.
    """
    costliest, num_ranks = int(work.cost[0]), room.num_ranks
    if work.cost.size > _MOST_OTHERWISE or costliest * num_ranks * _FEW_ROWS < int(work.cost.sum()):
        return
    # Of an effort of their own: what comes after them is worth as much.
    room = replace(room, effort=Effort(4 * _HEIGHTS[1] * work.cost.size))
    for part in range(1, _HEIGHTS[1] + 1 if room.num_microbatches > 1 else 1):
        limit = costliest + costliest * part // _HEIGHTS[0]
        pack, _ = first_fit(work.cost, work.length, num_ranks=num_ranks, capacity=room.capacity, limit=limit)
        is_placed = pack >= 0
        pack[is_placed] *= room.num_microbatches
        yield from _ways_with(work, room, _Full(1, pack, np.flatnonzero(~is_placed)))


def _evener(work: Work, room: Room, way: _Way) -> IntArray | None:
    """The placement with evener packs than `way`, None where none are found."""
    if way.num_rows == 0:
        return None
    num_packs, rest = room.num_ranks * way.num_rows, way.full.rest
    even = evener_packs(work.cost[rest], work.length[rest], way.even, num_packs, room.capacity, room.effort)
    return None if even is None or even is way.even else _placed(work, room, way.full, even)


def _full_rows(work: Work, room: Room, by_first_fit: bool) -> list[_Full]:
    """No row, one, two ... filled up to their costliest sequence, while that costs more than a fair pack: by first-fit,
    or else with like sequences in all packs of a row (see `fill`).
    """
    num_ranks, num_microbatches = room.num_ranks, room.num_microbatches
    full = [_Full(0, np.full(work.cost.size, -1, np.int64), np.arange(work.cost.size))]
    while full[-1].rest.size and len(full) <= num_microbatches:
        row, pack, rest = full[-1]
        cost, length = work.cost[rest], work.length[rest]
        limit = int(cost[0])
        if limit * num_ranks * (num_microbatches - row) <= int(cost.sum()) or not room.effort.spend(rest.size):
            break
        if by_first_fit:
            column, _ = first_fit(cost, length, num_ranks=num_ranks, capacity=room.capacity, limit=limit)
        else:
            column = fill(cost, length, num_packs=num_ranks, capacity=room.capacity, limit=limit)
        placed = column >= 0
        pack = pack.copy()
        pack[rest[placed]] = column[placed] * num_microbatches + row
        full.append(_Full(row + 1, pack, rest[~placed]))
    return full


def _is_room_left(work: Work, room: Room, first: _Full) -> bool:
    """Whether the packs of a first row could cost notably more."""
    return int(work.cost[first.pack >= 0].sum()) * 100 < int(work.cost[0]) * room.num_ranks * _FULL


def _placed(work: Work, room: Room, full: _Full, even: IntArray) -> IntArray:
    """`full` with the sequences that are left in even packs after the full rows."""
    rows, columns = np.divmod(even, room.num_ranks)
    pack = full.pack.copy()
    pack[full.rest] = columns * room.num_microbatches + full.num_rows + rows
    return in_rows(work, room, pack)


def _lowered(work: Work, room: Room, pack: IntArray) -> IntArray:
    """The same with sequences traded between packs to lower one row after the other, where that is a gain in all."""
    shape = room.num_ranks, room.num_microbatches
    for row in range(room.num_microbatches):
        for part in _PARTS:
            if not room.effort.spend(work.cost.size):
                return pack
            costs = work.pack_costs(pack, *shape).max(axis=0)
            # Packs of other rows have room up to their row's cost: loads beside what they hold make up the difference
            # to this row's cost, less what it is to gain, or else nothing would ever be below it.
            loads = costs[row] - costs - costs[row] // part
            loads[row] = 0
            other = pack.copy()
            trade(
                *(work.cost, work.length, other),
                num_ranks=room.num_ranks * room.num_microbatches,
                capacity=room.capacity,
                loads=np.tile(loads, room.num_ranks),
                partners=2,
                traded=8,
                budget=_TRADES // room.num_microbatches,
            )
            if _time_of(work, room, other) < int(costs.sum()):
                pack = other
    return pack


def _time_of(work: Work, room: Room, pack: IntArray) -> int:
    return int(work.pack_costs(pack, room.num_ranks, room.num_microbatches).max(axis=0).sum())


def in_rows(work: Work, room: Room, pack: IntArray) -> IntArray:
    """The packs arranged so that those of like cost meet, the costliest first."""
    costs = work.pack_costs(pack, room.num_ranks, room.num_microbatches).ravel()
    place = np.empty_like(costs)
    place[stable_order(-costs)] = np.arange(costs.size)
    row, column = np.divmod(place[pack], room.num_ranks)
    return column * room.num_microbatches + row
