"""pure. Placements made evener where packs are so full that sequences can't be traded one by one: see `repartition`,
and `anneal` for rows.

Each function lowers the time of a placement (int64 [N], rank * num_microbatches + microbatch) towards `low`, which no
placement is below, and gives None where it finds nothing better; of packs, none is above capacity.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.packing.scheduling.anneal import anneal
from megatron.packing.scheduling.even import Effort, Room
from megatron.packing.scheduling.even_rows import in_rows
from megatron.packing.scheduling.repartition import Repartition, repartition
from megatron.packing.scheduling.work import Work

IntArray = npt.NDArray[np.int64]


class _Pace(NamedTuple):
    """How a placement is made evener step by step."""

    step: int
    """Such a part of the way to `low` is gone at once: what allows no more is left soon."""
    splits: int
    """For each sequence, to reach one lower time."""
    most_splits: int
    """In all, where so many did not reach it but much is to gain: then ever more are tried."""


_PACE_OF_RANKS, _PACE_OF_ROWS = _Pace(16, 2000, 1 << 23), _Pace(8, 500, 0)
_MUCH, _MORE_SPLITS = 100, 4
"""Such a part of the time is much; so many times the splits are tried then."""
_FINEST = 2048
"""Nothing is tried where the way is such a part of the time or less."""


def evener_ranks(work: Work, room: Room, pack: IntArray, low: int, splits: Effort) -> IntArray | None:
    """With the costliest rank cheaper; `low` is a rank's cost without fixed costs."""
    shape = room.num_ranks, room.num_microbatches

    def time_of(pack: IntArray) -> int:
        return int((work.pack_costs(pack, *shape) - work.fixed).sum(axis=1).max())

    def try_for(pack: IntArray, time: int, budget: int) -> Repartition:
        return repartition(
            *(work.cost, work.length, pack),
            num_ranks=room.num_ranks,
            packs_per_rank=room.num_microbatches,
            capacity=room.capacity,
            limit=time,
            budget=budget,
        )

    return _lowered(pack, low, time_of, try_for, splits, _PACE_OF_RANKS)


def annealed_rows(work: Work, room: Room, pack: IntArray, enough: int, steps: int) -> IntArray | None:
    """With microbatches, each of which takes as long as its costliest pack, quicker in all: in so many steps of
    annealing, or until they take `enough` or less; times are without fixed costs.
    """
    found = anneal(
        *(work.cost, work.length, pack),
        num_ranks=room.num_ranks,
        num_rows=room.num_microbatches,
        capacity=room.capacity,
        enough=enough,
        steps=steps,
    )
    return None if np.array_equal(found, pack) else in_rows(work, room, found)


def evener_rows(work: Work, room: Room, pack: IntArray, low: int, splits: Effort) -> IntArray | None:
    """With microbatches, that take as long as their costliest pack, quicker in all; `low` is without fixed costs.

    Each is to lose the same part of what it costs above its costliest sequence.
    """
    num_ranks, num_microbatches = room.num_ranks, room.num_microbatches

    def rows_of(pack: IntArray) -> IntArray:
        rows: IntArray = work.pack_costs(pack, num_ranks, num_microbatches).max(axis=0) - work.fixed
        return rows

    def try_for(pack: IntArray, time: int, budget: int) -> Repartition:
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
            budget=budget,
        )
        return found if found.pack is None else found._replace(pack=in_rows(work, room, found.pack))

    pack = in_rows(work, room, pack)
    return _lowered(pack, low, lambda pack: int(rows_of(pack).sum()), try_for, splits, _PACE_OF_ROWS)


def _lowered(
    pack: IntArray,
    low: int,
    time_of: Callable[[IntArray], int],
    try_for: Callable[[IntArray, int, int], Repartition],
    splits: Effort,
    pace: _Pace,
) -> IntArray | None:
    """Step by step until one fails; steps that were not tried, for no splits were looked at, become shorter."""
    best, high, lowest, budget = None, time_of(pack), low, pace.splits * pack.size
    while high - low > low // _FINEST and splits.spend(0):
        time = high - -(-(high - low) // pace.step)
        found = try_for(pack, time, budget)
        splits.spend(found.num_splits)
        if found.pack is not None:
            best = pack = found.pack
            high = time_of(pack)
        elif not found.num_splits:
            low = time + 1
        elif high - lowest > lowest // _MUCH and _MORE_SPLITS * budget <= pace.most_splits:
            budget *= _MORE_SPLITS
        else:
            break
    return best
