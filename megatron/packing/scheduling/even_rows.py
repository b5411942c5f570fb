"""pure. Ways to place sequences where ranks meet at every microbatch, for a given number of microbatches; see `even`.

A row is the packs of all ranks at one microbatch; it takes as long as its costliest. So while a sequence costs more
than a fair pack, a row is filled up to its cost; the others make rows of even packs. Then sequences are traded between
rows: what makes one row long fits beside what makes another one longer. Where capacity is tight, rows of packs by
best-fit decreasing, too, with even packs of the shortest sequences after them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.packing.scheduling.even import Room, Tight, evener_packs
from megatron.packing.scheduling.placement import best_fit, first_fit, spread, trade
from megatron.packing.scheduling.work import Work, stable_order

IntArray = npt.NDArray[np.int64]

_MOST_ROWS = 16
_MAX_BISECTIONS = 7
"""To find how many sequences have room in rows that can't hold all."""
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
    """A row less than best-fit decreasing needs, with as many sequences as that can hold, and the shortest ones in even
    packs of a row after it: best-fit would leave a longer one for that. None where that is one row in all, or many, of
    which the last hardly matters, or where the shortest ones take more than one.
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
    last = spread(work.cost[low:], work.length[low:], num_ranks=num_ranks, capacity=capacity)
    return None if last is None else Rows(np.concatenate((packs, last + num_rows * num_ranks)), num_rows + 1)


def even_rows(work: Work, room: Room, tight: Tight, short_last: Callable[[], Rows | None]) -> Iterator[IntArray | None]:
    """Microbatches whose packs cost the same on all ranks; `tight` as in `even_ranks`, and `rows_with_short_last`."""
    full, rests = _full_rows(work, room)
    ways = []
    for way in _quick_ways(work, room, full, rests):
        ways.append(way)
        yield way.pack
    found = [way.pack for way in ways if way.pack is not None]
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
    for way in sorted(ways, key=lambda way: math.inf if way.pack is None else _time_of(work, room, way.pack)):
        pack = _evener(work, room, full, rests[way.num_full], way)
        found += [] if pack is None else [pack]
        yield pack
    best = min(found, key=lambda pack: _time_of(work, room, pack))
    for _ in range(_ROUNDS):
        lowered = in_rows(work, room, _lowered(work, room, best))
        if _time_of(work, room, lowered) >= _time_of(work, room, best):
            return
        best = lowered
        yield best


class _Way(NamedTuple):
    """So many first rows filled up to their costliest sequence, and as many of even packs after them."""

    num_full: int
    num_rows: int
    even: IntArray | None
    """Number of the even pack of each sequence that is left for them; None where a quick way found none."""
    pack: IntArray | None
    """The placement of all."""


def _quick_ways(work: Work, room: Room, full: IntArray, rests: list[IntArray]) -> Iterator[_Way]:
    """The last few numbers of full rows, and none, with several numbers of even rows."""
    num_ranks, last = room.num_ranks, len(rests) - 1
    for num_full in sorted({last, max(last - 1, 0), max(last - 2, 0), 0}, reverse=True):
        rest, num_left = rests[num_full], room.num_microbatches - num_full
        if rest.size == 0:
            yield _Way(num_full, 0, None, in_rows(work, room, full))
            continue
        # Rows about as costly as the costliest sequence left, or all rows that there are.
        fewest = int(work.cost[rest].sum()) // (num_ranks * int(work.cost[rest[0]]))
        for num_rows in sorted({min(max(fewest, 1), num_left), min(fewest + 1, num_left), num_left} - {0}):
            if not room.effort.spend(rest.size):
                return
            even = spread(work.cost[rest], work.length[rest], num_ranks=num_ranks * num_rows, capacity=room.capacity)
            pack = None if even is None else _placed(work, room, full, rest, num_full, even)
            yield _Way(num_full, num_rows, even, pack)


def _evener(work: Work, room: Room, full: IntArray, rest: IntArray, way: _Way) -> IntArray | None:
    """The placement with evener packs than `way`, None where none are found."""
    if way.num_rows == 0:
        return None
    num_packs = room.num_ranks * way.num_rows
    even = evener_packs(work.cost[rest], work.length[rest], way.even, num_packs, room.capacity, room.effort)
    return None if even is None or even is way.even else _placed(work, room, full, rest, way.num_full, even)


def _full_rows(work: Work, room: Room) -> tuple[IntArray, list[IntArray]]:
    """Rows filled up to their costliest sequence, while that costs more than a fair pack: the placement, with -1 for
    sequences in none of them; and the sequences left after none, one, two ... of the rows.
    """
    num_ranks, num_microbatches = room.num_ranks, room.num_microbatches
    pack = np.full(work.cost.size, -1, np.int64)
    rests = [np.arange(work.cost.size)]
    while rests[-1].size and len(rests) <= num_microbatches:
        rest, row = rests[-1], len(rests) - 1
        cost = work.cost[rest]
        if int(cost[0]) * num_ranks * (num_microbatches - row) <= int(cost.sum()) or not room.effort.spend(rest.size):
            break
        column, _ = first_fit(cost, work.length[rest], num_ranks=num_ranks, capacity=room.capacity, limit=int(cost[0]))
        placed = column >= 0
        pack[rest[placed]] = column[placed] * num_microbatches + row
        rests.append(rest[~placed])
    return pack, rests


def _placed(work: Work, room: Room, full: IntArray, rest: IntArray, num_full: int, even: IntArray) -> IntArray:
    """`full` with the sequences of `rest` in even packs after the full rows."""
    rows, columns = np.divmod(even, room.num_ranks)
    pack = full.copy()
    pack[rest] = columns * room.num_microbatches + num_full + rows
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
