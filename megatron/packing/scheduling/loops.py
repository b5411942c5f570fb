"""pure. The inner loops of `placement` in Python, for where native.cpp is not built; the two give equal results."""

from __future__ import annotations

from bisect import bisect_left, insort
from heapq import heapify, heappop, heappush, heapreplace, nsmallest
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


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


def spread(
    cost: IntArray,
    length: IntArray,
    num_ranks: int,
    packs_per_rank: int,
    capacity: int,
    loads: IntArray | None,
    tokens: IntArray | None,
    limit: int | None = None,
) -> IntArray | None:
    """With a `limit` of ranks' costs, sequences without room are in no pack, -1."""
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
        if not cheapest or (limit is not None and cheapest[0][0] + sequence_cost > limit):
            if limit is None:
                return None
            placed.append(-1)
            continue
        load, rank = cheapest[0]
        heapreplace(cheapest, (load + sequence_cost, rank))
        placed.append(packs.add(rank, sequence_length))
    return np.array(placed, np.int64)


def spread_rest(
    cost: IntArray,
    length: IntArray,
    pack: IntArray,
    num_ranks: int,
    packs_per_rank: int,
    capacity: int,
    initial: IntArray | None,
) -> int | None:
    loads, tokens = [0] * num_ranks if initial is None else initial.tolist(), [0] * (num_ranks * packs_per_rank)
    for sequence_cost, sequence_length, place in zip(cost.tolist(), length.tolist(), pack.tolist()):
        if place >= 0:
            loads[place // packs_per_rank] += sequence_cost
            tokens[place] += sequence_length
    rest = np.flatnonzero(pack < 0)
    begun = np.array(loads, np.int64), np.array(tokens, np.int64)
    found = spread(cost[rest], length[rest], num_ranks, packs_per_rank, capacity, *begun)
    if found is None:
        return None
    pack[rest] = found
    for sequence_cost, place in zip(cost[rest].tolist(), found.tolist()):
        loads[place // packs_per_rank] += sequence_cost
    return max(loads)


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


def first_fit(
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


def best_fit(length: IntArray, capacity: int) -> tuple[IntArray, int]:
    rooms: list[tuple[int, int]] = []  # room of a pack, its number; ascending
    placed = []
    for tokens in length.tolist():
        at = bisect_left(rooms, (tokens, 0))
        room, pack = rooms.pop(at) if at < len(rooms) else (capacity, len(rooms))
        insort(rooms, (room - tokens, pack))
        placed.append(pack)
    return np.array(placed, np.int64), len(rooms)


def keep(
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


def trade(
    cost: IntArray,
    length: IntArray,
    pack: IntArray,
    num_ranks: int,
    packs_per_rank: int,
    capacity: int,
    loads: IntArray | None,
    partners: int,
    traded: int,
    budget: int,
) -> None:
    initial = [0] * num_ranks if loads is None else loads.tolist()
    trades = _Trades(cost, length, pack, initial, packs_per_rank, capacity)
    asked = partners = min(partners, num_ranks)
    while True:
        giver = trades.loads.index(max(trades.loads))
        best = _Trade(trades.loads[giver], -1, -1, -1, -1)
        for other in nsmallest(asked, range(num_ranks), key=lambda rank: (trades.loads[rank], rank)):
            if trades.loads[giver] - trades.loads[other] < 2:
                break
            offered, wanted = _offer(trades.held[giver], traded), _offer(trades.held[other], traded)
            budget -= len(offered) * (len(wanted) + 1)
            if budget < 0:
                pack[:] = trades.packs
                return
            best = trades.best_between(giver, other, offered, wanted, best)
        if best.given >= 0:
            trades.do(giver, best)
            asked = partners
        elif asked < num_ranks:
            asked = num_ranks
        else:
            pack[:] = trades.packs
            return


class _Trade(NamedTuple):
    """A sequence `given` to a rank, into a pack of it, for another one `taken`, or for none (-1)."""

    higher_load: int
    """Of the two ranks, afterwards."""
    given: int
    taken: int
    taker: int
    place: int


class _Trades:
    """What each rank holds, in costs and sequences, and what its packs hold, while sequences change hands."""

    def __init__(
        self, cost: IntArray, length: IntArray, pack: IntArray, loads: list[int], packs_per_rank: int, capacity: int
    ) -> None:
        self.costs, self.lengths, self.packs = cost.tolist(), length.tolist(), pack.tolist()
        self.packs_per_rank, self.capacity = packs_per_rank, capacity
        self.held: list[list[int]] = [[] for _ in loads]
        self.loads = loads
        self.tokens, self.counts = [0] * len(loads) * packs_per_rank, [0] * len(loads) * packs_per_rank
        for i, at in enumerate(self.packs):
            self.held[at // packs_per_rank].append(i)
            self.loads[at // packs_per_rank] += self.costs[i]
            self.tokens[at] += self.lengths[i]
            self.counts[at] += 1

    def best_between(self, giver: int, other: int, offered: list[int], wanted: list[int], best: _Trade) -> _Trade:
        """`best`, or a trade of one of these sequences that leaves the higher load of the two ranks lower."""
        costs, lengths, packs, tokens = self.costs, self.lengths, self.packs, self.tokens
        load, other_load = self.loads[giver], self.loads[other]
        first = other * self.packs_per_rank
        emptiest = min(range(first, first + self.packs_per_rank), key=tokens.__getitem__)
        for i in offered:
            alone = max(load - costs[i], other_load + costs[i])
            fits = tokens[emptiest] + lengths[i] <= self.capacity
            if alone < best.higher_load and self.counts[packs[i]] > 1 and fits:
                best = _Trade(alone, i, -1, other, emptiest)
            for j in wanted:
                both = max(load - costs[i] + costs[j], other_load + costs[i] - costs[j])
                more = lengths[i] - lengths[j]
                fits = tokens[packs[i]] - more <= self.capacity and tokens[packs[j]] + more <= self.capacity
                if both < best.higher_load and fits:
                    best = _Trade(both, i, j, other, packs[j])
        return best

    def do(self, giver: int, trade: _Trade) -> None:
        given_pack = self.packs[trade.given]
        self._hand_over(trade.given, giver, trade.taker, trade.place)
        if trade.taken >= 0:
            self._hand_over(trade.taken, trade.taker, giver, given_pack)

    def _hand_over(self, i: int, source: int, target: int, target_pack: int) -> None:
        self.held[source].remove(i)
        insort(self.held[target], i)
        self.loads[source] -= self.costs[i]
        self.loads[target] += self.costs[i]
        self.tokens[self.packs[i]] -= self.lengths[i]
        self.counts[self.packs[i]] -= 1
        self.tokens[target_pack] += self.lengths[i]
        self.counts[target_pack] += 1
        self.packs[i] = target_pack


def _offer(held: list[int], most: int) -> list[int]:
    """At most so many of the sequences that a rank holds, of all costs."""
    count = min(len(held), most)
    return [held[k * len(held) // count] for k in range(count)]
