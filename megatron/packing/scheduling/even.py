"""pure. Ways to place sequences evenly for a given number of microbatches: ranks and packs; see `even_rows` where ranks
meet and `even_pipelines`.

A placement is int64 [N] in the order of the Work, rank * num_microbatches + microbatch of each sequence; no pack is
over capacity. Functions that try several ways yield each, for the caller to take the quickest, and None after each
attempt that failed, for the caller to turn to something else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

from megatron.packing.scheduling.placement import first_fit, spread, spread_rest, trade
from megatron.packing.scheduling.work import Work, pack_costs

IntArray = npt.NDArray[np.int64]

_MAX_BISECTIONS = 8
_FINEST_BISECTION = 2048
"""Bisection ends at this part of a cost."""
_HEAD = 8
"""Sequences per rank, the costliest, that bisection is about."""


Tight = Callable[[], IntArray | None]
"""A placement of as few packs as can be found; None where they are more than there is room for."""


class Effort:
    """How much more may be tried: counted in sequences placed, so that it is the same on every machine."""

    def __init__(self, num_sequences: int) -> None:
        self._left = num_sequences

    def part(self, divisor: int) -> Effort:
        """A part of what is left, taken from it."""
        part = Effort(self._left // divisor)
        self._left -= part._left
        return part

    def spend(self, num_sequences: int) -> bool:
        """Whether so many may still be placed; counts them."""
        self._left -= num_sequences
        return self._left >= 0


@dataclass(frozen=True, kw_only=True)
class Room:
    """Where sequences may go."""

    num_ranks: int
    num_microbatches: int
    capacity: int
    effort: Effort = field(repr=False)


def even_ranks(work: Work, room: Room, tight: Tight) -> Iterator[IntArray | None]:
    """Ranks of even cost; from `tight` where capacity is too tight for other ways."""
    pack = spread(
        *(work.cost, work.length),
        num_ranks=room.num_ranks,
        packs_per_rank=room.num_microbatches,
        capacity=room.capacity,
    )
    first = tight() if pack is None else pack
    if first is None:
        return
    yield first
    yield _traded(work, room, first)
    last = first
    for pack in _bisected(
        *(work.cost, work.length, _largest(work.cost, first // room.num_microbatches)),
        num_ranks=room.num_ranks,
        packs_per_rank=room.num_microbatches,
        capacity=room.capacity,
        effort=room.effort,
    ):
        last = last if pack is None else pack
        yield pack
    if last is not first:
        yield _traded(work, room, last)


def _traded(work: Work, room: Room, pack: IntArray) -> IntArray:
    """The same with ranks of uneven cost having traded sequences."""
    pack = pack.copy()
    trade(
        *(work.cost, work.length, pack),
        num_ranks=room.num_ranks,
        packs_per_rank=room.num_microbatches,
        capacity=room.capacity,
    )
    return pack


def _bisected(
    cost: IntArray,
    length: IntArray,
    high: int,
    *,
    num_ranks: int,
    packs_per_rank: int,
    capacity: int,
    effort: Effort,
) -> Iterator[IntArray | None]:
    """Placements whose costliest rank is ever cheaper, all below `high`.

    The sequences that make ranks uneven, the costliest, go to the first rank that they fit in at the cost that is
    tried; the others are spread over what they leave.
    """
    low = max(-(-int(cost.sum()) // num_ranks), int(cost[0]))
    head = min(cost.size, _HEAD * num_ranks)
    head = cost.size if 2 * head > cost.size else head
    first_fits = partial(first_fit, num_ranks=num_ranks, packs_per_rank=packs_per_rank, capacity=capacity)
    spreads = partial(spread_rest, num_ranks=num_ranks, packs_per_rank=packs_per_rank, capacity=capacity)
    tail = np.full(cost.size - head, -1, np.int64)
    for _ in range(_MAX_BISECTIONS):
        if high - low <= low // _FINEST_BISECTION or not effort.spend((head + cost.size) // 2):
            return
        limit = (low + high) // 2
        pack, _ = first_fits(cost[:head], length[:head], limit=limit)
        largest = None
        if pack.min() >= 0:
            pack = np.concatenate((pack, tail))
            largest = spreads(cost, length, pack)
        if largest is None or largest >= high:
            low = limit + 1
            yield None
        else:
            high = largest
            yield pack


def evener_packs(
    cost: IntArray, length: IntArray, best: IntArray | None, num_packs: int, capacity: int, effort: Effort
) -> IntArray | None:
    """Packs of even cost, the costliest no costlier than in `best`: the number of each sequence's; None where capacity
    is too tight.
    """
    fair = max(-(-int(cost.sum()) // num_packs), int(cost[0]))
    high = 2 * fair if best is None else _largest(cost, best)
    for pack in _bisected(cost, length, high, num_ranks=num_packs, packs_per_rank=1, capacity=capacity, effort=effort):
        best = best if pack is None else pack
    return best


def _largest(cost: IntArray, part: IntArray) -> int:
    """Cost of the costliest part."""
    return int(pack_costs(cost, part, int(part.max()) + 1).max())
