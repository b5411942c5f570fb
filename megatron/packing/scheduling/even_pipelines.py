"""pure. Ways to place sequences so that pipelines take even time, for a given number of microbatches; see `even`.

A rank's pipeline takes the sum of its packs and, for each further stage, its costliest pack once more. So a sequence
that costs more than a fair pack takes its rank's time several times over: such sequences gather on as few ranks as hold
them, and the others make packs of even cost on the other ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from megatron.packing.scheduling.even import Room, Tight, evener_packs
from megatron.packing.scheduling.placement import first_fit, spread, spread_rest
from megatron.packing.scheduling.repacking import deal, split_ranks
from megatron.packing.scheduling.step_time import StepModel
from megatron.packing.scheduling.work import Work

IntArray = npt.NDArray[np.int64]

_MAX_BISECTIONS = 8
_FINEST_BISECTION = 2048
"""Bisection ends at this part of a time."""


def even_pipelines(work: Work, room: Room, tight: Tight, num_stages: int, low: int) -> Iterator[IntArray | None]:
    """Pipelines of even time, which takes `low` at the least; `tight` as in `even_ranks`."""
    fixed = work.fixed * (room.num_microbatches + num_stages - 1)
    num_packs = room.num_ranks * room.num_microbatches
    low -= fixed
    high: int | None = None

    def gathered(time: int) -> IntArray | None:
        found = _costliest_gathered(work, room, num_stages - 1, time)
        return None if found is None else _resplit(work, found, room)

    def time_of(pack: IntArray) -> int:
        costs = work.pack_costs(pack, room.num_ranks, room.num_microbatches)
        return StepModel(num_stages=num_stages).time_of(costs) - fixed

    pack = gathered(low + (low >> 4))
    if pack is not None:
        high = time_of(pack)
        yield pack
    packs = spread(work.cost, work.length, num_ranks=num_packs, capacity=room.capacity)
    pack = tight() if packs is None else deal(work.cost, packs, room.num_ranks, room.num_microbatches)
    if pack is not None:
        pack = _resplit(work, pack, room)
        high = time_of(pack) if high is None else min(high, time_of(pack))
        yield pack
    if high is None:
        return
    if int(work.cost[0]) * (room.num_microbatches + num_stages - 1) > low:
        pack = _costliest_first(work, room, num_stages - 1, low)
        if pack is not None:
            high = min(high, time_of(pack))
            yield pack
    for _ in range(_MAX_BISECTIONS):
        if high - low <= low // _FINEST_BISECTION or not room.effort.spend(2 * work.cost.size):
            break
        time = (low + high) // 2
        pack = gathered(time)
        if pack is None:
            low = time + 1
        else:
            high = min(time, time_of(pack))
            yield pack
    packs = evener_packs(work.cost, work.length, packs, num_packs, room.capacity, room.effort)
    if packs is not None:
        yield _resplit(work, deal(work.cost, packs, room.num_ranks, room.num_microbatches), room)


def _costliest_first(work: Work, room: Room, more: int, time: int) -> IntArray | None:
    """Pipelines of `more` + 1 stages that each end after about `time`, or somewhat more: sequences that cost more than
    a fair pack on as few ranks as hold them, the others spread over what that leaves of all ranks' time.
    """
    num_ranks, num_microbatches = room.num_ranks, room.num_microbatches
    low, high = time, 2 * time
    best = None
    for _ in range(_MAX_BISECTIONS):
        limit = low if best is None and low == time else (low + high) // 2
        fair_pack = limit // (num_microbatches + more)
        head = int(np.searchsorted(-work.cost, -fair_pack))
        pack, _ = first_fit(
            *(work.cost[:head], work.length[:head]),
            limit=fair_pack * num_microbatches,
            ceiling=limit,
            overhead=more,
            num_ranks=num_ranks,
            packs_per_rank=num_microbatches,
            capacity=room.capacity,
        )
        if pack.min(initial=0) < 0:
            low = limit + 1
        else:
            best, high = (pack, head, fair_pack), limit
        if high - low <= low >> 7:
            break
    if best is None:
        return None
    pack, head, fair_pack = best
    costliest = np.full(num_ranks, fair_pack, np.int64)
    np.maximum.at(costliest, pack // num_microbatches, work.cost[:head])
    pack = np.concatenate((pack, np.full(work.cost.size - head, -1, np.int64)))
    found = spread_rest(
        *(work.cost, work.length, pack),
        num_ranks=num_ranks,
        packs_per_rank=num_microbatches,
        capacity=room.capacity,
        loads=more * costliest,
    )
    return None if found is None else _resplit(work, pack, room)


def _costliest_gathered(work: Work, room: Room, more: int, time: int) -> IntArray | None:
    """Pipelines of `more` + 1 stages that each end within about `time`: the costliest sequences on the first ranks,
    even packs on the others.
    """
    num_microbatches = room.num_microbatches
    pack, in_use = first_fit(
        *(work.cost, work.length),
        num_ranks=room.num_ranks,
        packs_per_rank=num_microbatches,
        capacity=room.capacity,
        limit=time * num_microbatches // (num_microbatches + more),
        ceiling=time,
        overhead=more,
        opens_above=time // (num_microbatches + more),  # costlier than a fair pack
    )
    rest = np.flatnonzero(pack < 0)
    if rest.size == 0:
        return pack
    if in_use == room.num_ranks:
        return None
    cost, length = work.cost[rest], work.length[rest]
    limit = (time - -(-int(cost.sum()) // (room.num_ranks - in_use))) // more
    if limit < cost[0]:
        return None
    num_packs = (room.num_ranks - in_use) * num_microbatches
    even, _ = first_fit(cost, length, num_ranks=num_packs, capacity=room.capacity, limit=limit)
    if even.min() < 0:
        return None
    pack[rest] = in_use * num_microbatches + deal(cost, even, room.num_ranks - in_use, num_microbatches)
    return pack


def _resplit(work: Work, pack: IntArray, room: Room) -> IntArray:
    """Each rank's sequences split anew into even packs, where that lowers its costliest pack."""
    return split_ranks(
        *(work.cost, work.length, pack),
        num_ranks=room.num_ranks,
        capacity=room.capacity,
        weights=np.ones(room.num_microbatches, np.int64),
        only_where_lower=True,
    )
