"""pure. Empty packs of pipelines, scheduled with and without the price of launching a pack's
kernels.

    OMP_NUM_THREADS=1 python examples/benchmarks/empty_packs.py
        (three minutes; prints the table of results/empty_packs.md)

The smallest pack takes `PackCost.least`, here 2 to 8 times what a microbatch's weights take to
move. A model of 8B parameters is at 1, cut by tensor parallel over 8 ranks at 8, one of 1B at 3.
At 0 a pack has no least time. The last column is what 1F1B gains by small packs at its ends: beside
the same search with packs of even size throughout.
"""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import numpy as np
from schedule_cases import SEED, cases_of
from schedule_run import MODES, request_of

from megatron.packing.scheduling import pipeline_order
from megatron.packing.scheduling.default import default
from megatron.packing.scheduling.problem import Schedule, ScheduleRequest

SIZES = (64, 256)
"""Sequences of the batches."""


def needless_packs(request: ScheduleRequest, schedule: Schedule) -> int:
    """Empty packs of a schedule that has more microbatches than the sequences need."""
    if schedule.num_microbatches == request.fewest_microbatches:
        return 0
    return schedule.num_ranks * schedule.num_microbatches - np.unique(schedule.pack).size


def with_even_packs(request: ScheduleRequest) -> Schedule:
    """Returns the schedule of `default` where no size of packs but one is tried."""
    with mock.patch.object(pipeline_order, "best_shape", lambda _, number, *sizes: np.ones(number)):
        return default(request)


def row(mode: str, factor: int) -> str:
    """A line of the table: means over batches, and sums of packs."""
    ratios, over_bound, over_even = [], [], []
    packs, empty = np.zeros(2, int), np.zeros(2, int)
    for case in cases_of(True):
        if case.size not in SIZES:
            continue
        blind = request_of(case, MODES[mode], SEED)
        cost = replace(blind.cost, least=factor * blind.cost.fixed)
        request = replace(blind, cost=cost)
        schedules = default(blind), default(request)
        times = [request.time_of(schedule) for schedule in schedules]
        ratios.append(times[0] / times[1])
        over_bound.append(times[1] / request.bound)
        over_even.append(times[1] / request.time_of(with_even_packs(request)))
        packs += [schedule.num_ranks * schedule.num_microbatches for schedule in schedules]
        empty += [needless_packs(request, schedule) for schedule in schedules]
    mean, kept, gain = (
        float(np.exp(np.log(values).mean())) for values in (ratios, over_bound, over_even)
    )
    return (
        f"| {mode} | {factor} | {len(ratios)} | {mean:.4f} | {max(ratios):.3f} | {min(ratios):.3f} "
        f"| {empty[0]} of {packs[0]:,} | {empty[1]} of {packs[1]:,} | {kept:.3f} "
        f"| {gain:.4f} |"
    )


def main() -> None:
    """Prints the table."""
    print(
        "| mode | least over fixed | batches | time without over with | worst | best | needless "
        "empty packs without | with | time over the bound of even packs | over even sizes |"
    )
    print("|" + " --- |" * 10)
    for mode in ("8 stages", "8 stages, interleaved twice"):
        for factor in (0, 2, 4, 8):
            print(row(mode, factor), flush=True)


if __name__ == "__main__":
    main()
