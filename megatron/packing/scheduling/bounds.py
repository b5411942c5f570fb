"""pure. Lower bounds: of the modelled step time, to judge schedules by, and of the number of packs.

Invariant, tested by brute force: no schedule takes less than the bound. In pipelines no schedule of
even packs does, as 1F1B with small packs first and last is quicker (see `step_time`). The bounds
are the simple ones: the mean over ranks, the costliest sequence, and the pigeonhole principle.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from megatron.packing.scheduling.step_time import StepModel

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

GOOD_ENOUGH = 1.0002
"""Modelled time over its bound, at which searches end: no cost model is as accurate as that."""


def rank_cost_bound(cost: FloatArray, num_ranks: int) -> float:
    """Returns a lower bound of the costliest rank's cost, whatever the schedule; cost: float64 [N].

    The largest of: the mean over ranks; the costliest sequence; and for each k, of the k *
    num_ranks + 1 costliest sequences some rank holds k + 1, at the least the k + 1 cheapest of
    them.

        2 ranks, costs 5 4 4 4 1    ->    mean 9; costliest 5; of the three costliest two share a
                                          rank: 4 + 4 = 8
    """
    if cost.size == 0:
        return 0.0
    cost = -np.sort(-cost)
    sums = np.concatenate(([0.0], np.cumsum(cost)))
    # Of the costliest k * num_ranks + 1 sequences, the cheapest k + 1 end at place k * num_ranks.
    cheapest = np.arange(num_ranks, cost.size, num_ranks)
    k = np.arange(1, cheapest.size + 1)
    pigeonhole = sums[cheapest + 1] - sums[cheapest - k]
    return float(max(sums[-1] / num_ranks, cost[0], pigeonhole.max(initial=0)))


def fewest_packs(length: IntArray, capacity: int) -> int:
    """Returns a lower bound of the packs that sequences need.

    length: int64 [N], descending, each in 1..capacity.

    Bound L2 of Martello and Toth, "Lower bounds and reduction procedures for the bin packing
    problem" (1990): for each t up to capacity / 2, sequences longer than capacity - t are alone
    among those of t tokens or more; those longer than capacity / 2 have a pack each; and what is
    left of the others needs packs of its own. O(N log N).
    """
    if length.size == 0:
        return 0
    sums = np.concatenate(([0], np.cumsum(length)))
    num_large = int(np.searchsorted(-length, -(capacity // 2)))
    t = np.append(length[num_large:], 0)
    num_alone = np.searchsorted(-length[:num_large], t - capacity)
    free_beside_large = (num_large - num_alone) * capacity - (sums[num_large] - sums[num_alone])
    medium = np.append(sums[num_large + 1 :], sums[num_large]) - sums[num_large]
    overflow = np.maximum(medium - free_beside_large, 0)
    return max(int((num_large - (-overflow // capacity)).max()), -(-int(sums[-1]) // capacity))


def step_bound(
    cost: FloatArray, fixed: float, num_ranks: int, fewest: int, model: StepModel
) -> float:
    """Returns a lower bound of the step time with at least `fewest` microbatches.

    The largest of all stages' bounds: each does its share of all packs, after the first pack has
    come to it and before the last one has gone back. In the unit of the cost.

    Args:
        cost: float64 [N], of the sequences.
        fixed: cost of a microbatch besides.
        fewest: least number of microbatches.
    """
    of_rank = _rank_bound(cost, num_ranks, model)
    return max(
        _stage_bound(cost, of_rank, fixed, fewest, more, model) / stages
        for stages, more in model.stage_paces()
    )


def _rank_bound(cost: FloatArray, num_ranks: int, model: StepModel) -> float:
    """Returns a lower bound of the costliest rank's sum of packs as they run."""
    if cost.size and model.sync_every_microbatch:
        # The costliest packs of all microbatches make up one rank.
        return max(float(cost.sum()) / num_ranks, float(cost.max()))
    return rank_cost_bound(cost, num_ranks)


def _stage_bound(
    cost: FloatArray, of_rank: float, fixed: float, fewest: int, more: float, model: StepModel
) -> float:
    """Returns a lower bound of a stage's time over its share of a pack.

    more: packs that could be done while it is filled and drained.
    """
    if cost.size == 0:
        return fixed * (fewest + more)
    costliest = float(cost.max())
    longest = costliest * (1 + more)
    # Time falls with the number of microbatches, as there is less to fill and drain, and grows by
    # their fixed costs. The best number, were it any from the fewest on:
    if model.sync_every_microbatch:
        best = of_rank / costliest
    else:
        best = more * of_rank / (longest - of_rank) if longest > of_rank else math.inf
    best = min(best, math.sqrt(more * of_rank / fixed) if fixed > 0 else math.inf)
    num_microbatches = max(fewest, min(best, cost.size))
    mean = of_rank / num_microbatches
    filling = more * (max(mean, costliest) if model.sync_every_microbatch else mean)
    return max(of_rank + filling, longest) + fixed * (num_microbatches + more)
