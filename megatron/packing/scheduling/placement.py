"""pure. Ways to put sequences, one after the other, on ranks and into packs with free capacity.

The loops are those of core.cpp. Where that is not built, each way is taken by a few lines of Python, slower, and what
only refines a placement leaves it as it is.

Sequences come in descending order of length, and so, but for masked tokens, of cost: `length` is int64 [N], `cost`
float64 [N]. A placement is int64 [N]: the pack of each, rank * num_microbatches + microbatch. A sequence goes to the
emptiest pack of its rank.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.packing.scheduling import compiled
from megatron.packing.scheduling.bounds import fewest_packs
from megatron.packing.scheduling.problem import sorted_order

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

_MAX_BISECTIONS, _FINEST = 8, 1 / 2048
"""Bisection ends after so many, or at such a part of a cost."""
_MANY = 1 << 14
"""Sequences, of more of which bisection ends sooner."""
_PER_RANK = 8
"""Sequences per rank, the costliest, that bisection is about."""
_SWERVES, _STEPS = 2, 3_000_000
_MOST_COMPLETED = 1024
"""Of bin completion: departures from the first set, steps, and sequences."""


class Packs(NamedTuple):
    """Where sequences may go."""

    num_ranks: int
    num_microbatches: int
    capacity: int

    @property
    def size(self) -> int:
        """Packs of all ranks."""
        return self.num_ranks * self.num_microbatches

    def each_alone(self) -> Packs:
        """The same packs, each as a rank of its own."""
        return Packs(self.size, 1, self.capacity)


def pack_costs(cost: FloatArray, pack: IntArray, packs: Packs, fixed: float = 0.0) -> FloatArray:
    """The sum of each pack's costs, and `fixed`: float64 [num_ranks, num_microbatches]."""
    costs = np.float64(fixed) + np.bincount(pack, weights=cost, minlength=packs.size)
    return costs.reshape(packs.num_ranks, packs.num_microbatches)


def spread(
    length: IntArray,
    cost: FloatArray,
    packs: Packs,
    *,
    begun: IntArray | None = None,
    loads: FloatArray | None = None,
    limit: float = math.inf,
) -> IntArray | None:
    """Each sequence to the rank of the least cost among those with free capacity for it (Graham's LPT rule, 1969).

    Those that `begun` (int64 [N]) has a pack for stay there; it is -1 for the others. Ranks have `loads` besides,
    float64 [num_ranks]. None where a sequence finds no pack; with a `limit` of ranks' costs, sequences that find none
    are left out, -1. O(N log N).
    """
    pack = np.full(length.size, -1, np.int64) if begun is None else begun.copy()
    loads = np.zeros(packs.num_ranks) if loads is None else loads
    if compiled.CORE is not None:
        done = compiled.CORE.call("spread", length.size, cost, length, *packs, float(limit), loads, pack)
        return pack if done >= 0 else None
    per_rank = packs.num_microbatches
    is_begun = pack >= 0
    tokens = np.bincount(pack[is_begun], weights=length[is_begun], minlength=packs.size).reshape(-1, per_rank)
    loads = loads + np.bincount(pack[is_begun] // per_rank, weights=cost[is_begun], minlength=packs.num_ranks)
    fewest = tokens.min(axis=1)
    for i in np.flatnonzero(~is_begun):
        rank = int(np.where(fewest + length[i] <= packs.capacity, loads, np.inf).argmin())
        position = int(tokens[rank].argmin())
        if tokens[rank, position] + length[i] > packs.capacity and limit == math.inf:
            return None
        if tokens[rank, position] + length[i] > packs.capacity or loads[rank] + cost[i] > limit:
            continue
        pack[i] = rank * per_rank + position
        loads[rank] += cost[i]
        tokens[rank, position] += length[i]
        fewest[rank] = tokens[rank].min()
    return pack


def first_fit(
    length: IntArray,
    cost: FloatArray,
    packs: Packs,
    *,
    limit: float,
    ceiling: float | None = None,
    overhead: float = 0.0,
    opens_above: float = -1.0,
) -> tuple[IntArray, int]:
    """Each sequence to the first rank that can take its cost and tokens: its pack [N], -1 for none; ranks in use.

    A rank may hold a cost of `limit`, and of at most `ceiling - overhead * cost of its first sequence`, which is its
    costliest. Only sequences of a cost above `opens_above` take a rank into use. O(N log num_ranks), as a rule.
    """
    pack = np.full(length.size, -1, np.int64)
    ceiling = limit if ceiling is None else ceiling
    if compiled.CORE is not None:
        numbers = float(limit), float(ceiling), float(overhead), float(opens_above)
        return pack, compiled.CORE.call("first_fit", length.size, cost, length, *packs, *numbers, pack)
    free = np.full(packs.num_ranks, -1.0)
    tokens = np.zeros((packs.num_ranks, packs.num_microbatches), np.int64)
    fewest, in_use = np.zeros(packs.num_ranks, np.int64), 0
    for i in range(length.size):
        can_take = (free >= cost[i]) & (fewest + length[i] <= packs.capacity)
        rank = int(can_take.argmax())
        if not can_take[rank]:
            most = min(limit, ceiling - overhead * cost[i])
            if in_use == packs.num_ranks or cost[i] <= opens_above or most < cost[i]:
                continue
            rank, in_use = in_use, in_use + 1
            free[rank] = most
        position = int(tokens[rank].argmin())
        pack[i] = rank * packs.num_microbatches + position
        free[rank] -= cost[i]
        tokens[rank, position] += length[i]
        fewest[rank] = tokens[rank].min()
    return pack, in_use


def best_fit(length: IntArray, capacity: int) -> tuple[IntArray, int]:
    """Each sequence to the fullest pack that can take it, else to a new one (best-fit decreasing): its pack; packs."""
    pack = np.empty(length.size, np.int64)
    if compiled.CORE is not None:
        return pack, compiled.CORE.call("best_fit", length.size, length, capacity, pack)
    free: list[tuple[int, int]] = []  # tokens, pack; ascending
    num_packs = 0
    for i, tokens in enumerate(length.tolist()):
        at = bisect_left(free, (tokens, 0))
        if at < len(free):
            left, pack[i] = free.pop(at)
        else:
            left, pack[i], num_packs = capacity, num_packs, num_packs + 1
        insort(free, (left - tokens, int(pack[i])))
    return pack, num_packs


def complete_packs(length: IntArray, capacity: int, num_packs: int) -> IntArray | None:
    """A packing into so many packs by bin completion, [N]; None where none is found.

    The longest sequence left opens a pack, and sets of others that may share it are tried, few and full ones first, as
    long as all packs together leave no more free than there is to spare (Korf, "A new algorithm for optimal bin
    packing", AAAI 2002); on each way down later sets than the first are taken a few times only (limited discrepancy
    search: Harvey and Ginsberg, IJCAI 1995). Some milliseconds at the most.
    """
    if compiled.CORE is None:
        return None
    pack = np.empty(length.size, np.int64)
    found = compiled.CORE.call("complete_packs", length.size, length, capacity, num_packs, _SWERVES, _STEPS, pack)
    return pack if found else None


def trade(
    length: IntArray,
    cost: FloatArray,
    pack: IntArray,
    packs: Packs,
    *,
    loads: FloatArray | None = None,
    aim: float = math.inf,
    partners: int = 8,
    offered: int = 24,
    budget: int = 200_000,
) -> IntArray:
    """The placement with ranks of uneven cost having traded sequences.

    The costliest rank gives a sequence to one of the `partners` cheapest ranks (if that does not help, to any), or
    trades one for another, whatever lowers the higher cost of the two most; again and again, until nothing does or
    `budget` pairs of sequences have been considered. While it costs more than `aim`, the next costliest ranks trade in
    its stead. Ranks have `loads` [num_ranks] besides what they hold, and offer `offered` sequences of all costs.
    """
    if compiled.CORE is None:
        return pack
    traded, loads = pack.copy(), np.zeros(packs.num_ranks) if loads is None else loads
    compiled.CORE.call("trade", length.size, cost, length, *packs, loads, float(aim), partners, offered, budget, traded)
    return traded


def bisect_ranks(length: IntArray, cost: FloatArray, packs: Packs, high: float) -> IntArray | None:
    """A placement whose costliest rank costs less than `high`; None where none is found.

    By bisection, the lowest cost of a rank for which first-fit finds places (MULTIFIT: Coffman, Garey and Johnson,
    1978) for the sequences that make ranks uneven, the costliest; the others are spread over what they leave.
    """
    if length.size == 0:
        return None
    low, best = max(float(cost.sum()) / packs.num_ranks, float(cost.max())), None
    head = min(length.size, _PER_RANK * packs.num_ranks)
    head = length.size if 2 * head > length.size else head
    for _ in range(_MAX_BISECTIONS if length.size <= _MANY else 1):
        if high - low <= low * _FINEST:
            break
        limit = (low + high) / 2
        begun, _ = first_fit(length[:head], cost[:head], packs, limit=limit)
        found = None
        if begun.min() >= 0:
            found = spread(length, cost, packs, begun=np.pad(begun, (0, length.size - head), constant_values=-1))
        largest = high if found is None else largest_rank(cost, found, packs)
        if found is None or largest >= high:
            low = limit
        else:
            high, best = largest, found
    return best


def largest_rank(cost: FloatArray, pack: IntArray, packs: Packs) -> float:
    """Cost of the costliest rank."""
    return float(np.bincount(pack // packs.num_microbatches, weights=cost, minlength=packs.num_ranks).max())


def deal(cost: FloatArray, pack: IntArray, packs: Packs) -> IntArray:
    """Whole packs, numbered anyhow below `packs.size`, dealt to ranks of even cost: the placement [N]."""
    costs = pack_costs(cost, pack, packs).ravel()
    by_cost = by_descending(costs)
    ones = np.ones(packs.size, np.int64)
    rank = spread(ones, costs[by_cost], Packs(packs.num_ranks, 1, packs.num_microbatches))
    assert rank is not None, "as many places as packs"
    place = np.empty(packs.size, np.int64)
    place[by_cost[sorted_order(rank)]] = np.arange(packs.size)  # each rank has num_microbatches of them
    return place[pack]


def split_ranks(
    length: IntArray,
    cost: FloatArray,
    pack: IntArray,
    packs: Packs,
    *,
    weights: FloatArray | None = None,
    only_where_lower: bool = False,
) -> IntArray:
    """The placement with each rank's sequences split anew, into packs in proportion to `weights` [M], or else even.

    Ranks for which capacity is too tight stay as they were; with `only_where_lower` so do those whose costliest pack
    would not cost less.
    """
    weights = np.ones(packs.num_microbatches) if weights is None else weights
    split = pack.copy()
    if compiled.CORE is not None:
        switch = int(only_where_lower)
        compiled.CORE.call("split_ranks", length.size, cost, length, pack, *packs, weights, switch, split)
        return split
    alone = Packs(packs.num_microbatches, 1, packs.capacity)
    for rank in range(packs.num_ranks):
        mine = np.flatnonzero(pack // packs.num_microbatches == rank)
        loads = (weights.max() - weights) * (cost[mine].sum() / weights.sum())
        found = spread(length[mine], cost[mine], alone, loads=loads)
        if found is None or mine.size == 0:
            continue
        placements = pack[mine] % packs.num_microbatches, found
        before, after = (np.bincount(each, weights=cost[mine]).max() for each in placements)
        if not only_where_lower or after < before:
            split[mine] = rank * packs.num_microbatches + found
    return split


def by_descending(costs: FloatArray) -> IntArray:
    """The indices that sort costs, from 0 up, in descending order but for differences of a billionth."""
    return sorted_order((costs * (-(2.0**31) / max(costs.max(initial=0.0), 1e-300))).astype(np.int64))


class TightPacks(NamedTuple):
    """As few packs as are found."""

    pack: IntArray
    """Of each sequence, [N]."""
    num_microbatches: int
    """Per rank, in which they fit."""


def tight_packs(length: IntArray, num_ranks: int, capacity: int, multiple: int) -> TightPacks:
    """The packs of best-fit decreasing, or of bin completion where that takes fewer microbatches."""
    pack, num_packs = best_fit(length, capacity)
    step = num_ranks * multiple
    number, fewest = max(-(-num_packs // step), 1), max(-(-fewest_packs(length, capacity) // step), 1)
    while number > fewest and length.size <= _MOST_COMPLETED:
        found = complete_packs(length, capacity, (number - 1) * step)
        if found is None:
            break
        pack, number = found, number - 1
    return TightPacks(pack, number * multiple)
