"""pure. Among placements that are as good, one that moves fewer tokens between data-parallel ranks.

Where ranks meet only at the end of a step, each rank first keeps sequences that it drew itself, up to what the
costliest rank of the schedule may hold; only the rest is spread. Whole sets of packs may trade ranks in every case.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megatron.packing.scheduling import compiled
from megatron.packing.scheduling.placement import Packs, largest_rank, spread, trade
from megatron.packing.scheduling.problem import ScheduleRequest, sorted_order

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

_KEPT_FREE = (0, 1 / 256, 1 / 64, 1 / 32, 1 / 16)
"""Parts of the costliest rank's cost that ranks leave free for what the others can't keep."""
_MANY = 1 << 14
"""Sequences, of more of which only the last of those is tried."""
_PAIRS = 8
"""Pairs of ranks per rank, those that share the most, of which some become one."""
_FEW_SHARED = 8
"""Times as many pairs as sequences, with which hardly two sequences share a pair."""


def tokens_moved(length: IntArray, source: IntArray, rank: IntArray) -> int:
    """Tokens that leave the rank that drew them."""
    return int(length[source != rank].sum())


def stay_home(request: ScheduleRequest, pack: IntArray, packs: Packs, good_enough: float) -> IntArray:
    """A placement (of sequences, the longest first) that takes no more time than `pack` does, or `good_enough` on the
    costliest rank without fixed costs, and moves no more tokens.
    """
    order, length, cost = request.sorted
    source = np.ascontiguousarray(request.source_rank[order])
    if not request.model.ranks_meet and request.model.num_stages == 1:
        limit = largest_rank(cost, pack, packs)
        kept = _kept(length, cost, source, packs, limit, max(good_enough, limit))
        if kept is not None and _moved(length, source, kept, packs) < _moved(length, source, pack, packs):
            return kept
    renamed = _renamed(length, source, pack, packs, request.model.ranks_meet)
    return min(renamed, pack, key=lambda way: _moved(length, source, way, packs))


def _moved(length: IntArray, source: IntArray, pack: IntArray, packs: Packs) -> int:
    return tokens_moved(length, source, pack // packs.num_microbatches)


def _kept(
    length: IntArray, cost: FloatArray, source: IntArray, packs: Packs, limit: float, allowed: float
) -> IntArray | None:
    """A placement where ranks keep what they drew, up to about a cost of `limit`, and none costs above `allowed`."""
    if compiled.CORE is None:
        return None
    for part in _KEPT_FREE if length.size <= _MANY else _KEPT_FREE[-1:]:
        kept = np.empty(length.size, np.int64)
        compiled.CORE.call("keep", length.size, cost, length, source, *packs, limit * (1 - part), kept)
        pack = spread(length, cost, packs, begun=kept)
        if pack is not None and largest_rank(cost, pack, packs) > allowed:
            pack = trade(length, cost, pack, packs, budget=100_000)
        if pack is not None and largest_rank(cost, pack, packs) <= allowed:
            return pack
    return None


def _renamed(length: IntArray, source: IntArray, pack: IntArray, packs: Packs, ranks_meet: bool) -> IntArray:
    """Ranks renamed, in each microbatch anew where they meet, so that many tokens are where they were drawn."""
    number = packs.num_microbatches
    rank = pack // number
    microbatch = pack - rank * number
    first = microbatch * packs.num_ranks if ranks_meet else np.zeros_like(rank)
    place = _match(first + rank, first + source, length, packs.num_ranks * (number if ranks_meet else 1))
    return place[first + rank] % packs.num_ranks * number + microbatch


def _match(part: IntArray, place: IntArray, weight: IntArray, size: int) -> IntArray:
    """A place of its own for each part, [size]: pairs that share more weight come first, then what is left, in order.

    Weight [N], descending, is what `part` and `place` [N] share.
    """
    parts, places = part, place
    if weight.size > size * size // _FEW_SHARED:
        pairs = part * size + place
        by_pair = sorted_order(pairs)
        pairs = pairs[by_pair]
        first = np.flatnonzero(np.diff(pairs, prepend=-1))
        shared = np.add.reduceat(weight[by_pair], first)
        parts, places = np.divmod(pairs[first][sorted_order(-shared)[: _PAIRS * size]], size)
    place_of = np.full(size, -1, np.int64)
    if compiled.CORE is not None:
        compiled.CORE.call("match", parts.size, parts, places, size, place_of)
        return place_of
    free = dict.fromkeys(range(size))
    for one, other in zip(parts.tolist(), places.tolist()):
        if place_of[one] < 0 and other in free:
            place_of[one] = other
            del free[other]
    place_of[place_of < 0] = list(free)
    return place_of
