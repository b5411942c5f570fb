"""pure. Schedulers side by side: modelled step time over the lower bound, validity and milliseconds.

    OMP_NUM_THREADS=1 python examples/benchmarks/schedule.py --quick    a minute; prints
    OMP_NUM_THREADS=1 python examples/benchmarks/schedule.py            ten minutes; writes results/schedule.md

`default` beside the algorithms of schedule_contenders.py, on the batches of schedule_cases.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import math
import platform
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from schedule_cases import DISTRIBUTIONS, SEED, Case, cases
from schedule_contenders import CONTENDERS, differencing_by_cost, in_global_order

from megatron.packing.scheduling import balance, native
from megatron.packing.scheduling.balance import default
from megatron.packing.scheduling.row_search import closer_bound
from megatron.packing.scheduling.schedule import Schedule, Scheduler, ScheduleRequest, check_schedule
from megatron.packing.scheduling.step_time import StepModel

RESULTS = Path(__file__).parent / "results" / "schedule.md"

MODES = {
    "dp": StepModel(),
    "pipeline of 8 stages": StepModel(num_stages=8),
    "sync": StepModel(ranks_meet=True),
}
PIPELINES = {
    "8 stages": StepModel(num_stages=8),
    "8 stages, interleaved twice": StepModel(num_stages=8, num_virtual_stages=2, stage_group=8),
}


MOST_FOR_DIFFERENCING = 8192
"""Sequences; more of them take minutes a call."""
LOOK_CLOSER = 1.02
"""Times the bound that `default` takes at least where `closer_bound`, a search of seconds, looks for a closer one."""
MOST_SIMULATED = 512
"""Microbatches; of longer pipelines the ends matter little."""


def unshaped(request: ScheduleRequest) -> Schedule:
    """What `default` finds for the flow shop: neither number nor order nor sizes of packs are chosen for 1F1B."""
    found = balance.search(request)[0]
    return in_global_order(request, *np.divmod(found.pack, found.num_microbatches), found.num_microbatches)


def time_of(request: ScheduleRequest, schedule: Schedule) -> int:
    """Modelled, in units of the work."""
    pack = schedule.pack[request.work.order]
    return request.model.time_of(request.work.pack_costs(pack, request.num_ranks, schedule.num_microbatches))


def bound_beside(request: ScheduleRequest, time: int, look_closer: float) -> int:
    """The request's bound, or a closer one where the time is more than so many times that."""
    bound = request.bound.time
    return closer_bound(request, time) if time > look_closer * bound else bound


@dataclass
class Record:
    """What one scheduler did in one mode."""

    ratios: list[float] = field(default_factory=list)
    """Of valid schedules."""
    num_invalid: int = 0

    def add(self, request: ScheduleRequest, schedule: Schedule, bound: int) -> None:
        try:
            check_schedule(request, schedule)
        except ValueError:
            self.num_invalid += 1
            return
        self.ratios.append(time_of(request, schedule) / bound)

    def columns(self) -> list[str]:
        invalid = f"{self.num_invalid / (len(self.ratios) + self.num_invalid):.1%}"
        if not self.ratios:
            return ["-", "-", "-", invalid]
        most = float(np.quantile(self.ratios, 0.99))
        return [f"{_mean(self.ratios):.4f}", f"{most:.3f}", f"{max(self.ratios):.3f}", invalid]


def _mean(ratios: list[float]) -> float:
    """Geometric."""
    return math.exp(float(np.mean(np.log(ratios))))


def compare(all_cases: list[Case]) -> dict[tuple[str, str], Record]:
    """By mode and scheduler."""
    records: dict[tuple[str, str], Record] = defaultdict(Record)
    for number, case in enumerate(all_cases):
        print(f"\r{number + 1} of {len(all_cases)}", end="", file=sys.stderr, flush=True)
        made: dict[str, Schedule] = {}
        for mode, model in MODES.items():
            request = case.request(model)
            found = unshaped(request)
            bound = bound_beside(request, time_of(request, found), LOOK_CLOSER)
            for name, scheduler in CONTENDERS.items():
                if scheduler is differencing_by_cost and case.size > MOST_FOR_DIFFERENCING:
                    continue
                # All but `default` know no modes. The flow shop, which bounds are for, gains nothing by uneven packs.
                if scheduler is default:
                    made[name] = found
                elif name not in made:
                    made[name] = scheduler(request)
                records[mode, name].add(request, made[name], bound)
    print(file=sys.stderr)
    return records


def milliseconds(scheduler: Scheduler, model: StepModel, size: int, num_ranks: int, rounds: int) -> float:
    """Per call: the mean over distributions of the best of some rounds, sorting and the bound included."""
    best = []
    for distribution in DISTRIBUTIONS:
        case = Case(distribution=distribution, size=size, num_ranks=num_ranks, capacity_factor=1, multiple=1)
        request, seconds = case.request(model, SEED + 1), []
        for _ in range(rounds):
            fresh = dataclasses.replace(request)  # without the sorted work and the bound that the last one kept
            start = time.perf_counter()
            scheduler(fresh)
            seconds.append(time.perf_counter() - start)
        best.append(min(seconds))
    return 1e3 * float(np.mean(best))


@dataclass
class Simulated:
    """Simulated times of `default`'s schedules, over other times."""

    over_ideal: list[float] = field(default_factory=list)
    """Over the best number of packs all of the same cost, where sequences allow about that."""
    over_equal: list[float] = field(default_factory=list)
    """Over the schedule found for the flow shop, whose packs are as equal as can be."""


def simulate_1f1b(all_cases: list[Case], model: StepModel) -> Simulated:
    """Of all batches but those with pipelines too long to simulate."""
    found = Simulated()
    more = model.num_stages - 1
    for number, case in enumerate(all_cases):
        print(f"\rsimulating {number + 1} of {len(all_cases)}", end=" " * 20, file=sys.stderr, flush=True)
        request = case.request(model)
        schedule, equal = default(request), unshaped(request)
        if max(schedule.num_microbatches, equal.num_microbatches) > MOST_SIMULATED:
            continue
        costs, equal_costs = (
            request.work.pack_costs(made.pack[request.work.order], request.num_ranks, made.num_microbatches)
            for made in (schedule, equal)
        )
        took = model.simulated_time_of(costs)
        found.over_equal.append(took / model.simulated_time_of(equal_costs))
        # Times count `num_stages` times over. In the flow shop, which bounds are for, a chunk is a whole stage.
        mean = float(equal_costs.mean())
        bounds = {entry.num_microbatches: entry.time for entry in request.bound.by_microbatches}
        if bounds.get(equal.num_microbatches, math.inf) < 1.001 * mean * (equal.num_microbatches + more):
            found.over_ideal.append(took / (mean * (equal.num_microbatches + more / model.num_virtual_stages)))
    return found


def report(quick: bool) -> str:
    """The tables, in Markdown."""
    sizes = (64, 256, 1024) if quick else (64, 256, 1024, 8192, 100_000)
    ranks = (1, 2, 8, 64) if quick else (1, 2, 8, 64, 512, 4096)
    timings = ((1024, 64), (8192, 512)) if quick else ((1024, 64), (8192, 512), (100_000, 4096))
    all_cases = list(cases(sizes, ranks, all_ways=not quick))
    records = compare(all_cases)
    lines = [
        f"{len(all_cases)} batches: N of {_listed(sizes)} on {_listed(ranks)} ranks, capacity 1 and 2 times "
        "the longest, microbatches a multiple of 1, 4 or 8."
    ]
    for mode, model in MODES.items():
        lines += ["", f"## {mode}", ""]
        columns = ["scheduler", "over the bound", "99%", "worst", "invalid"]
        columns += [f"ms, N={size:,} on {num_ranks:,}" for size, num_ranks in timings]
        lines += ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
        for name, scheduler in CONTENDERS.items():
            speeds = []
            for size, num_ranks in timings:
                too_many = scheduler is differencing_by_cost and size > MOST_FOR_DIFFERENCING
                rounds = 1 if scheduler is differencing_by_cost else 5
                print(f"\rtiming {mode}, {name}, {size}", end=" " * 20, file=sys.stderr, flush=True)
                speed = math.nan if too_many else milliseconds(scheduler, model, size, num_ranks, rounds)
                speeds.append("-" if too_many else f"{speed:.1f}")
            lines.append("| " + " | ".join([name, *records[mode, name].columns(), *speeds]) + " |")
    lines += ["", "## 1F1B, simulated", ""]
    lines += ["| pipeline | over the best equal-size schedule | worst | batches | over packs of one cost | batches |"]
    lines += ["|---|---|---|---|---|---|"]
    few = [case for case in all_cases if case.size <= 8192]
    for name, model in PIPELINES.items():
        found = simulate_1f1b(few, model)
        equal, ideal = found.over_equal, found.over_ideal
        columns = [name, f"{_mean(equal):.4f}", f"{max(equal):.3f}", f"{len(equal)}", f"{_mean(ideal):.4f}"]
        lines.append("| " + " | ".join([*columns, f"{len(ideal)}"]) + " |")
    print(file=sys.stderr)
    return "\n".join(lines)


NOTES = """\
Over the bound: geometric mean, 99th percentile and worst of the modelled step time (megatron/packing/scheduling/
step_time.py) over its lower bound, of valid schedules; of pipelines as flow shops with `default` as found for these.
Invalid: a pack over capacity. Milliseconds: the best of five calls, mean over the eight distributions, sorting and the
bound included; Karmarkar-Karp by cost (numpy and Python) is called once, and left out above 8,192 sequences.

Over the best equal-size schedule: simulated time of `default` over that of the schedule found for the flow shop, whose
packs are as equal as can be. Over packs of one cost: over (microbatches + stages - 1) packs of the mean cost, in
batches for which the bound allows about that; in most of these all sequences are of one length, so that packs have
no choice.

Where ranks meet and `default` takes more than 1.02 times the bound that it is given and that training prints, the bound
is a closer one (megatron/packing/scheduling/row_search.py), of which the milliseconds know nothing: it takes seconds.
"""


def _listed(numbers: tuple[int, ...]) -> str:
    return ", ".join(f"{number:,}" for number in numbers)


def _where() -> str:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout
    info = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    form = "compiled" if native.LIBRARY is not None else "not compiled"
    return (
        f"{datetime.date.today()}, commit {commit.strip()}, Python {platform.python_version()}, "
        f"numpy {np.__version__}, placement {form}, one core of {names[0] if names else platform.processor()}."
    )


def main() -> None:
    """Print the tables, and write them where the run is the full one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and smaller batches; prints only")
    quick = parser.parse_args().quick
    command = "OMP_NUM_THREADS=1 python examples/benchmarks/schedule.py" + (" --quick" if quick else "")
    text = f"# Schedulers side by side\n\n{_where()}\n\n```\n{command}\n```\n\n{report(quick)}\n\n{NOTES}\n"
    print(text)
    if not quick:
        RESULTS.write_text(text)


if __name__ == "__main__":
    main()
