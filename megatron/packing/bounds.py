"""pure. What no schedule can be better than, to start schedulers from and to judge them by.

Invariant, tested by brute force: a bound is never above the optimum.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt


def rank_cost_lower_bound(costs: npt.NDArray[np.float64], num_ranks: int) -> float:
    """A cost that the costliest rank reaches in every schedule of sequences with these `costs` (float64 [N]).

    The largest of: the mean over ranks; the costliest sequence; and for each k, the pigeonhole bound: of the k *
    num_ranks + 1 costliest sequences some rank holds k + 1, at the least the k + 1 cheapest of them. 0.0 without
    sequences. O(N log N).
    """
    if costs.size == 0:
        return 0.0
    descending = np.sort(costs)[::-1]
    mean = math.fsum(descending) / num_ranks
    cheapest = np.arange(
        num_ranks, costs.size, num_ranks
    )  # position of the (k * num_ranks + 1)-th costliest, k = 1, 2, ...
    sums = np.concatenate([[0.0], np.cumsum(descending)])
    k = np.arange(1, cheapest.size + 1)
    pigeonhole = sums[cheapest + 1] - sums[cheapest - k]
    return float(max(mean, descending[0], pigeonhole.max(initial=0.0)))


def microbatch_lower_bound(lengths: npt.NDArray[np.int64], num_ranks: int, capacity: int, multiple: int) -> int:
    """Microbatches per rank that every schedule needs, a positive multiple of `multiple`, for packs of at most
    `capacity` tokens.

    `lengths` is int64 [N], each in 1..capacity. Bound L2 of Martello and Toth, "Lower bounds and reduction procedures
    for the bin packing problem" (1990). O(N log N).
    """
    packs = _pack_lower_bound(np.sort(lengths), capacity) if lengths.size else 0
    return max(1, math.ceil(packs / (num_ranks * multiple))) * multiple


def _pack_lower_bound(ascending: npt.NDArray[np.int64], capacity: int) -> int:
    """Packs that sequences of these lengths need: the largest of one bound for each threshold t up to capacity / 2.

    Two sequences longer than capacity / 2 never share a pack. One longer than capacity - t has no room for t tokens, so
    sequences of t to capacity / 2 tokens fit only beside those in between, or into packs of their own.
    """
    sums = np.concatenate([[0], np.cumsum(ascending)])
    first_large = int(np.searchsorted(ascending, capacity // 2, side="right"))
    thresholds = np.concatenate([[0], ascending[:first_large]])
    first_small = np.searchsorted(ascending, thresholds, side="left")
    first_alone = np.searchsorted(ascending, capacity - thresholds, side="right")
    room_beside_large = (first_alone - first_large) * capacity - (sums[first_alone] - sums[first_large])
    overflow = np.maximum(sums[first_large] - sums[first_small] - room_beside_large, 0)
    packs = ascending.size - first_large + -(-overflow // capacity)
    return int(packs.max())
