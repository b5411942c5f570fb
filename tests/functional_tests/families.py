"""Every family and mechanism beside transformers and peft, and whole runs of each, as a page.

    python -m tests.functional_tests.families --results families.jsonl --minutes 10
    python -m tests.functional_tests.families --results families.jsonl --write FILE.md

Each test that ends is a line of JSON; started again, those that passed are left out. `--write` runs
what is missing, and writes the page of all.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from examples.benchmarks.provenance import commit

FILES = {
    "test_hf_weights.py": "Older families beside transformers, by layout",
    "test_families.py": "Families beside transformers, on one rank and with TP2 + SP (EP2)",
    "test_quantized_releases.py": "Releases in fewer bits alone, beside what transformers "
    "dequantizes",
    "test_hf_training.py": "Twenty steps of AdamW beside transformers",
    "test_vision.py": "Chats with images beside transformers, each alone; mistakes, for scale",
    "test_lora_peft.py": "LoRA beside peft",
    "test_lora.py": "Adapters in layouts, beside merged weights on one process",
    "test_mechanisms.py": "Mechanisms whose parts are cut, beside the whole",
    "test_layouts.py": "Mechanisms in layouts, beside one process that trains each sequence alone",
    "test_mechanism_runs.py": "Whole runs that continue to the bit, and in another layout",
    "test_lora_run.py": "Whole runs of adapters",
}
"""Tests that are run -> what they compare."""
_FOLDER = Path("tests") / "functional_tests"
_NOT_OF_FAMILIES = re.compile(r"test_layouts.py::test_(?!mechanisms|stages)")
_ALL = {"FAMILIES": "all", "LAYOUTS": "all"}
_AT_ONCE = 12
"""Tests of one call of pytest: a minute or two."""


def collected(files: Sequence[str]) -> list[str]:
    """Returns the tests of files, as pytest names them."""
    paths = [str(_FOLDER / file) for file in files]
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", *paths],
        env=os.environ | _ALL,
        capture_output=True,
        text=True,
        check=True,
    )
    tests = [line for line in found.stdout.splitlines() if "::" in line]
    return [test for test in tests if not _NOT_OF_FAMILIES.search(test)]


def recorded(results: Path) -> dict[str, dict[str, Any]]:
    """Returns the last line of each test."""
    lines = results.read_text().splitlines() if results.exists() else []
    return {line["test"]: line for line in map(json.loads, lines)}


def run(tests: Sequence[str], results: Path, workers: int) -> None:
    """Runs tests, each of which adds a line to `results`."""
    options = ["-q", "-p", "tests.functional_tests.family_record", "-n", str(workers)]
    subprocess.run(
        [sys.executable, "-m", "pytest", *options, "--dist", "worksteal", *tests],
        env=os.environ | _ALL | {"RESULTS": str(results)},
    )


TITLES = {"families": "Families and mechanisms", "vision": "Vision models beside transformers"}
"""Target of make -> title of its page."""


def page(found: dict[str, dict[str, Any]], target: str = "families") -> str:
    """Returns Markdown: of each file a table of its tests, also of those that were not run."""
    num_passed, num_run = (
        sum(one["outcome"] in outcomes for one in found.values())
        for outcomes in (("passed",), ("passed", "failed", "skipped"))
    )
    names = ("torch", "megatron-core", "transformers", "peft")
    lines = [
        f"# {TITLES[target]}",
        "",
        f"{date.today()}, commit {commit()}, CPU, Python "
        f"{platform.python_version()}, " + ", ".join(f"{name} {version(name)}" for name in names),
        "",
        "```",
        f"make {target}",
        "```",
        "",
        f"{num_passed} of {num_run} tests passed, in "
        f"{sum(one['seconds'] for one in found.values()):.0f} s of theirs; {len(found) - num_run} "
        "were not run. Models are tiny and all of their tensors random; numbers are the largest "
        "differences in float64, relative to the largest element of a tensor (of losses: to the "
        "loss).",
    ]
    for file, what in FILES.items():
        own = {test: one for test, one in found.items() if f"/{file}::" in test}
        if not own:
            continue
        names_of = list(dict.fromkeys(name for one in own.values() for name in one["figures"]))
        header = ["test", "outcome", "s", *names_of]
        lines += ["", f"## {what}", "", f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
        for test, one in own.items():
            name = test.split("::")[1].removeprefix("test_")
            figures = [one["figures"].get(figure) for figure in names_of]
            cells = [name, one["outcome"], f"{one['seconds']:.1f}"]
            cells += ["" if figure is None else f"{figure:.1e}" for figure in figures]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--results", type=Path, required=True, help="a line of JSON per test")
    parser.add_argument("--minutes", type=float, help="start no further part after so many")
    parser.add_argument("--workers", type=int, default=2, help="tests at a time")
    parser.add_argument("--only", default="", help="files whose name holds this")
    parser.add_argument("--target", choices=TITLES, default="families", help="of make")
    parser.add_argument("--write", type=Path, help="page to write, once all have run")
    options = parser.parse_args()
    options.results.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    tests = collected([file for file in FILES if options.only in file])
    found = recorded(options.results)
    missing = [test for test in tests if found.get(test, {}).get("outcome") != "passed"]
    for first in range(0, len(missing), _AT_ONCE):
        if options.minutes is not None and time.monotonic() - started > 60 * options.minutes:
            sys.exit(f"{len(missing) - first} of {len(tests)} tests are left; start it again")
        run(missing[first : first + _AT_ONCE], options.results, options.workers)
    found = recorded(options.results)
    if options.write is not None:
        not_run = {"outcome": "not run", "seconds": 0.0, "figures": {}}
        of_all = {test: found.get(test, not_run) for test in tests}
        options.write.write_text(page(of_all, options.target))
    bad = [test for test in tests if found.get(test, {}).get("outcome") != "passed"]
    sys.exit(f"{len(bad)} of {len(tests)} tests do not hold: {', '.join(bad)}" if bad else 0)


if __name__ == "__main__":
    main()
