"""pure. The inner loops of schedulers: put sequences, one after the other, on ranks and into packs with room.

Each function exists twice, see `native`: in C++ and here in Python.

All arrays are int64. Sequences come in descending order of cost, which is the descending order of length as well; pack
numbers are rank * packs_per_rank + position. A sequence goes to the pack of its rank that has the fewest tokens.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from heapq import heapify, heappop, heappush, heapreplace, nsmallest
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from megatron.packing.scheduling.native import LIBRARY as _compiled
from megatron.packing.scheduling.native import address as _at

IntArray = npt.NDArray[np.int64]


def spread(
    cost: IntArray,
    length: IntArray,
    *,
    num_ranks: int,
    packs_per_rank: int = 1,
    capacity: int,
    loads: IntArray | None = None,
    tokens: IntArray | None = None,
) -> IntArray | None:
    """Each sequence to the rank of the least cost among those with room (Graham's LPT rule, 1969): its pack, [N].

    Ranks start with `loads` [num_ranks] and their packs with `tokens` [num_ranks * packs_per_rank], zeros unless
    given. None where a sequence finds no room. O(N log N): a rank without room waits until sequences are short enough
    for its emptiest pack; it then takes one for sure, so that it waits at most once per sequence it takes.
    """
    if _compiled is None:
        return _spread(cost, length, num_ranks, packs_per_rank, capacity, loads, tokens)
    pack = np.empty(cost.size, np.int64)
    found = _compiled.spread(
        cost.size, _at(cost), _at(length), num_ranks, packs_per_rank, capacity, _at(loads), _at(tokens), _at(pack)
    )
    return pack if found else None


def split(
    starts: IntArray, cost: IntArray, length: IntArray, *, capacity: int, weights: IntArray
) -> tuple[IntArray, int]:
    """The sequences of each rank, `starts[rank]` to `starts[rank + 1]`, over packs in proportion to `weights` [M].

    Returns the position of each sequence's pack in its rank, -1 for those of a rank where one found no room; and the
    number of such ranks.
    """
    position = np.empty(cost.size, np.int64)
    num_ranks, num_packs = starts.size - 1, weights.size
    if _compiled is not None:
        failed = _compiled.split(
            num_ranks, _at(starts), _at(cost), _at(length), num_packs, capacity, _at(weights), _at(position)
        )
        return position, failed
    failed = 0
    total_weight, heaviest = int(weights.sum()), int(weights.max())
    for start, end in pairwise(starts.tolist()):
        loads = (heaviest - weights) * (int(cost[start:end].sum()) // total_weight)
        found = _spread(cost[start:end], length[start:end], num_packs, 1, capacity, loads, None)
        position[start:end] = -1 if found is None else found
        failed += found is None
    return position, failed


def first_fit(
    cost: IntArray,
    length: IntArray,
    *,
    num_ranks: int,
    packs_per_rank: int = 1,
    capacity: int,
    limit: int,
    ceiling: int | None = None,
    overhead: int = 0,
    opens_above: int = -1,
) -> tuple[IntArray, int]:
    """Each sequence to the first rank with room for its cost and tokens: its pack [N], -1 without room; ranks in use.

    A rank may hold a cost of `limit`, and of at most `ceiling - overhead * cost of its first sequence`, which is its
    costliest. Only sequences above `opens_above` take a rank into use. O(N log num_ranks), as a rule.
    """
    ceiling = limit if ceiling is None else ceiling
    if _compiled is None:
        return _first_fit(cost, length, num_ranks, packs_per_rank, capacity, limit, ceiling, overhead, opens_above)
    pack = np.empty(cost.size, np.int64)
    in_use = _compiled.first_fit(
        *(cost.size, _at(cost), _at(length), num_ranks, packs_per_rank, capacity),
        *(limit, ceiling, overhead, opens_above, _at(pack)),
    )
    return pack, in_use


def best_fit(length: IntArray, *, capacity: int) -> tuple[IntArray, int]:
    """Each sequence to the fullest pack with room, else to a new one (best-fit decreasing): its pack [N]; packs."""
    if _compiled is None:
        return _best_fit(length, capacity)
    pack = np.empty(length.size, np.int64)
    return pack, _compiled.best_fit(length.size, _at(length), capacity, _at(pack))


def keep(
    cost: IntArray,
    length: IntArray,
    home: IntArray,
    *,
    num_ranks: int,
    packs_per_rank: int,
    capacity: int,
    limit: int,
) -> IntArray:
    """Each sequence to its own rank, `home` [N], while that has room up to a cost of `limit`; -1 for the others."""
    pack = np.empty(cost.size, np.int64)
    if _compiled is None:
        return _keep(cost, length, home, num_ranks, packs_per_rank, capacity, limit)
    _compiled.keep(cost.size, _at(cost), _at(length), _at(home), num_ranks, packs_per_rank, capacity, limit, _at(pack))
    return pack


def trade(
    cost: IntArray,
    length: IntArray,
    pack: IntArray,
    *,
    num_ranks: int,
    packs_per_rank: int,
    capacity: int,
    partners: int = 8,
    traded: int = 24,
    budget: int = 200_000,
) -> None:
    """Lower the cost of the costliest rank, in place: it gives a sequence to one of the `partners` cheapest ranks (if
    that does not help, to any), or trades one for another, whatever lowers the higher cost of the two most; again and
    again, until nothing does or `budget` pairs of sequences have been looked at. Each rank offers `traded` sequences of
    all costs. No pack that holds a sequence is left empty.
    """
    if _compiled is None:
        _trade(cost, length, pack, num_ranks, packs_per_rank, capacity, partners, traded, budget)
    else:
        _compiled.trade(
            *(
                cost.size,
                _at(cost),
                _at(length),
                num_ranks,
                packs_per_rank,
                capacity,
                partners,
                traded,
                budget,
                _at(pack),
            )
        )


class _Packs:
    """The packs of all ranks; of each rank the emptiest is at hand."""

    def __init__(self, num_ranks: int, packs_per_rank: int, tokens: IntArray | None) -> None:
        held = [0] * (num_ranks * packs_per_rank) if tokens is None else tokens.tolist()
        numbered = list(zip(held, range(len(held))))
        self.of_rank = [numbered[i * packs_per_rank : (i + 1) * packs_per_rank] for i in range(num_ranks)]
        for heap in self.of_rank if tokens is not None else ():
            heapify(heap)

    def least(self, rank: int) -> int:
        return self.of_rank[rank][0][0]

    def add(self, rank: int, length: int) -> int:
        heap = self.of_rank[rank]
        tokens, pack = heap[0]
        heapreplace(heap, (tokens + length, pack))
        return pack


def _spread(
    cost: IntArray,
    length: IntArray,
    num_ranks: int,
    packs_per_rank: int,
    capacity: int,
    loads: IntArray | None,
    tokens: IntArray | None,
) -> IntArray | None:
    packs = _Packs(num_ranks, packs_per_rank, tokens)
    of_rank = packs.of_rank
    cheapest = list(zip([0] * num_ranks if loads is None else loads.tolist(), range(num_ranks)))
    heapify(cheapest)
    waiting: list[tuple[int, int, int]] = []  # tokens of its emptiest pack, cost, rank
    placed = []
    for sequence_cost, sequence_length in zip(cost.tolist(), length.tolist()):
        most = capacity - sequence_length
        while waiting and waiting[0][0] <= most:
            heappush(cheapest, heappop(waiting)[1:])
        while cheapest and of_rank[cheapest[0][1]][0][0] > most:
            load, rank = heappop(cheapest)
            heappush(waiting, (packs.least(rank), load, rank))
        if not cheapest:
            return None
        load, rank = cheapest[0]
        heapreplace(cheapest, (load + sequence_cost, rank))
        placed.append(packs.add(rank, sequence_length))
    return np.array(placed, np.int64)


class _Rooms:
    """Rooms of the ranks in use, in cost and in tokens; finds the first with room for both: a tree of maxima."""

    def __init__(self, num_ranks: int) -> None:
        self.size = 1
        while self.size < num_ranks:
            self.size *= 2
        self.cost = [-1] * (2 * self.size)
        self.tokens = [-1] * (2 * self.size)

    def first(self, cost: int, tokens: int) -> int:
        node = 1
        while True:
            if self.cost[node] >= cost and self.tokens[node] >= tokens:
                if node >= self.size:
                    return node - self.size
                node *= 2
            else:
                while node & 1:
                    if node == 1:
                        return -1
                    node //= 2
                node += 1

    def set(self, rank: int, cost: int, tokens: int) -> None:
        node = self.size + rank
        self.cost[node], self.tokens[node] = cost, tokens
        node //= 2
        while node:
            most = (
                max(self.cost[2 * node], self.cost[2 * node + 1]),
                max(self.tokens[2 * node], self.tokens[2 * node + 1]),
            )
            if most == (self.cost[node], self.tokens[node]):
                return
            self.cost[node], self.tokens[node] = most
            node //= 2


def _first_fit(
    cost: IntArray,
    length: IntArray,
    num_ranks: int,
    packs_per_rank: int,
    capacity: int,
    limit: int,
    ceiling: int,
    overhead: int,
    opens_above: int,
) -> tuple[IntArray, int]:
    packs, rooms, in_use = _Packs(num_ranks, packs_per_rank, None), _Rooms(num_ranks), 0
    placed = []
    for sequence_cost, sequence_length in zip(cost.tolist(), length.tolist()):
        rank = rooms.first(sequence_cost, sequence_length)
        if rank >= 0:
            room = rooms.cost[rooms.size + rank]
        else:
            room = min(limit, ceiling - overhead * sequence_cost)
            is_shut = in_use == num_ranks or sequence_cost <= opens_above
            if is_shut or room < sequence_cost or capacity < sequence_length:
                placed.append(-1)
                continue
            rank, in_use = in_use, in_use + 1
        placed.append(packs.add(rank, sequence_length))
        rooms.set(rank, room - sequence_cost, capacity - packs.least(rank))
    return np.array(placed, np.int64), in_use


def _best_fit(length: IntArray, capacity: int) -> tuple[IntArray, int]:
    rooms: list[tuple[int, int]] = []  # room of a pack, its number; ascending
    placed = []
    for tokens in length.tolist():
        at = bisect_left(rooms, (tokens, 0))
        room, pack = rooms.pop(at) if at < len(rooms) else (capacity, len(rooms))
        insort(rooms, (room - tokens, pack))
        placed.append(pack)
    return np.array(placed, np.int64), len(rooms)


def _keep(
    cost: IntArray,
    length: IntArray,
    home: IntArray,
    num_ranks: int,
    packs_per_rank: int,
    capacity: int,
    limit: int,
) -> IntArray:
    packs, loads = _Packs(num_ranks, packs_per_rank, None), [0] * num_ranks
    placed = []
    for sequence_cost, sequence_length, rank in zip(cost.tolist(), length.tolist(), home.tolist()):
        if loads[rank] + sequence_cost > limit or packs.least(rank) + sequence_length > capacity:
            placed.append(-1)
        else:
            loads[rank] += sequence_cost
            placed.append(packs.add(rank, sequence_length))
    return np.array(placed, np.int64)


def _trade(
    cost: IntArray,
    length: IntArray,
    pack: IntArray,
    num_ranks: int,
    packs_per_rank: int,
    capacity: int,
    partners: int,
    traded: int,
    budget: int,
) -> None:
    costs, lengths, packs = cost.tolist(), length.tolist(), pack.tolist()
    held: list[list[int]] = [[] for _ in range(num_ranks)]
    loads, tokens, counts = [0] * num_ranks, [0] * num_ranks * packs_per_rank, [0] * num_ranks * packs_per_rank

    def hand_over(i: int, source: int, target: int, target_pack: int) -> None:
        held[source].remove(i)
        insort(held[target], i)
        loads[source] -= costs[i]
        loads[target] += costs[i]
        tokens[packs[i]] -= lengths[i]
        counts[packs[i]] -= 1
        tokens[target_pack] += lengths[i]
        counts[target_pack] += 1
        packs[i] = target_pack

    for i, at in enumerate(packs):
        held[at // packs_per_rank].append(i)
        loads[at // packs_per_rank] += costs[i]
        tokens[at] += lengths[i]
        counts[at] += 1
    asked = min(partners, num_ranks)
    while True:
        giver = loads.index(max(loads))
        load = best = loads[giver]
        found = None
        for other in nsmallest(asked, range(num_ranks), key=lambda rank: (loads[rank], rank)):
            if load - loads[other] < 2:
                break
            offered, wanted = _offer(held[giver], traded), _offer(held[other], traded)
            budget -= len(offered) * (len(wanted) + 1)
            if budget < 0:
                pack[:] = packs
                return
            first = other * packs_per_rank
            emptiest = min(range(first, first + packs_per_rank), key=tokens.__getitem__)
            for i in offered:
                alone = max(load - costs[i], loads[other] + costs[i])
                if alone < best and counts[packs[i]] > 1 and tokens[emptiest] + lengths[i] <= capacity:
                    best, found = alone, (i, -1, other, emptiest)
                for j in wanted:
                    both = max(load - costs[i] + costs[j], loads[other] + costs[i] - costs[j])
                    if (
                        both < best
                        and tokens[packs[i]] - lengths[i] + lengths[j] <= capacity
                        and tokens[packs[j]] - lengths[j] + lengths[i] <= capacity
                    ):
                        best, found = both, (i, j, other, packs[j])
        if found is None and asked < num_ranks:
            asked = num_ranks
            continue
        if found is None:
            pack[:] = packs
            return
        asked = min(partners, num_ranks)
        given, taken, taker, place = found
        given_pack = packs[given]
        hand_over(given, giver, taker, place)
        if taken >= 0:
            hand_over(taken, taker, giver, given_pack)


def _offer(held: list[int], most: int) -> list[int]:
    """At most so many of the sequences that a rank holds, of all costs."""
    count = min(len(held), most)
    return [held[k * len(held) // count] for k in range(count)]
