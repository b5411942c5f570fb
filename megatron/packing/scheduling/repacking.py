"""pure. Placements made over: their packs dealt to ranks, ranks split into other packs, packs and ranks renamed.

Each function exists twice: in C++ (see `native`) and with numpy. The two give equal results.

All arrays are int64. Sequences come in descending order of cost; pack numbers are rank * num_microbatches + microbatch.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from megatron.packing.scheduling import loops, native
from megatron.packing.scheduling.native import address as _at
from megatron.packing.scheduling.work import pack_costs, stable_order

IntArray = npt.NDArray[np.int64]


def fill_empty(pack: IntArray, num_packs: int) -> None:
    """Move the shortest sequences that share a pack to packs that have none, in place, if there are as many."""
    if pack.size < num_packs:
        return
    if native.LIBRARY is not None:
        native.LIBRARY.fill_empty(pack.size, num_packs, _at(pack))
        return
    counts = np.bincount(pack, minlength=num_packs)
    empty = np.flatnonzero(counts == 0).tolist()
    for sequence in range(pack.size - 1, -1, -1):
        if not empty:
            return
        if counts[pack[sequence]] > 1:
            counts[pack[sequence]] -= 1
            pack[sequence] = empty.pop()


def deal(cost: IntArray, pack: IntArray, num_ranks: int, num_microbatches: int) -> IntArray:
    """Whole packs dealt to ranks of even cost: the placement of their sequences, [N]."""
    if native.LIBRARY is not None:
        dealt = np.empty_like(pack)
        native.LIBRARY.deal(cost.size, _at(cost), _at(pack), num_ranks, num_microbatches, _at(dealt))
        return dealt
    costs = pack_costs(cost, pack, num_ranks * num_microbatches)
    by_cost = stable_order(-costs)
    ones = np.ones(by_cost.size, np.int64)
    rank = loops.spread(costs[by_cost], ones, num_ranks, 1, num_microbatches, None, None)
    assert rank is not None, "as many places as packs"
    by_rank = stable_order(rank)
    place = np.empty_like(rank)
    place[by_cost[by_rank]] = np.arange(rank.size)  # each rank has num_microbatches of them
    return place[pack]


def split_ranks(
    cost: IntArray,
    length: IntArray,
    pack: IntArray,
    *,
    num_ranks: int,
    capacity: int,
    weights: IntArray,
    only_where_lower: bool = False,
) -> IntArray:
    """Each rank's sequences split anew, into packs in proportion to `weights` [M]: the placement, [N].

    Ranks for which capacity is too tight stay as they were; with `only_where_lower` so do those whose costliest pack
    would not cost less.
    """
    other, num_packs = pack.copy(), weights.size
    if native.LIBRARY is not None:
        native.LIBRARY.split_ranks(
            *(cost.size, _at(cost), _at(length), _at(pack), num_ranks, num_packs),
            *(capacity, _at(weights), only_where_lower, _at(other)),
        )
        return other
    total_weight, heaviest = int(weights.sum()), int(weights.max())
    rank = pack // num_packs
    by_rank = stable_order(rank)
    for start, end in pairwise(np.searchsorted(rank[by_rank], np.arange(num_ranks + 1)).tolist()):
        mine = by_rank[start:end]
        loads = (heaviest - weights) * (int(cost[mine].sum()) // total_weight)
        position = loops.spread(cost[mine], length[mine], num_packs, 1, capacity, loads, None)
        if position is None or mine.size == 0:
            continue
        before = pack_costs(cost[mine], pack[mine] % num_packs, num_packs)
        if not only_where_lower or pack_costs(cost[mine], position, num_packs).max() < before.max():
            other[mine] = rank[mine] * num_packs + position
    return other


def place_by_cost(costs: IntArray, order: IntArray) -> IntArray:
    """Where each pack goes, [ranks, M] as `costs`: the costliest of each rank to order[0], the next to order[1] ..."""
    place = np.empty_like(costs)
    if native.LIBRARY is not None:
        native.LIBRARY.place_by_cost(*costs.shape, _at(costs), _at(order), _at(place))
        return place
    by_cost = np.argsort(-costs, axis=1, kind="stable")
    np.put_along_axis(place, by_cost, np.broadcast_to(order, costs.shape), axis=1)
    return place


def renumber(pack: IntArray, place: IntArray) -> IntArray:
    """`pack` with the microbatches of each rank renamed by `place` [ranks, M]."""
    num_ranks, num_microbatches = place.shape
    return (np.arange(num_ranks)[:, None] * num_microbatches + place).ravel()[pack]


def match(part: IntArray, place: IntArray, weight: IntArray, size: int, most_pairs: int) -> IntArray:
    """A place of its own for each part, [size]: of the `most_pairs` pairs that share the most weight in all, those that
    share more first; then what is left, both in order. Weight [N] is what `part` and `place` [N] share.
    """
    bits = 2 * max(size - 1, 0).bit_length() + int(weight.sum()).bit_length()
    if native.LIBRARY is not None and bits <= 64:
        place_of = np.empty(size, np.int64)
        native.LIBRARY.match(part.size, _at(part), _at(place), _at(weight), size, most_pairs, _at(place_of))
        return place_of
    pairs = part * size + place
    order = stable_order(pairs)
    pairs = pairs[order]
    first = np.flatnonzero(np.diff(pairs, prepend=-1))
    pairs, shared = pairs[first], np.add.reduceat(weight[order], first) if first.size else weight
    pairs = pairs[stable_order(-shared)[:most_pairs]]
    place_of = np.full(size, -1, np.int64)
    is_taken = np.zeros(size, np.bool_)
    while pairs.size:
        parts, places = np.divmod(pairs, size)
        index = np.arange(pairs.size)
        first_of_part, first_of_place = np.full(size, pairs.size), np.full(size, pairs.size)
        np.minimum.at(first_of_part, parts, index)
        np.minimum.at(first_of_place, places, index)
        # A pair that is the best of both its part and its place is what taking the best pair again and again finds.
        best = (first_of_part[parts] == index) & (first_of_place[places] == index)
        place_of[parts[best]] = places[best]
        is_taken[places[best]] = True
        pairs = pairs[(place_of[parts] < 0) & ~is_taken[places]]
    place_of[place_of < 0] = np.flatnonzero(~is_taken)
    return place_of
