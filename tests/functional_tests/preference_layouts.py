"""Preference losses in many parallel layouts beside answers that are computed one by one:

    python -m tests.functional_tests.preference_layouts --results FOLDER --write PAGE [--only TEXT]

Each cell of the page is a layout with a loss: the largest difference of loss, gradients and weights
over two steps, relative as the oracle measures it. What is measured is kept in FOLDER, in a file
for each release of megatron-core: a stopped run continues, and the page has a table for each.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import time
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from tests.functional_tests.layouts import MODELS, Layout
from tests.functional_tests.oracle import (
    Step,
    assemble,
    largest_difference,
    train_one_by_one,
    train_packed,
)
from tests.functional_tests.preference import (
    CASES,
    OneByOne,
    PreferencePasses,
    batches_of,
    losses_of,
    scores_of,
    with_file,
)
from tests.functional_tests.ranks import run_ranks

LIMIT = 1e-12
LORA = "--lora --lora-rank 4"
FULL = "--recompute-granularity full"
LAYOUTS: list[tuple[Layout, str]] = [
    (Layout(model="learned"), ""),
    (Layout(model="grouped"), FULL),
    (Layout(model="grouped"), LORA),
    (Layout(data=2, model="tied"), ""),
    (Layout(data=3, model="grouped", optimizer="sharded"), ""),
    (Layout(data=4, model="grouped"), LORA),
    (Layout(data=2, model="experts", optimizer="overlapped"), ""),
    (Layout(data=2, model="grouped", optimizer="overlapped", scheduler="dp_balanced"), ""),
    (Layout(tensor=2, model="grouped"), ""),
    (Layout(tensor=2, sequence=True, model="tied"), ""),
    (Layout(tensor=2, sequence=True, model="experts"), ""),
    (Layout(tensor=2, sequence=True, data=2, model="grouped"), LORA),
    (Layout(pipeline=2, model="learned"), ""),
    (Layout(pipeline=2, data=2, model="tied", scheduler="empty"), ""),
    (Layout(pipeline=4, model="grouped"), ""),
    (Layout(pipeline=2, interleaved=True, model="grouped"), ""),
    (Layout(pipeline=2, interleaved=True, data=2, model="tied", optimizer="sharded"), ""),
    (Layout(pipeline=2, data=2, model="tied", pipeline_before_data=True), ""),
    (Layout(context=2, model="grouped"), ""),
    (Layout(context=2, model="grouped"), LORA),
    (Layout(context=3, data=2, model="tied", scheduler="dp_balanced"), ""),
    (Layout(context=2, data=2, model="experts"), ""),
    (Layout(context=4, model="learned"), ""),
    (Layout(tensor=2, sequence=True, pipeline=2, model="grouped"), ""),
    (Layout(tensor=2, sequence=True, pipeline=2, model="grouped"), LORA),
    (Layout(tensor=2, sequence=True, pipeline=2, context=2, model="grouped"), FULL),
    (Layout(tensor=2, sequence=True, context=2, model="tied", optimizer="sharded"), ""),
    (Layout(tensor=2, context=2, data=2, model="grouped", optimizer="overlapped"), ""),
    (Layout(pipeline=2, context=2, data=2, model="tied", optimizer="sharded"), ""),
    (Layout(tensor=2, pipeline=2, data=2, sequence=True, model="experts", optimizer="sharded"), ""),
]
LOSSES = (
    *("sigmoid", "sigmoid, chats", "ipo, ld_alpha", "ipo, ld_alpha, file"),
    *("sigmoid, bco_pair, sft", "orpo", "kto", "reward"),
)


class Row(NamedTuple):
    """A layout with a loss."""

    layout: Layout
    more: str
    loss: str

    def __str__(self) -> str:
        return " ".join(filter(None, (f"{self.layout}", self.more.replace("--", ""), self.loss)))

    def measure(self) -> float:
        """Returns the largest relative difference."""
        case = CASES[self.loss]
        flags = (
            f"{self.layout.flags} {self.layout.depth} {self.more} --max-seqlen-per-dp-cp-rank 96 "
            f"{scores_of(case)}"
        )
        batches = batches_of(case)
        with TemporaryDirectory() as folder:
            passes = partial(PreferencePasses, with_file(case, folder), batches=batches)
            run = partial(train_packed, passes=passes)
            ranks = run_ranks(run, self.layout.world_size, flags, batches)
        return largest_difference(assemble(ranks), expected(self.layout, self.more, self.loss))


@cache
def _expected(model: str, loss: str) -> list[Step]:
    batches = batches_of(CASES[loss])
    objective = OneByOne(CASES[loss], batches)
    run = partial(train_one_by_one, objective=objective, losses_alone=losses_of(CASES[loss]))
    found: list[Step] = run_ranks(run, 1, model, batches)[0]
    return found


def expected(layout: Layout, more: str, loss: str) -> list[Step]:
    """Returns the steps of answers one by one, once for each model."""
    adapters = more if more == LORA else ""
    model = f"{MODELS[layout.model]} {layout.depth} {adapters} {scores_of(CASES[loss])}"
    return _expected(model, loss)


ROWS = [Row(*layout, loss) for layout, loss in itertools.product(LAYOUTS, LOSSES)]


class Versions(NamedTuple):
    """What rows were measured with."""

    core: str
    torch: str
    python: str
    date: str

    @classmethod
    def here(cls) -> Versions:
        # A checkout that is installed has its commit behind the version.
        core = version("megatron-core").split("+")[0]
        return cls(core, version("torch"), platform.python_version(), time.strftime("%Y-%m-%d"))


def measure(path: Path, only: str) -> None:
    """Measures the rows that `path` does not have yet, and adds a line for each."""
    done = {name for name, _ in read(path)}
    rows = [row for row in ROWS if only == str(row)] or [row for row in ROWS if only in str(row)]
    with path.open("a") as file:
        for row in rows:
            if str(row) not in done:
                found = row.measure()
                print(f"{found:.1e} {row}", flush=True)
                line = {"row": str(row), "difference": found, "versions": Versions.here()}
                file.write(f"{json.dumps(line)}\n")
                file.flush()


def read(path: Path) -> list[tuple[str, Measured]]:
    """Returns the names of rows, with what was measured."""
    if not path.exists():
        return []
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [
        (line["row"], Measured(line["difference"], Versions(*line["versions"]))) for line in lines
    ]


class Measured(NamedTuple):
    difference: float
    versions: Versions


def page(folder: Path) -> str:
    """Returns the page in Markdown, with a table for each file of `folder`."""
    lines = [
        "# Preference losses in parallel layouts",
        "",
        "`make preference-layouts`, float64 on CPU.",
        "",
        "Two steps of 7 records in each layout beside answers that are computed one by one, each "
        "loss written again: the largest difference of loss, gradients and weights, relative to "
        "the loss, to the largest gradient of the module and to the largest weight. In each layout "
        "the first margins of `sigmoid`, `ipo` and their mixture are 0 to the bit, also with "
        "adapters that are continued (`lora`). `chats`: two of the records are chats to imitate "
        "(`--sft-weight`). `file`: the reference is a file that the layout wrote first, of records "
        "in another order; the first margins are at most 1e-12.",
    ]
    for path in sorted(folder.glob("*.jsonl")):
        lines += ["", *_table(dict(read(path)))]
    return "\n".join([*lines, ""])


def _table(found: dict[str, Measured]) -> list[str]:
    values = list(found.values())
    (core,), torches, pythons, dates = (
        sorted(set(each)) for each in zip(*(one.versions for one in values))
    )
    numbers = [one.difference for one in values]
    many = f"All {len(ROWS)}" if len(numbers) == len(ROWS) else f"{len(numbers)} of {len(ROWS)}"
    lines = [
        f"## megatron-core {core}",
        "",
        f"On {' to '.join(dict.fromkeys((dates[0], dates[-1])))}, torch {', '.join(torches)}, "
        f"Python {', '.join(pythons)}. {many} were run: {min(numbers):.1e} to {max(numbers):.1e}.",
        "",
        f"| layout | {' | '.join(LOSSES)} |",
        f"|---|{'---|' * len(LOSSES)}",
    ]
    for layout, more in LAYOUTS:
        cells = [found.get(str(Row(layout, more, loss))) for loss in LOSSES]
        shown = " | ".join("" if cell is None else f"{cell.difference:.1e}" for cell in cells)
        if any(cells):
            lines.append(f"| {layout} {more.replace('--', '')} | {shown} |".replace("  ", " "))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, required=True, help="folder of what was measured")
    parser.add_argument("--write", type=Path)
    parser.add_argument("--only", default="", help="a row's name, or a part of it")
    given = parser.parse_args()
    given.results.mkdir(parents=True, exist_ok=True)
    path = given.results / f"{Versions.here().core}.jsonl"
    measure(path, given.only)
    if given.write is not None:
        given.write.write_text(page(given.results), encoding="utf-8")
    over = [row for row, found in read(path) if not found.difference <= LIMIT]
    if over:
        raise SystemExit(f"over {LIMIT:.0e}: {', '.join(over)}")


if __name__ == "__main__":
    main()
