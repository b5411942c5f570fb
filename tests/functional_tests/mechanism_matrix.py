"""Mechanisms, alone and in pairs, in parallel layouts: each is exact, or refused in a line.

    python -m tests.functional_tests.mechanism_matrix --results mechanisms.jsonl --minutes 10
    python -m tests.functional_tests.mechanism_matrix --results mechanisms.jsonl --write FILE.md

Each case that ends is a line of JSON, with the megatron-core that it ran with; started again, those
that hold are left out. `--write` runs what is missing, and writes the page of all releases in the
file.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from itertools import combinations
from pathlib import Path
from typing import Any

import megatron.core

from examples.benchmarks.provenance import commit
from tests.functional_tests.mechanism_pairs import (
    CASES,
    LAYOUTS,
    LAYOUTS_OF_PAIRS,
    MECHANISMS,
    TOLERANCE,
    TRUE_REFUSALS,
    Case,
    expected_refusal,
    train,
)

Records = dict[tuple[str, str], dict[str, Any]]
"""Release of megatron-core and case -> what became of it."""


def read_records(results: Path) -> Records:
    """Returns the last line of each case."""
    lines = results.read_text().splitlines() if results.exists() else []
    return {(line["core"], line["case"]): line for line in map(json.loads, lines)}


def fault_of(case: Case, record: dict[str, Any]) -> str | None:
    """Returns what is wrong with an outcome; None for a small difference, and for a refusal that is
    known to be true.
    """
    expected = expected_refusal(case)
    if record["fault"] is not None:
        return str(record["fault"])
    if record["refusal"] is not None:
        is_true = expected is not None and expected in record["refusal"]
        return None if is_true else f"refused: {record['refusal']}"
    if expected is not None:
        return f"not refused, though {expected}"
    is_exact = record["difference"] <= TOLERANCE
    return None if is_exact else f"differs by {record['difference']:.1e}"


def run(case: Case) -> dict[str, Any]:
    """Returns the record of a case."""
    started = time.monotonic()
    record: dict[str, Any] = {"core": megatron.core.__version__, "case": str(case)}
    record |= {"difference": None, "refusal": None, "loss": None, "fault": None}
    try:
        record |= train(case)._asdict()
    except AssertionError as failure:
        lines = [line for line in str(failure).splitlines() if line.strip()]
        record["fault"] = f"{lines[0]}: {lines[-1]}"
    return record | {"seconds": round(time.monotonic() - started, 1)}


def table(
    records: Records, core: str, groups: Sequence[tuple[str, ...]], layouts: Sequence[str]
) -> list[str]:
    """Returns a table of mechanisms by layouts: differences, and numbers of refusals."""
    lines = [f"| | {' | '.join(layouts)} |", "|---" * (len(layouts) + 1) + "|"]
    for group in groups:
        cells = []
        for case in (Case(group, layout) for layout in layouts):
            record = records.get((core, str(case)))
            if record is None:
                cells.append("not run")
            elif fault_of(case, record) is not None:
                cells.append(f"**{fault_of(case, record)}**")
            elif record["refusal"] is not None:
                number = [*TRUE_REFUSALS, None].index(expected_refusal(case)) + 1
                cells.append(f"refused ({number})")
            else:
                cells.append(f"{record['difference']:.1e}")
        lines.append(f"| {' + '.join(group)} | {' | '.join(cells)} |")
    return lines


def spread_of_losses(records: Records) -> float:
    """Returns the largest relative difference of a case's loss between releases."""
    losses: dict[str, list[float]] = {}
    for (_, case), record in records.items():
        if record["loss"] is not None:
            losses.setdefault(case, []).append(record["loss"])
    return max(max(each) / min(each) - 1 for each in losses.values())


def summary(records: Records, cores: Sequence[str]) -> str:
    """Returns a paragraph of how many cases hold, and what the numbers are."""
    cases = {str(case): case for case in CASES}
    held = sum(fault_of(cases[key[1]], record) is None for key, record in records.items())
    refused = sum(record["refusal"] is not None for record in records.values())
    not_run = len(cores) * len(CASES) - len(records)
    return (
        f"{held} of {len(records)} cases hold: {held - refused} are exact, {refused} refused in "
        f"one line on all ranks. {not_run} were not run. A number is the largest difference of "
        "loss, gradients and weights after a step from each sequence alone in one process, "
        f"float64. It may be {TOLERANCE:g}. Images are the embeddings that payloads bring, fields "
        "weight each token's loss. Between releases the loss of a case differs by "
        f"{spread_of_losses(records):.1e} at most."
    )


def page(records: Records) -> str:
    """Returns Markdown: of each release a table of mechanisms alone, and one of pairs."""
    names = {str(case) for case in CASES}
    known = {key: record for key, record in records.items() if key[1] in names}
    cores = sorted({core for core, _ in known})
    lines = [
        "# Mechanisms in pairs",
        "",
        f"{date.today()}, commit {commit()}, CPU, torch {version('torch')} (Python "
        f"{platform.python_version()}) in the last run, megatron-core {' and '.join(cores)}",
        "",
        "```",
        "make mechanisms",
        "```",
        "",
        summary(known, cores),
        "",
        "Refused, and why:",
        "",
        *(f"{n}. `{line}`: {why}" for n, (line, why) in enumerate(TRUE_REFUSALS.items(), 1)),
    ]
    alone = [(mechanism,) for mechanism in MECHANISMS]
    pairs = list(combinations(MECHANISMS, 2))
    for core in cores:
        lines += ["", f"## megatron-core {core}", "", *table(known, core, alone, list(LAYOUTS))]
        lines += ["", *table(known, core, pairs, LAYOUTS_OF_PAIRS)]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--results", type=Path, required=True, help="a line of JSON per case")
    parser.add_argument("--minutes", type=float, help="start no further case after so many")
    parser.add_argument("--write", type=Path, help="page to write, once all have run")
    options = parser.parse_args()
    options.results.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    core = megatron.core.__version__
    for number, case in enumerate(CASES, 1):
        record = read_records(options.results).get((core, str(case)))
        if record is not None and fault_of(case, record) is None:
            continue
        if options.minutes is not None and time.monotonic() - started > 60 * options.minutes:
            sys.exit(f"{len(CASES) - number + 1} of {len(CASES)} cases are left; start it again")
        record = run(case)
        print(f"{core}: {case}: {fault_of(case, record) or 'holds'}", flush=True)
        with options.results.open("a") as file:
            file.write(json.dumps(record) + "\n")
    records = read_records(options.results)
    if options.write is not None:
        options.write.write_text(page(records))
    bad = [str(case) for case in CASES if fault_of(case, records[core, str(case)]) is not None]
    sys.exit(f"{len(bad)} of {len(CASES)} cases do not hold: {'; '.join(bad)}" if bad else 0)


if __name__ == "__main__":
    main()
