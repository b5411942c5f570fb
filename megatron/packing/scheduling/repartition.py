"""pure. Packs made over two by two until all are within limits of tokens and cost, where they are too full for trades.

A pack above a limit and another one, taken at random, have their sequences split between them anew, in the best of all
ways but the present one. Where that is no gain it is done all the same, and even where it is a small loss, as long as
there is much of the budget left: what is too much moves from pack to pack until it meets room. That works where packs
hold three sequences or more, for then nearly every room is met in some split.

The search exists twice, in C++ (see `native`) and in Python (below), and gives the same result in both forms and on
every machine: its budget counts splits, its random numbers are its own.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.packing.scheduling import native
from megatron.packing.scheduling.native import address as _at
from megatron.packing.scheduling.placement import best_fit

IntArray = npt.NDArray[np.int64]

_MOST_SPLIT = 12
"""Sequences of two packs that are split anew at once, in 2^11 ways."""
_SPLITS_PER_SEQUENCE = 2000
"""To find a packing."""
_FEWEST_PER_PACK = 3
"""Sequences: of fewer, hardly any packings are found."""
_MOST_SPLITS = 1 << 30
"""At once: products with costs stay below 2^63."""
_SPLITS_PER_STEP = 64
"""That are as much work as a step is besides its splits."""
_NEVER = np.iinfo(np.int64).max


class Repartition(NamedTuple):
    """What was found, and at what price."""

    pack: IntArray | None
    """int64 [N]; None where nothing was found within the budget."""
    num_splits: int
    """Looked at: some 3 nanoseconds each."""


def fit_by_pairs(length: IntArray, *, capacity: int, num_packs: int) -> IntArray | None:
    """A packing into `num_packs` packs, int64 [N]; None where none was found. Lengths are int64 [N], descending.

    It starts from best-fit decreasing, with what finds no room in the emptiest packs. Up to 5 milliseconds for 1,024
    sequences.
    """
    if length.size < _FEWEST_PER_PACK * num_packs or num_packs * capacity < int(length.sum()):
        return None
    pack, _ = best_fit(length, capacity=capacity)
    has_room = pack < num_packs
    tokens = np.bincount(pack[has_room], weights=length[has_room], minlength=num_packs).astype(np.int64)
    for sequence in np.flatnonzero(~has_room).tolist():
        emptiest = int(tokens.argmin())
        pack[sequence] = emptiest
        tokens[emptiest] += length[sequence]
    limit, budget = int(length.sum()), _SPLITS_PER_SEQUENCE * length.size
    return repartition(length, length, pack, num_ranks=num_packs, capacity=capacity, limit=limit, budget=budget).pack


def repartition(
    cost: IntArray,
    length: IntArray,
    pack: IntArray,
    *,
    num_ranks: int,
    packs_per_rank: int = 1,
    capacity: int,
    limit: int,
    loads: IntArray | None = None,
    budget: int,
) -> Repartition:
    """A placement found from `pack` (int64 [N]), in which no pack is above `capacity` and no rank above a cost of
    `limit`, before more than `budget` splits of two packs were looked at. Costs and lengths are int64 [N]; ranks start
    with `loads` [num_ranks], zeros unless given. No pack that holds a sequence is left empty.
    """
    budget = min(budget, _MOST_SPLITS)
    pack, step = pack.copy(), _SPLITS_PER_STEP + 2 * packs_per_rank
    if native.LIBRARY is None:
        left = _Repartition(cost, length, num_ranks, packs_per_rank, capacity, limit, loads, pack).run(step, budget)
    else:
        left = native.LIBRARY.repartition(
            *(cost.size, _at(cost), _at(length), num_ranks, packs_per_rank, capacity, limit),
            *(_at(loads), _MOST_SPLIT, step, budget, _at(pack)),
        )
    return Repartition(pack if left >= 0 else None, budget - max(left, 0))


class _Repartition:
    """In Python, with the same steps as in C++ (native_repartition.hpp)."""

    def __init__(
        self,
        cost: IntArray,
        length: IntArray,
        num_ranks: int,
        packs_per_rank: int,
        capacity: int,
        limit: int,
        loads: IntArray | None,
        pack: IntArray,
    ) -> None:
        self._cost, self._length, self._pack = cost.tolist(), length.tolist(), pack
        self._per_rank, self._capacity, self._limit = packs_per_rank, capacity, limit
        self._token_weight = max(int(cost.sum()) // max(int(length.sum()), 1), 1)
        self._most_worse = self._token_weight * min(capacity, int(length.sum())) >> 10
        num_packs = num_ranks * packs_per_rank
        self._held: list[list[int]] = [[] for _ in range(num_packs)]
        self._tokens, self._loads = [0] * num_packs, [0] * num_ranks if loads is None else loads.tolist()
        for sequence, number in enumerate(pack.tolist()):
            self._held[number].append(sequence)
            self._tokens[number] += self._length[sequence]
            self._loads[number // packs_per_rank] += self._cost[sequence]
        self._above: list[int] = []
        self._place = [-1] * num_packs
        self._state = 0

    def run(self, step: int, budget: int) -> int:
        num_packs, whole = len(self._held), budget
        self._note(range(num_packs))
        while self._above and num_packs > 1:
            a = self._above[self._random_below(len(self._above))]
            b = self._random_below(num_packs - 1)
            b += b >= a
            size_a, size_b = len(self._held[a]), len(self._held[b])
            from_a = min(size_a, max(_MOST_SPLIT // 2, _MOST_SPLIT - size_b))
            from_b = min(size_b, _MOST_SPLIT - from_a)
            budget -= step + (1 << max(from_a + from_b - 1, 0))
            if budget < 0:
                return budget
            self._split(a, from_a, b, from_b, self._most_worse * budget // whole)
        return -1 if self._above else budget

    def _split(self, a: int, from_a: int, b: int, from_b: int, worse: int) -> None:
        rank_a, rank_b = a // self._per_rank, b // self._per_rank
        items = self._held[a][:from_a] + self._held[b][:from_b]
        tokens, cost = np.zeros(1, np.int64), np.zeros(1, np.int64)
        for place, sequence in enumerate(items[:-1]):
            sign = 1 if place < from_a else -1
            tokens = np.concatenate((tokens, tokens + sign * self._length[sequence]))
            cost = np.concatenate((cost, cost + sign * self._cost[sequence]))
        room_a, room_b = self._capacity - self._tokens[a], self._capacity - self._tokens[b]
        excess = self._token_weight * (np.maximum(-tokens - room_a, 0) + np.maximum(tokens - room_b, 0))
        if rank_a != rank_b:
            room_a, room_b = self._limit - self._loads[rank_a], self._limit - self._loads[rank_b]
            excess += np.maximum(-cost - room_a, 0) + np.maximum(cost - room_b, 0)
        emptying = (1 << from_a) - 1
        if from_a == len(self._held[a]) and 0 < emptying < excess.size:
            excess[emptying] = _NEVER
        best = 1 + int(excess[1:].argmin()) if excess.size > 1 else 0
        best = best if excess[best] < _NEVER else 0
        if excess[best] > excess[0] and excess[best] - excess[0] > self._random_below(worse + 1):
            best = 0
        self._tokens[a] -= int(tokens[best])
        self._tokens[b] += int(tokens[best])
        self._loads[rank_a] -= int(cost[best])
        self._loads[rank_b] += int(cost[best])
        del self._held[a][:from_a], self._held[b][:from_b]
        for place, sequence in enumerate(items):
            to = a if (place < from_a) != (best >> place & 1) else b
            self._held[to].append(sequence)
            self._pack[sequence] = to
        if best:
            for rank in (rank_a, rank_b):
                self._note(range(rank * self._per_rank, (rank + 1) * self._per_rank))

    def _note(self, packs: range) -> None:
        """Keep `above` up to date for these packs."""
        for pack in packs:
            is_above = self._tokens[pack] > self._capacity or self._loads[pack // self._per_rank] > self._limit
            if is_above == (self._place[pack] >= 0):
                continue
            if is_above:
                self._place[pack] = len(self._above)
                self._above.append(pack)
            else:
                last = self._above.pop()
                place, self._place[pack] = self._place[pack], -1
                if last != pack:
                    self._above[place], self._place[last] = last, place

    def _random_below(self, number: int) -> int:
        self._state = (self._state * 6364136223846793005 + 1442695040888963407) % (1 << 64)
        return (self._state >> 33) % number
