"""pure. Schedules of the batches of schedule_cases.py by whatever `default` is on the Python path,
into a file.

    python examples/benchmarks/schedule_run.py --seed 1 --output schedules.pickle [--quick] [--time]

schedule.py calls it for this checkout and for another one; so it must run with the code of either.
"""

from __future__ import annotations

import argparse
import math
import pickle
import time
from pathlib import Path
from typing import Any

import numpy as np
from schedule_cases import COST, DISTRIBUTIONS, TIMED, Case, cases_of

from megatron.packing.scheduling.cost import PackCost
from megatron.packing.scheduling.step_time import StepModel

try:
    from megatron.packing.scheduling.problem import ScheduleRequest
    from megatron.packing.scheduling.registry import SCHEDULERS

    default = SCHEDULERS["default"]
except ImportError:  # before 2026-11-22
    from megatron.packing.scheduling.balance import default  # type: ignore[import-not-found,no-redef]
    from megatron.packing.scheduling.schedule import ScheduleRequest  # type: ignore[import-not-found,no-redef]

# Checkouts before 2026-11-24 name the field ranks_meet.
_HAS_NAME = hasattr(StepModel(), "sync_every_microbatch")
_SYNC: Any = {"sync_every_microbatch" if _HAS_NAME else "ranks_meet": True}
MODES = {
    "ranks": StepModel(),
    "synchronous": StepModel(**_SYNC),
    "8 stages": StepModel(num_stages=8),
    "8 stages, interleaved twice": StepModel(num_stages=8, num_virtual_stages=2, stage_group=8),
}
_ROUNDS = 5


def request_of(case: Case, model: StepModel, seed: int) -> ScheduleRequest:
    """Sequences drawn in equal shares by all ranks."""
    lengths = case.lengths(seed)
    return ScheduleRequest(
        lengths=lengths,
        source_rank=np.arange(case.size) * case.num_ranks // case.size,
        source_fetch=np.zeros(case.size, np.int64),
        num_ranks=case.num_ranks,
        num_fetches=1,
        capacity=case.capacity_factor * int(lengths.max()),
        cost=PackCost(*COST),
        microbatch_multiple=math.lcm(case.multiple, model.stage_group),
        model=model,
    )


def milliseconds(model: StepModel, size: int, num_ranks: int, seed: int) -> float:
    """Of the processor per call: the mean over distributions of the best of some calls, sorting
    included.
    """
    best = []
    for distribution in DISTRIBUTIONS:
        case = Case(
            distribution=distribution, size=size, num_ranks=num_ranks, capacity_factor=1, multiple=1
        )
        seconds = []
        for _ in range(_ROUNDS):
            request = request_of(case, model, seed)
            start = time.process_time()
            default(request)
            seconds.append(time.process_time() - start)
        best.append(min(seconds))
    return 1e3 * float(np.mean(best))


def main() -> None:
    """Write a dict: by mode and case the ranks, microbatches and their number; or by mode and size
    milliseconds.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--time", action="store_true")
    options = parser.parse_args()
    found: dict[tuple[str, object], object] = {}
    for mode, model in MODES.items():
        if options.time:
            for sizes in TIMED[: 2 if options.quick else None]:
                found[mode, sizes] = milliseconds(model, sizes[0], sizes[1], options.seed)
            continue
        for case in cases_of(options.quick):
            schedule = default(request_of(case, model, options.seed))
            found[mode, case] = schedule.rank, schedule.microbatch, schedule.num_microbatches
    options.output.write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main()
