"""pure. Placements made evener where packs are so full that sequences can't be traded one by one: see `repartition`.

Each function lowers the time of a placement (int64 [N], rank * num_microbatches + microbatch) towards `low`, which no
placement is below, and gives None where it finds nothing better; of packs, none is above capacity.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from megatron.packing.scheduling.even import Effort, Room
from megatron.packing.scheduling.even_rows import in_rows
from megatron.packing.scheduling.repartition import Repartition, repartition
from megatron.packing.scheduling.work import Work

IntArray = npt.NDArray[np.int64]

_SPLITS_OF_RANKS, _SPLITS_OF_ROWS = 2000, 1000
"""For each sequence, to reach one lower time."""
_MOST_FAILURES = 2
_FINEST_BISECTION = 2048
"""Bisection ends at this part of a time."""


def evener_ranks(work: Work, room: Room, pack: IntArray, low: int, splits: Effort) -> IntArray | None:
    """With the costliest rank cheaper; `low` is a rank's cost without fixed costs."""
    shape = room.num_ranks, room.num_microbatches

    def time_of(pack: IntArray) -> int:
        return int((work.pack_costs(pack, *shape) - work.fixed).sum(axis=1).max())

    def try_for(pack: IntArray, time: int) -> Repartition:
        return repartition(
            *(work.cost, work.length, pack),
            num_ranks=room.num_ranks,
            packs_per_rank=room.num_microbatches,
            capacity=room.capacity,
            limit=time,
            budget=_SPLITS_OF_RANKS * work.cost.size,
        )

    return _lowered(pack, low, time_of, try_for, splits)


def evener_rows(work: Work, room: Room, pack: IntArray, low: int, splits: Effort) -> IntArray | None:
    """With microbatches, that take as long as their costliest pack, quicker in all; `low` is without fixed costs.

    Each is to lose the same part of what it costs above its costliest sequence.
    """
    num_ranks, num_microbatches = room.num_ranks, room.num_microbatches

    def rows_of(pack: IntArray) -> IntArray:
        rows: IntArray = work.pack_costs(pack, num_ranks, num_microbatches).max(axis=0) - work.fixed
        return rows

    def try_for(pack: IntArray, time: int) -> Repartition:
        rows, costliest = rows_of(pack), np.zeros(num_microbatches, np.int64)
        np.maximum.at(costliest, pack % num_microbatches, work.cost)
        above = rows - costliest
        too_much, all_above = int(rows.sum()) - time, int(above.sum())
        if 10 * too_much >= 9 * all_above:
            return Repartition(None, 0)
        limits = rows - np.array([-(-part * too_much // all_above) for part in above.tolist()])
        limit = int(limits.max())
        found = repartition(
            *(work.cost, work.length, pack),
            num_ranks=num_ranks * num_microbatches,
            capacity=room.capacity,
            limit=limit,
            loads=np.tile(limit - limits, num_ranks),
            budget=_SPLITS_OF_ROWS * work.cost.size,
        )
        return found if found.pack is None else found._replace(pack=in_rows(work, room, found.pack))

    return _lowered(in_rows(work, room, pack), low, lambda pack: int(rows_of(pack).sum()), try_for, splits)


def _lowered(
    pack: IntArray,
    low: int,
    time_of: Callable[[IntArray], int],
    try_for: Callable[[IntArray, int], Repartition],
    splits: Effort,
) -> IntArray | None:
    """By bisection between `low` and the time of the best that has been found; an attempt without splits is free."""
    best, high, failures = None, time_of(pack), 0
    while high - low > low // _FINEST_BISECTION and failures < _MOST_FAILURES and splits.spend(0):
        time = (low + high) // 2
        found = try_for(pack, time)
        splits.spend(found.num_splits)
        if found.pack is None:
            low, failures = time + 1, failures + (found.num_splits > 0)
        else:
            best = pack = found.pack
            high = time_of(pack)
    return best
