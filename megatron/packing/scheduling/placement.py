"""pure. Heuristics that place sequences on ranks and in packs with free capacity.

Notation: `length` int64 [N] and `cost` float64 [N] are in the order of `ScheduleRequest.sorted`,
longest first, or costliest first where sequences have payloads. A longer sequence may cost less
than a shorter one, if fewer of its tokens count for the loss. A placement is int64 [N], the pack of
each sequence, `rank * num_microbatches + microbatch`; -1 means not placed. A sequence that goes to
a rank goes to its emptiest pack.

    name                  what it does                                                  price
    place_longest_first   longest first, each to the cheapest rank (LPT)                O(N log N)
    first_fit             each to the first rank with room for its cost and tokens      O(N log N)
    trade                 moves and swaps between the costliest and the cheapest ranks  a budget
    bisect_ranks          first-fit under ever lower limits of cost (MULTIFIT)          8 first-fits
    deal                  whole packs to ranks of even cost                             O(N log N)
    split_ranks           each rank's sequences split again into packs                  O(N log N)

The loops run in core.cpp. Where it is not built, plainer loops in Python stand in: they are slower,
and some placements are a little worse. `trade` has no stand-in, and returns what it was given.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.packing.scheduling import compiled
from megatron.packing.scheduling.problem import ScheduleRequest, sorted_order

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class BisectionLimits:
    """Limits of a bisection of a cost or a time."""

    max_rounds: int = 8
    """Halvings of the interval. Eight leave 1/256 of it, closer than first-fit's own unevenness."""
    resolution: float = 1 / 2048
    """Width of the interval over its lower end. Below 0.05 % no step gets visibly quicker."""
    large_batch: int = 1 << 14
    """Sequences, above which there is one round only: each round places all of them again."""
    head_per_rank: int = 8
    """The costliest sequences per rank, for which first-fit finds places. The cheaper ones fill the
    gaps by LPT."""


BISECTION = BisectionLimits()


class PackGrid(NamedTuple):
    """The packs that sequences may go to."""

    num_ranks: int
    num_microbatches: int
    capacity: int

    @property
    def num_packs(self) -> int:
        """Number of packs of all ranks."""
        return self.num_ranks * self.num_microbatches

    def each_alone(self) -> PackGrid:
        """Returns these packs, each as a rank of its own: heuristics that balance ranks then
        balance packs.
        """
        return PackGrid(self.num_packs, 1, self.capacity)


class Placed(NamedTuple):
    """A placement with its modelled time."""

    time: float
    """Modelled time of the step, in the unit of the cost."""
    num_microbatches: int
    pack: IntArray
    """int64 [N], rank * num_microbatches + microbatch."""


def sums_of_packs(cost: FloatArray, pack: IntArray, packs: PackGrid) -> FloatArray:
    """Returns the sum of each pack's costs, float64 [num_ranks, num_microbatches]."""
    costs = np.bincount(pack, weights=cost, minlength=packs.num_packs).astype(
        np.float64, copy=False
    )
    return costs.reshape(packs.num_ranks, packs.num_microbatches)


def costs_as_run(request: ScheduleRequest, pack: IntArray, packs: PackGrid) -> FloatArray:
    """Returns `sums_of_packs` with the fixed cost of each pack, and at least the least one."""
    costs = sums_of_packs(request.sorted.cost, pack, packs)
    return np.maximum(costs + request.cost.fixed, request.cost.least)


def largest_rank(cost: FloatArray, pack: IntArray, packs: PackGrid) -> float:
    """Returns the cost of the costliest rank."""
    rank = pack // packs.num_microbatches
    return float(np.bincount(rank, weights=cost, minlength=packs.num_ranks).max())


def place_longest_first(
    length: IntArray,
    cost: FloatArray,
    packs: PackGrid,
    *,
    begun: IntArray | None = None,
    loads: FloatArray | None = None,
    limit: float = math.inf,
) -> IntArray | None:
    """Puts each sequence, in the order given, on the cheapest rank with room for it. O(N log N).

    With sequences sorted longest first this is LPT (Graham, 1969).

        2 ranks, capacity 9, lengths 6 5 4 3    ->    6 3 | 5 4

    Args:
        begun: int64 [N], packs of sequences that are placed already; -1 for the others.
        loads: float64 [num_ranks], cost that each rank has besides its sequences.
        limit: cost that a rank may reach. Sequences that no rank can take are then left out, -1.

    Returns:
        The placement; None where there is no limit and a sequence finds no pack.
    """
    pack = np.full(length.size, -1, np.int64) if begun is None else begun.copy()
    loads = np.zeros(packs.num_ranks) if loads is None else loads
    if compiled.CORE is not None:
        core_arguments = length.size, cost, length, *packs
        done = compiled.CORE.call("place_longest_first", *core_arguments, float(limit), loads, pack)
        return pack if done >= 0 else None
    per_rank = packs.num_microbatches
    is_begun = pack >= 0
    tokens = np.bincount(pack[is_begun], weights=length[is_begun], minlength=packs.num_packs)
    tokens = tokens.reshape(-1, per_rank)
    begun_rank = pack[is_begun] // per_rank
    loads = loads + np.bincount(begun_rank, weights=cost[is_begun], minlength=packs.num_ranks)
    fewest = tokens.min(axis=1)  # of each rank's emptiest pack
    for i in np.flatnonzero(~is_begun):
        rank = int(np.where(fewest + length[i] <= packs.capacity, loads, np.inf).argmin())
        position = int(tokens[rank].argmin())
        has_room = tokens[rank, position] + length[i] <= packs.capacity
        if not has_room and limit == math.inf:
            return None
        if not has_room or loads[rank] + cost[i] > limit:
            continue
        pack[i] = rank * per_rank + position
        loads[rank] += cost[i]
        tokens[rank, position] += length[i]
        fewest[rank] = tokens[rank].min()
    return pack


def first_fit(
    length: IntArray,
    cost: FloatArray,
    packs: PackGrid,
    *,
    limit: float,
    ceiling: float | None = None,
    overhead: float = 0.0,
    opens_above: float = -1.0,
) -> tuple[IntArray, int]:
    """Puts each sequence on the first rank that has room for its cost and its tokens.

    A rank may cost `limit`, and at most `ceiling - overhead * cost of its first sequence`. The
    first one is usually the costliest, and so much of a pipeline's time goes into filling that
    pack.

        ceiling 20, overhead 2, costs 6 4 2    ->    6 2 | 4, as 6 leaves its rank 20 - 2 * 6 = 8

    Args: opens_above: only sequences that cost more take a new rank into use.

    Returns: The placement with -1 for sequences without a rank, and the number of ranks in use.
    """
    pack = np.full(length.size, -1, np.int64)
    ceiling = limit if ceiling is None else ceiling
    if compiled.CORE is not None:
        numbers = float(limit), float(ceiling), float(overhead), float(opens_above)
        core_arguments = length.size, cost, length, *packs
        return pack, compiled.CORE.call("first_fit", *core_arguments, *numbers, pack)
    free = np.full(packs.num_ranks, -1.0)  # below any cost: the rank is not in use
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


def trade(
    length: IntArray,
    cost: FloatArray,
    pack: IntArray,
    packs: PackGrid,
    *,
    loads: FloatArray | None = None,
    aim: float = math.inf,
    partners: int = 8,
    offered: int = 24,
    budget: int = 200_000,
) -> IntArray:
    """Balances ranks by moves and swaps of sequences between them; returns the placement.

    The costliest rank gives a sequence to one of the `partners` cheapest ranks (if none of them
    helps, to any rank), or swaps one for another, whichever lowers the higher cost of the two most.
    That is repeated until nothing helps.

        7 5 | 4 4    ->    7 4 | 5 4, as no single move is below 12

    Args:
        loads: float64 [num_ranks], cost that each rank has besides its sequences.
        aim: while the costliest rank is above it and finds no trade, the next costliest ones trade.
        offered: sequences that a rank offers at a time, of all costs.
        budget: pairs of sequences considered, about 5 ns each.
    """
    if compiled.CORE is None:
        return pack
    traded, loads = pack.copy(), np.zeros(packs.num_ranks) if loads is None else loads
    numbers = float(aim), partners, offered, budget
    compiled.CORE.call("trade", length.size, cost, length, *packs, loads, *numbers, traded)
    return traded


def bisect_ranks(
    length: IntArray,
    cost: FloatArray,
    packs: PackGrid,
    high: float,
    limits: BisectionLimits = BISECTION,
) -> IntArray | None:
    """Searches for a placement whose costliest rank costs less than `high`; None without one.

    Bisects for the lowest limit of a rank's cost under which first-fit finds places (MULTIFIT:
    Coffman, Garey and Johnson, 1978) for the costliest sequences, which make ranks uneven. LPT puts
    the others into the gaps. It beats LPT where ranks hold two or three sequences each.

        2 ranks, costs 3 3 2 2 2    ->    LPT has 3 2 2 | 3 2, costliest 7; first-fit under a
                                          limit of (6 + 7) / 2 has 3 3 | 2 2 2, costliest 6
    """
    if length.size == 0:
        return None
    # No placement is below the mean or the costliest sequence: `low` is never reached from above.
    low, best = max(float(cost.sum()) / packs.num_ranks, float(cost.max())), None
    head = min(length.size, limits.head_per_rank * packs.num_ranks)
    head = length.size if 2 * head > length.size else head
    for _ in range(limits.max_rounds if length.size <= limits.large_batch else 1):
        if high - low <= low * limits.resolution:
            break
        limit = (low + high) / 2
        begun, _ = first_fit(length[:head], cost[:head], packs, limit=limit)
        found = None
        if begun.min() >= 0:
            begun = np.pad(begun, (0, length.size - head), constant_values=-1)
            found = place_longest_first(length, cost, packs, begun=begun)
        largest = high if found is None else largest_rank(cost, found, packs)
        if found is None or largest >= high:
            low = limit
        else:
            high, best = largest, found
    return best


def deal(cost: FloatArray, pack: IntArray, packs: PackGrid) -> IntArray:
    """Deals whole packs, numbered anyhow below `packs.num_packs`, to ranks of even cost.

    Each rank gets `num_microbatches` packs, empty ones included. Returns the placement [N].
    """
    costs = sums_of_packs(cost, pack, packs).ravel()
    by_cost = by_descending(costs)
    ones = np.ones(packs.num_packs, np.int64)
    # A pack is a sequence of one token here, and a rank a pack of `num_microbatches` tokens.
    seats = PackGrid(packs.num_ranks, 1, packs.num_microbatches)
    rank = place_longest_first(ones, costs[by_cost], seats)
    assert rank is not None, "as many seats as packs"
    renumbered = np.empty(packs.num_packs, np.int64)
    # Sorted by rank, the packs of rank r stand at r * num_microbatches and after: their new
    # numbers. 2 ranks, by_cost 2 0 3 1, rank 0 1 1 0    ->    packs 2 1 | 0 3, renumbered 2 1 0 3
    renumbered[by_cost[sorted_order(rank)]] = np.arange(packs.num_packs)
    return renumbered[pack]


def split_ranks(
    length: IntArray,
    cost: FloatArray,
    pack: IntArray,
    packs: PackGrid,
    *,
    weights: FloatArray | None = None,
    only_where_lower: bool = False,
) -> IntArray:
    """Splits each rank's sequences again, into packs in proportion to `weights` [M] or else even.

    Ranks for which capacity is too tight stay as they are. With `only_where_lower` so do those
    whose costliest pack would not cost less.
    """
    weights = np.ones(packs.num_microbatches) if weights is None else weights
    split = pack.copy()
    if compiled.CORE is not None:
        core_arguments = length.size, cost, length, pack, *packs
        compiled.CORE.call("split_ranks", *core_arguments, weights, int(only_where_lower), split)
        return split
    alone = PackGrid(packs.num_microbatches, 1, packs.capacity)
    for rank in range(packs.num_ranks):
        mine = np.flatnonzero(pack // packs.num_microbatches == rank)
        # Packs begin with what they lack of the heaviest one: even sums then are uneven packs.
        loads = (weights.max() - weights) * (cost[mine].sum() / weights.sum())
        found = place_longest_first(length[mine], cost[mine], alone, loads=loads)
        if found is None or mine.size == 0:
            continue
        placements = pack[mine] % packs.num_microbatches, found
        before, after = (np.bincount(each, weights=cost[mine]).max() for each in placements)
        if not only_where_lower or after < before:
            split[mine] = rank * packs.num_microbatches + found
    return split


def by_descending(costs: FloatArray) -> IntArray:
    """Returns the indices that sort costs of at least 0 in descending order.

    Differences below a billionth of the largest cost do not count.
    """
    in_units = costs * (-(2.0**31) / max(costs.max(initial=0.0), 1e-300))
    return sorted_order(in_units.astype(np.int64))


def geometric_grid(size: int, count: int) -> list[int]:
    """Returns at most `count` indices from 0 to `size - 1`, both included, ever further apart.

    geometric_grid(100, 5) -> [0, 2, 9, 31, 99]
    """
    return sorted(set((np.geomspace(1, size, count).round().astype(int) - 1).tolist()))
