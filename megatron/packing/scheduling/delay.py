"""pure. Delays sequences that would make every rank wait for them to a later step.

A sequence that costs more than a fair share of the step leaves the other ranks idle; enough of them
in one step keep all ranks busy. So they are delayed until there are enough ("outlier delay": Wang
et al., "WLB-LLM: Workload-Balanced 4D Parallelism for Large Language Model Training", 2025). What
is enough needs no threshold to be set:

    mode ranks                     the sequence and all that cost no more, shared out evenly, give
                                   each rank as much to do as the sequence alone
    modes pipelines, synchronous   the same of one microbatch: a pack on each rank, filled with the
                                   sequence and the costliest ones after it

    2 ranks, costs 12 3 3 2 1      -> 12 is delayed, as 21 < 2 * 12; the others leave, as 9 >= 2 * 3
    then    12 and 12 3 2 2        -> all leave, as 31 >= 2 * 12

With one rank, and where lengths are alike, nothing is delayed.

Invariants: no sequence is delayed by more than `max_steps` steps; at least half of the sequences,
and as many as there are ranks, are not delayed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.packing.scheduling.cost import PackCost
from megatron.packing.scheduling.step_time import StepModel

IntArray = npt.NDArray[np.int64]


def outliers_to_delay(
    lengths: IntArray,
    cost: PackCost,
    steps_delayed: IntArray,
    *,
    num_ranks: int,
    pack_capacity: int,
    max_steps: int,
    squares: IntArray | None = None,
    payload_costs: npt.NDArray[np.float64] | None = None,
) -> npt.NDArray[np.bool_]:
    """Chooses the sequences that are delayed to the next step: bool [N]. O(N log N).

    Args:
        lengths: int64 [N], of all sequences of this step and those delayed before.
        steps_delayed: int64 [N], steps by which each has been delayed so far.
        pack_capacity: tokens of a pack, or those of all sequences where packs do not matter
            (`capacity_that_matters`).
        squares: int64 [N], see `PackCost.of_sequences`.
        payload_costs: float64 [N], beside that of tokens; None where there are no payloads.

    From the costliest sequence down: one that must leave, or has company enough, leaves with that
    company; the others are delayed, until the first one that is no more than a fair share of the
    rest.
    """
    of_all = cost.of_sequences(lengths, squares=squares)
    by_size: npt.NDArray[Any] = lengths
    if payload_costs is not None:
        of_all = by_size = of_all + payload_costs
    order = np.lexsort((-steps_delayed, -by_size))  # of equals the oldest leave first
    length, costs = lengths[order], of_all[order]
    cost_before = np.concatenate(([0.0], np.cumsum(costs)))
    tokens_before = np.concatenate(([0], np.cumsum(length)))
    first = np.arange(length.size)
    # `end`: the first sequence beyond a microbatch of full packs that begins with `first`.
    full = tokens_before[:-1] + num_ranks * pack_capacity
    end = np.maximum(np.searchsorted(tokens_before, full, side="right") - 1, first + 1)
    leaves = steps_delayed[order] >= max_steps
    # A millionth apart, sums of floats count as equal.
    leaves |= num_ranks * costs * (1 - 1e-6) <= cost_before[end] - cost_before[:-1]
    num_packs = np.maximum(-(-(tokens_before[-1] - tokens_before[:-1]) // pack_capacity), num_ranks)
    is_fair = num_packs * costs * (1 - 1e-6) <= cost_before[-1] - cost_before[:-1]
    num_costly = int(is_fair.argmax()) if is_fair.any() else length.size
    place, last = 0, min(num_costly, length.size - max(-(-length.size // 2), num_ranks))
    is_delayed = np.zeros(length.size, np.bool_)
    while place < last:
        if leaves[place]:
            place = int(end[place])
        else:
            is_delayed[order[place]] = True
            place += 1
    return is_delayed


def capacity_that_matters(model: StepModel, capacity: int, lengths: IntArray) -> int:
    """Pack capacity, or the tokens of all sequences where only the sums of ranks count."""
    return max(int(lengths.sum()), 1) if model.only_rank_sums_count else capacity
