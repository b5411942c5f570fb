"""pure. Rows made shorter by simulated annealing (Kirkpatrick, Gelatt and Vecchi, Science 1983), where ranks meet at
every microbatch.

A row is the packs of all ranks at one microbatch and takes as long as its costliest. A sequence goes to another pack,
or takes the place of one there; if that pack then is above its limits, some of what it held comes back in exchange.
What is worse is done too, by chance, and ever more rarely. Worse is what lies above a row's height, which is first the
cost of one of its costlier packs and at last that of the costliest: so all of the costliest packs are lowered at once,
and only they count.

The search exists twice, in C++ (see `native`) and in Python (below), and gives the same result in both forms and on
every machine: it counts steps and costs in integers, its random numbers are its own.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.packing.scheduling import native
from megatron.packing.scheduling.native import address as _at

IntArray = npt.NDArray[np.int64]

_MOST_BACK = 24
"""Sequences looked at to come back in exchange."""
_NEAR = 12
"""Most sequences that take places take those of others that are so near in the order of costs."""
_HALVINGS = 6
"""Of the temperature, and of how many packs are above a row's height."""
_NUM_ROUNDS = 400
"""Times that temperature and heights are set."""
_HEAT, _FEW = 200, 256
"""Times `sum of all costs / (ranks * sequences)^2`, of so many sequences at least: the temperature at first."""
_COSTLIER = 7
"""Of so many packs one is above its row's height at first."""


def anneal(
    cost: IntArray,
    length: IntArray,
    pack: IntArray,
    *,
    num_ranks: int,
    num_rows: int,
    capacity: int,
    enough: int,
    steps: int,
) -> IntArray:
    """A placement whose rows take no longer in sum than those of `pack` (int64 [N], rank * num_rows + row), found in so
    many steps, of some 30 nanoseconds each, or before if they take `enough` or less. Costs and lengths are int64 [N],
    descending. No pack is above capacity, and none that holds a sequence is left empty, unless packs are more.
    """
    pack = np.array(pack, np.int64)
    temperature = int(cost.sum()) * _HEAT // (num_ranks * num_ranks * cost.size * max(cost.size, _FEW))
    costlier = max(num_ranks // _COSTLIER, 1)
    if native.LIBRARY is None:
        annealing = _Annealing(cost.tolist(), length.tolist(), pack.tolist(), num_ranks, num_rows, capacity)
        return np.array(annealing.run(steps, temperature, costlier, enough), np.int64)
    native.LIBRARY.anneal(
        *(cost.size, _at(cost), _at(length), num_ranks, num_rows, capacity),
        *(_MOST_BACK, _NEAR, _HALVINGS, _NUM_ROUNDS, steps, temperature, costlier, enough, _at(pack)),
    )
    return pack


class _Pair(NamedTuple):
    """A pack that gains cost and one that gives it: what they would hold."""

    to: int
    to_cost: int
    to_tokens: int
    giver: int
    giver_cost: int
    giver_tokens: int


class _Annealing:
    """In Python, with the same steps as in C++ (native_anneal.hpp)."""

    def __init__(
        self, cost: list[int], length: list[int], pack: list[int], num_ranks: int, num_rows: int, capacity: int
    ) -> None:
        self._cost, self._length, self._pack, self._capacity = cost, length, pack, capacity
        self._num_rows, num_packs = num_rows, num_ranks * num_rows
        self._costs, self._tokens, self._heights = [0] * num_packs, [0] * num_packs, [0] * num_packs
        self._held: list[list[int]] = [[] for _ in range(num_packs)]
        self._place = [0] * len(cost)
        for sequence, number in enumerate(pack):
            self._costs[number] += cost[sequence]
            self._tokens[number] += length[sequence]
            self._place[sequence] = len(self._held[number])
            self._held[number].append(sequence)
        self._heat = self._state = 0

    def run(self, steps: int, temperature: int, costlier: int, enough: int) -> list[int]:
        best, least = self._pack.copy(), self._look(1)
        for number in range(_NUM_ROUNDS + 1):
            halved, place = divmod(256 * _HALVINGS * number // _NUM_ROUNDS, 256)
            above = max(costlier * (512 - place) >> (9 + halved), 1)
            time = self._look(above)
            if time < least:
                best, least = self._pack.copy(), time
            if least <= enough or number == _NUM_ROUNDS:
                break
            self._heat = (temperature * (512 - place) >> (9 + halved)) * above
            left = steps // _NUM_ROUNDS
            while left > 0:
                left -= self._step()
        return best

    def _look(self, number: int) -> int:
        """The time of all rows; each row's height becomes the cost of its so manyeth costliest pack."""
        time = 0
        for row in range(self._num_rows):
            costs = sorted(self._costs[row :: self._num_rows], reverse=True)
            time += costs[0]
            self._heights[row :: self._num_rows] = [costs[number - 1]] * len(costs)
        return time

    def _step(self) -> int:
        """One change, done or not; how much of the steps it takes."""
        cost, size = self._cost, len(self._cost)
        i, j = self._random_below(size), -1
        if self._random_below(2):
            i = i * i // size
        p, kind = self._pack[i], self._random_below(8)
        if kind < 2:
            q = self._random_below(len(self._held))
            if len(self._held[p]) < 2 and size >= len(self._held):
                return 1
        else:
            j = i + self._random_below(2 * _NEAR + 1) - _NEAR if kind < 7 else self._random_below(size)
            if not 0 <= j < size:
                return 1
            q = self._pack[j]
        gain = cost[i] - (cost[j] if j >= 0 else 0)
        tokens = self._length[i] - (self._length[j] if j >= 0 else 0)
        if q == p or gain == 0:
            return 1
        to, giver = (q, p) if gain > 0 else (p, q)
        gain, tokens = (gain, tokens) if gain > 0 else (-gain, -tokens)
        pair = _Pair(
            *(to, self._costs[to] + gain, self._tokens[to] + tokens),
            *(giver, self._costs[giver] - gain, self._tokens[giver] - tokens),
        )
        pair, back = self._give_back(pair, i, j, gain)
        taken = 1 + len(back) // 2
        if pair.to_tokens > self._capacity:
            return taken
        worse = self._above(to, pair.to_cost) + self._above(giver, pair.giver_cost)
        worse -= self._above(to, self._costs[to]) + self._above(giver, self._costs[giver])
        if worse > 0 and worse * 256 > self._heat * self._random_exponential():
            return taken
        self._costs[to], self._tokens[to] = pair.to_cost, pair.to_tokens
        self._costs[giver], self._tokens[giver] = pair.giver_cost, pair.giver_tokens
        self._move(i, q)
        if j >= 0:
            self._move(j, p)
        for other in back:
            self._move(other, giver)
        return taken

    def _give_back(self, pair: _Pair, i: int, j: int, gain: int) -> tuple[_Pair, list[int]]:
        """Others of the pack that gains, from a random one on, go the other way until it is within its limits."""
        _, to_cost, to_tokens, giver, giver_cost, giver_tokens = pair
        height, held, back = self._heights[pair.to], self._held[pair.to], []
        if (to_tokens <= self._capacity and to_cost <= height) or len(held) < 2:
            return pair, []
        start = self._random_below(len(held))
        for other in (held[start:] + held[:start])[:_MOST_BACK]:
            if to_tokens <= self._capacity and to_cost <= height:
                break
            cost, length = self._cost[other], self._length[other]
            if other in (i, j) or cost > gain or giver_tokens + length > self._capacity:
                continue
            back.append(other)
            to_cost, to_tokens = to_cost - cost, to_tokens - length
            giver_cost, giver_tokens = giver_cost + cost, giver_tokens + length
        return _Pair(pair.to, to_cost, to_tokens, giver, giver_cost, giver_tokens), back

    def _above(self, pack: int, cost: int) -> int:
        return max(cost - self._heights[pack], 0)

    def _move(self, sequence: int, to: int) -> None:
        held, last = self._held[self._pack[sequence]], self._held[self._pack[sequence]][-1]
        held[self._place[sequence]] = last
        self._place[last] = self._place[sequence]
        held.pop()
        self._place[sequence] = len(self._held[to])
        self._held[to].append(sequence)
        self._pack[sequence] = to

    def _random_below(self, number: int) -> int:
        self._state = (self._state * 6364136223846793005 + 1442695040888963407) % (1 << 64)
        return (self._state >> 33) * number >> 31

    def _random_exponential(self) -> int:
        """Some 256 * -log2 of a uniform number: the logarithm is taken for straight between powers of two."""
        number = self._random_below(1 << 31) + 1
        bits = number.bit_length() - 1
        return (31 - bits) * 256 - ((number << 8 >> bits) & 255)
