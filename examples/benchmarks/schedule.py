"""pure. Schedules of `default` beside those of another checkout and of other algorithms, on the
same batches.

    OMP_NUM_THREADS=1 python examples/benchmarks/schedule.py --quick
        (a minute; prints)
    OMP_NUM_THREADS=1 python examples/benchmarks/schedule.py --beside ../before
        (writes results/schedule.md)

The folder given by --beside is a checkout of another commit (git worktree add ../before COMMIT),
with its extension built there (python setup.py build_ext --inplace).
"""

from __future__ import annotations

import argparse
import datetime
import math
import os
import pickle
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from provenance import commit, processor
from schedule_cases import SEED, TIMED, Case
from schedule_contenders import CONTENDERS, differencing_by_cost
from schedule_run import MODES, request_of

from megatron.packing.scheduling import compiled
from megatron.packing.scheduling.problem import Schedule, ScheduleRequest, check_schedule

HERE = Path(__file__).parent
RESULTS, SCHEDULING = HERE / "results" / "schedule.md", "megatron/packing/scheduling"
MAX_FOR_DIFFERENCING, MAX_FOR_OTHERS = 256, 8192
"""Sequences; more of them take seconds to minutes a call."""

Found = dict[tuple[str, Any], Any]


def run(checkout: Path, quick: bool, seed: int, is_timed: bool) -> Found:
    """What schedule_run.py writes with the code of that checkout."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "found.pickle"
        flags = (
            ["--seed", str(seed), "--output", str(output)]
            + ["--quick"] * quick
            + ["--time"] * is_timed
        )
        environment = {**os.environ, "PYTHONPATH": str(checkout.resolve())}
        subprocess.run(
            [sys.executable, str(HERE / "schedule_run.py"), *flags], env=environment, check=True
        )
        found: Found = pickle.loads(output.read_bytes())
    return found


def times_of(found: Found, seed: int) -> dict[tuple[str, Case], float]:
    """Modelled times, pipelines simulated, by the step model of this checkout; ValueError for an
    invalid schedule.
    """
    times = {}
    for (mode, case), (rank, microbatch, num_microbatches) in found.items():
        request = request_of(case, MODES[mode], seed)
        schedule = Schedule(rank, microbatch, case.num_ranks, num_microbatches)
        check_schedule(request, schedule)
        times[mode, case] = request.time_of(schedule)
    return times


def summary(ratios: list[float]) -> list[str]:
    """Geometric mean, 99th percentile, worst and best."""
    mean = math.exp(float(np.mean(np.log(ratios))))
    return [
        f"{mean:.4f}",
        f"{np.quantile(ratios, 0.99):.3f}",
        f"{max(ratios):.3f}",
        f"{min(ratios):.3f}",
    ]


def row(*columns: str) -> str:
    """Of a table in Markdown."""
    return "| " + " | ".join(columns) + " |"


def beside(
    now: dict[tuple[str, Case], float], before: dict[tuple[str, Case], float]
) -> Iterator[str]:
    """A table: times of this checkout over those of the other."""
    yield row("mode", "sequences", "batches", "new over old", "99%", "worst", "best")
    yield row(*["---"] * 7)
    for mode in MODES:
        for name, least, most in (
            ("all", 0, math.inf),
            ("up to 1,024", 0, 1024),
            ("more", 1025, math.inf),
        ):
            ratios = [
                time / before[mode, case]
                for (at, case), time in now.items()
                if at == mode and least <= case.size <= most
            ]
            if ratios:
                yield row(mode, name, str(len(ratios)), *summary(ratios))


def costs(names: dict[str, Found], folders: dict[str, Path], is_quick: bool) -> Iterator[str]:
    """A table: milliseconds and lines of code of each checkout."""
    timed = TIMED[: 2 if is_quick else None]
    yield row(
        "code",
        "mode",
        *(f"ms, {size:,} on {ranks:,}" for size, ranks in timed),
        "lines of code",
        "files",
    )
    yield row(*["---"] * (4 + len(timed)))
    for name, found in names.items():
        files = [
            path
            for path in sorted((folders[name] / SCHEDULING).iterdir())
            if path.suffix in (".py", ".cpp", ".hpp")
        ]
        lines = sum(len(path.read_text().splitlines()) for path in files)
        for mode in MODES:
            yield row(
                name,
                mode,
                *(f"{found[mode, sizes]:.1f}" for sizes in timed),
                f"{lines:,}",
                str(len(files)),
            )


def contenders(now: dict[tuple[str, Case], float], seed: int) -> Iterator[str]:
    """A table: times of other algorithms over those of `default`."""
    yield row("mode", "scheduler", "valid of", "over default", "99%", "worst", "best")
    yield row(*["---"] * 7)
    made: dict[tuple[str, Case], Schedule] = {}
    for mode, model in MODES.items():
        if model.num_virtual_stages > 1:
            continue
        for name, scheduler in CONTENDERS.items():
            ratios, total = [], 0
            for (at, case), time in now.items():
                most = MAX_FOR_DIFFERENCING if scheduler is differencing_by_cost else MAX_FOR_OTHERS
                if at != mode or case.size > most:
                    continue
                request: ScheduleRequest = request_of(case, model, seed)
                if (name, case) not in made:  # none of these knows modes
                    made[name, case] = scheduler(request)
                schedule = made[name, case]
                total += 1
                try:
                    check_schedule(request, schedule)
                except ValueError:
                    continue
                ratios.append(request.time_of(schedule) / time)
            yield row(mode, name, f"{len(ratios)} of {total}", *summary(ratios))


def report(quick: bool, other: Path | None, seed: int) -> str:
    """The tables, in Markdown."""
    mine = HERE.parents[1]
    now = times_of(run(mine, quick, seed, is_timed=False), seed)
    lines = [f"{len(now) // len(MODES)} batches of seed {seed:,}, in each mode.", ""]
    folders, milliseconds = {"this": mine}, {}
    if other is not None:
        folders = {f"{commit(other)} (old)": other, "this (new)": mine}
        lines += [
            "## Side by side",
            "",
            *beside(now, times_of(run(other, quick, seed, is_timed=False), seed)),
            "",
        ]
    for name, folder in folders.items():
        milliseconds[name] = run(folder, quick, seed, is_timed=True)
    lines += ["## What it takes", "", *costs(milliseconds, folders, quick), ""]
    lines += ["## Other algorithms", "", *contenders(now, seed), ""]
    return "\n".join(lines)


NOTES = """\
Times are those of the step model (megatron/packing/scheduling/step_time.py), of pipelines by
simulated 1F1B: their ratios' geometric mean, 99th percentile, worst and best. Milliseconds of the
processor: the best of five calls, mean over the eight distributions, sorting included. Other
algorithms, in Python, are left out above 8,192 sequences, and Karmarkar-Karp by cost above 256.
"""


def _where() -> str:
    form = "compiled" if compiled.CORE is not None else "not compiled"
    return (
        f"{datetime.date.today()}, commit {commit()}, Python {platform.python_version()}, "
        f"numpy {np.__version__}, placement {form}, one core of "
        f"{processor()}."
    )


def main() -> None:
    """Print the tables, and write them where the run is a full one beside another checkout."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer and smaller batches; prints only"
    )
    parser.add_argument("--beside", type=Path, help="folder of a checkout of another commit")
    parser.add_argument("--seed", type=int, default=SEED)
    options = parser.parse_args()
    command = (
        "OMP_NUM_THREADS=1 python examples/benchmarks/schedule.py" + " --quick" * options.quick
    )
    command += " --beside ../before" if options.beside else ""
    tables = report(options.quick, options.beside, options.seed)
    text = f"# Schedulers side by side\n\n{_where()}\n\n```\n{command}\n```\n\n{tables}\n{NOTES}"
    print(text)
    if options.beside is not None and not options.quick:
        RESULTS.write_text(text)


if __name__ == "__main__":
    main()
