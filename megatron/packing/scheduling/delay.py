"""pure. Which sequences of a step wait for later ones: those that would make every rank wait for them.

A sequence that costs more than a fair share of the step leaves the other ranks idle; enough of them in one step keep
all ranks busy. So they wait for one another ("outlier delay": Wang et al., "WLB-LLM: Workload-Balanced 4D Parallelism
for Large Language Model Training", 2025). What is enough needs no threshold to be set:

    ranks that meet at the end     the sequence and all that cost no more, shared out evenly, give each rank as much to
      of the step                  do as the sequence alone
    pipelines, and ranks that      the same of one microbatch: a pack on each rank, filled with the sequence and the
      meet at every microbatch     costliest ones after it

    2 ranks, costs 12 3 3 2 1      -> 12 waits, as 21 < 2 * 12; the others leave, as 9 >= 2 * 3
    then    12 and 12 3 2 2        -> all leave, as 31 >= 2 * 12

With one rank, and where lengths are alike, nothing waits.

Invariants: no sequence waits once it has waited `max_steps`; at least half of the sequences, and as many as there are
ranks, do not wait; the answer depends on nothing but the arguments (exact integers), so all ranks find the same.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megatron.packing.scheduling.step_time import StepModel
from megatron.packing.scheduling.work import Work

IntArray = npt.NDArray[np.int64]


def outliers_that_wait(
    work: Work, age: IntArray, *, num_ranks: int, pack_capacity: int, max_steps: int
) -> npt.NDArray[np.bool_]:
    """Whether each sequence waits for the next step, bool [N] in global order. O(N log N).

    work, age: all that are at hand, those that wait among them; age is int64 [N] in global order, steps waited so far.
    pack_capacity: tokens of a pack, or those of all sequences where packs do not matter (`capacity_that_matters`).

    From the costliest sequence down: one that must leave, or has company enough, leaves with that company; the others
    wait, until the first one that is no more than a fair share of the rest.
    """
    order = np.lexsort((-age[work.order], -work.cost))  # of equals the oldest leave first
    cost, length = work.cost[order], work.length[order]
    cost_before, tokens_before = (np.concatenate(([0], np.cumsum(values))) for values in (cost, length))
    first = np.arange(cost.size)
    row = tokens_before[:-1] + num_ranks * pack_capacity
    end = np.maximum(np.searchsorted(tokens_before, row, side="right") - 1, first + 1)
    leaves = age[work.order][order] >= max_steps
    leaves |= num_ranks * cost <= cost_before[end] - cost_before[:-1]
    num_packs = np.maximum(-(-(tokens_before[-1] - tokens_before[:-1]) // pack_capacity), num_ranks)
    is_fair = num_packs * cost <= cost_before[-1] - cost_before[:-1]
    num_costly = int(is_fair.argmax()) if is_fair.any() else cost.size
    place, last = 0, min(num_costly, cost.size - max(-(-cost.size // 2), num_ranks))
    waits = np.zeros(cost.size, np.bool_)
    while place < last:
        if leaves[place]:
            place = int(end[place])
        else:
            waits[work.order[order[place]]] = True
            place += 1
    return waits


def capacity_that_matters(model: StepModel, capacity: int, lengths: IntArray) -> int:
    """What `outliers_that_wait` takes: the packs' capacity, or room for all where only the sums of ranks count."""
    only_ranks_matter = model.num_stages == 1 and not model.ranks_meet
    return max(int(lengths.sum()), 1) if only_ranks_matter else capacity
