"""pure. Empty packs of pipelines, scheduled with and without the price of launching a pack's
kernels.

    OMP_NUM_THREADS=1 python examples/benchmarks/empty_packs.py
        (two minutes; prints the table of results/empty_packs.md)

The smallest pack takes `PackCost.least`, here 2 to 8 times what a microbatch's weights take to
move. A model of 8B parameters is at 1, cut by tensor parallel over 8 ranks at 8, one of 1B at 3.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from schedule_cases import SEED, cases_of
from schedule_run import MODES, request_of

from megatron.packing.scheduling.default import default
from megatron.packing.scheduling.problem import Schedule, ScheduleRequest

SIZES = (64, 256)
"""Sequences of the batches."""


def needless_packs(request: ScheduleRequest, schedule: Schedule) -> int:
    """Empty packs of a schedule that has more microbatches than the sequences need."""
    if schedule.num_microbatches == request.fewest_microbatches:
        return 0
    return schedule.num_ranks * schedule.num_microbatches - np.unique(schedule.pack).size


def row(mode: str, factor: int) -> str:
    """A line of the table: means over batches, and sums of packs."""
    ratios, over_bound, packs, empty = [], [], np.zeros(2, int), np.zeros(2, int)
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
        packs += [schedule.num_ranks * schedule.num_microbatches for schedule in schedules]
        empty += [needless_packs(request, schedule) for schedule in schedules]
    mean, kept = (float(np.exp(np.log(values).mean())) for values in (ratios, over_bound))
    return (
        f"| {mode} | {factor} | {len(ratios)} | {mean:.4f} | {max(ratios):.3f} | {min(ratios):.3f} "
        f"| {empty[0]} of {packs[0]:,} | {empty[1]} of {packs[1]:,} | {kept:.3f} |"
    )


def main() -> None:
    """Prints the table."""
    print(
        "| mode | least over fixed | batches | time without over with | worst | best | needless "
        "empty packs without | with | time over the bound of even packs |"
    )
    print("|" + " --- |" * 9)
    for mode in ("8 stages", "8 stages, interleaved twice"):
        for factor in (2, 4, 8):
            print(row(mode, factor), flush=True)


if __name__ == "__main__":
    main()
