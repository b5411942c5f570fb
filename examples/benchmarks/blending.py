"""pure. Blending beside megatron-energon: CPU per sample, time to the first batch, memory; on the
same files.

    python -m venv energon_venv && energon_venv/bin/pip install torch==2.13.0
        megatron-energon==7.4.1
    python examples/benchmarks/blending.py --energon-python energon_venv/bin/python
        (ten minutes; writes results)
    python examples/benchmarks/blending.py --energon-python energon_venv/bin/python --quick
        (a minute; prints)

The files, and the barest loop over them, are those of blending_files.py. The two run in turn, each
time in a fresh process; figures are CPU time where the machine may be shared, and medians over
rounds. Without --energon-python ours is measured alone.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blending_files import WEIGHTS, Way, floor, make_data
from provenance import commit, processor

ROOT = Path(__file__).parents[2]
PROCESS = Path(__file__).parent / "blending_process.py"
RESULTS = Path(__file__).parent / "results" / "blending.md"

ENERGON = "megatron-energon==7.4.1"


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How much is measured."""

    rounds: int
    shards: int
    """Of each data set."""
    our_samples: int
    energon_samples: int
    long_samples: int


FULL = Scale(
    rounds=3, shards=20, our_samples=128_000, energon_samples=9_600, long_samples=10_000_000
)
QUICK = Scale(rounds=1, shards=4, our_samples=32_000, energon_samples=3_200, long_samples=2_000_000)


def run(python: str, package: str, way: Way, **asked: Any) -> dict[str, Any]:
    """What one process found."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["OMP_NUM_THREADS"] = "1"
    if package == "megatron.blending":
        environment["PYTHONPATH"] = str(ROOT)
    case = {
        "package": package,
        "path": way.path,
        "is_crude": way.is_crude,
        "num_workers": 0,
        "imports_torch": True,
        "is_long": False,
        **asked,
        "started": time.monotonic(),
    }
    done = subprocess.run(
        [python, str(PROCESS), json.dumps(case)], env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{package}, {way.name}: {done.stderr[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    for name, share in found.get("shares", {}).items():
        if abs(share - WEIGHTS[name]) > 0.1:
            raise SystemExit(
                f"{package}, {way.name}: a share of {share} for {name}; the two do not do the same "
                "work"
            )
    return found


class Results:
    """Figures of all rounds, by who, way, number of workers and name."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, str, int, str], list[float]] = defaultdict(list)
        self.torch: dict[str, str] = {}

    def add(self, who: str, way: Way, num_workers: int, found: dict[str, Any]) -> None:
        self.torch[who] = found.pop("torch", "")
        for name, value in found.items():
            if isinstance(value, (int, float)):
                self._values[who, way.name, num_workers, name].append(value)

    def median(self, who: str, way: Way, num_workers: int, name: str) -> float | None:
        values = self._values[who, way.name, num_workers, name]
        return statistics.median(values) if values else None


def measure(ways: list[Way], scale: Scale, energon: str | None) -> Results:
    """Each round all cases, ours and energon in turn, who is first changing from round to round."""
    results = Results()
    for number in range(scale.rounds):
        for way in ways:
            results.add("floor", way, 0, floor(way))
            for num_workers in (0, 2):
                print(
                    f"round {number + 1}: {way.name}, {num_workers} workers",
                    file=sys.stderr,
                    flush=True,
                )
                ours, theirs = (
                    {"num_samples": scale.our_samples},
                    {"num_samples": scale.energon_samples},
                )
                runs = [
                    (
                        "alone",
                        sys.executable,
                        "megatron.blending",
                        {"num_samples": 3_200, "imports_torch": False},
                    ),
                    ("ours", sys.executable, "megatron.blending", ours),
                ]
                if energon is not None:
                    runs.append(("energon", energon, "megatron.energon", theirs))
                for who, python, package, asked in runs[:: -1 if number % 2 else 1]:
                    results.add(
                        who,
                        way,
                        num_workers,
                        run(python, package, way, num_workers=num_workers, **asked),
                    )
    return results


def _table(columns: list[str], rows: list[list[str]]) -> list[str]:
    return [
        "",
        *("| " + " | ".join(row) + " |" for row in [columns, ["---"] * len(columns), *rows]),
        "",
    ]


def _number(value: float | None, places: int = 2) -> str:
    return "-" if value is None else f"{value:,.{places}f}"


def _ratio(ours: float | None, theirs: float | None) -> str:
    return "-" if not ours or theirs is None else f"1/{theirs / ours:.1f}"


def report(ways: list[Way], results: Results) -> str:
    """The tables, in Markdown."""
    cases = [(way, num_workers) for way in ways for num_workers in (0, 2)]

    def compared(name: str, places: int, ours: str = "ours") -> list[list[str]]:
        rows = []
        for way, workers in cases:
            found = [results.median(who, way, workers, name) for who in (ours, "energon")]
            rows.append(
                [
                    way.name,
                    str(workers),
                    *(_number(value, places) for value in found),
                    _ratio(*found),
                ]
            )
        return rows

    lines = ["## CPU microseconds per sample, all processes"]
    floors = [
        [results.median("floor", way, 0, name) for name in ("slice", "text")] for way, _ in cases
    ]
    rows = [
        row + [_number(value) for value in values]
        for row, values in zip(compared("cpu_us", 2), floors)
    ]
    head = ["files", "workers", "ours", "energon", "ratio"]
    lines += _table([*head, "floor: slices", "floor: slices, to text"], rows)
    lines += [
        "## Seconds to the first batch",
        "",
        "After the imports that a user writes; what a package imports later, when it is used, "
        "counts:",
    ]
    lines += _table(head, compared("first_after_imports", 3))
    lines += [
        "From the start of the process, imports and all (energon imports torch; ours does not for "
        "text):"
    ]
    lines += _table(head, compared("first_with_imports", 2, "alone"))
    lines += ["CPU seconds up to then, which other work on the machine changes less:"]
    lines += _table(head, compared("first_cpu", 2, "alone"))
    lines += [
        "## Memory of a worker, MB",
        "",
        "Own (not shared with other processes), after the run:",
    ]
    lines += _table(head, compared("own_mb", 0))
    lines += ["Peak, with all that is shared, such as torch and mapped files:"]
    lines += _table(head, compared("peak_mb", 0))
    return "\n".join(lines)


def growth(way: Way, num_samples: int, num_workers: int) -> str:
    """Memory of ours over a long run."""
    print(f"{num_samples:,} samples, {num_workers} workers", file=sys.stderr, flush=True)
    asked = {"num_workers": num_workers, "num_samples": num_samples, "is_long": True}
    marks = run(sys.executable, "megatron.blending", way, **asked)["marks"]
    lines = [f"## Memory over {num_samples:,} samples, ours, {num_workers} workers, MB", ""]
    lines += ["All processes together, not counting mapped files, after so many million samples:"]
    columns = [f"{count / 1e6:g}" for count, _ in marks]
    return "\n".join(lines + _table(columns, [[f"{megabytes:.1f}" for _, megabytes in marks]]))


NOTES = """\
Both packages run examples/benchmarks/blending_process.py, on files that `python -m
megatron.blending prepare` made: three data sets, blended 0.5, 0.3 and 0.2 by a MetadatasetV2 YAML,
batches of 32, shuffle_buffer_size and max_samples_per_sequence 100, get_loader. Files are in the
page cache. CPU is user and system time of the process and its workers, after a warm-up. torch is
imported before either package, but for what is counted from the start of the process. The floor
maps the files and takes slices at known places, 100 after another; to text: decoded, or parsed. A
ratio is ours over energon's. Pages of mapped files count as memory of whoever maps them, though the
system may take them back: as its own, where no other process maps them. The machine was shared with
other work: seconds of waiting are
inflated for both, CPU less so."""


def _where(results: Results, rounds: int, load: float) -> str:
    peer = (
        f"{ENERGON} (torch {results.torch['energon']})"
        if "energon" in results.torch
        else "energon not measured"
    )
    return (
        f"{datetime.date.today()}, commit {commit()}, Python {platform.python_version()}, "
        f"torch {results.torch['ours']}, {peer}; {os.cpu_count()} cores of "
        f"{processor()}, load average {load:.0f} before and "
        f"{os.getloadavg()[0]:.0f} after; medians of {rounds} rounds."
    )


def main() -> None:
    """Print the tables, and write them where the run is the full one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--energon-python", metavar="PATH", help="Python with megatron-energon; without, ours alone"
    )
    parser.add_argument(
        "--quick", action="store_true", help="one round of little data; prints only"
    )
    options = parser.parse_args()
    scale = QUICK if options.quick else FULL
    if options.energon_python is None:
        print("without --energon-python: ours alone", file=sys.stderr)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        ways = make_data(Path(folder), scale.shards)
        measured = ways[:1] if options.quick else ways
        results = measure(measured, scale, options.energon_python)
        tables = (
            report(measured, results)
            + "\n"
            + growth(ways[0], scale.long_samples, 0 if options.quick else 2)
        )
    command = "python examples/benchmarks/blending.py"
    command += " --energon-python energon_venv/bin/python" if options.energon_python else ""
    command += " --quick" if options.quick else ""
    where = _where(results, scale.rounds, load)
    text = f"# Blending beside energon\n\n{where}\n\n```\n{command}\n```\n\n{tables}\n{NOTES}\n"
    print(text)
    if not options.quick:
        RESULTS.write_text(text)


if __name__ == "__main__":
    main()
