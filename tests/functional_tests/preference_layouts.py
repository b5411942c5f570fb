"""Preference losses in many parallel layouts beside answers that are computed one by one:

    python -m tests.functional_tests.preference_layouts --write PAGE [--only TEXT]

Each row of the page is a layout with a loss: the largest difference of loss, gradients and weights
over two steps, relative as the oracle measures it.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator
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


def measured(only: str) -> Iterator[tuple[Row, float]]:
    rows = (Row(*layout, loss) for layout, loss in itertools.product(LAYOUTS, LOSSES))
    for row in rows:
        if only in str(row):
            found = row.measure()
            print(f"{found:.1e} {row}", flush=True)
            yield row, found


def page(found: list[tuple[Row, float]], only: str = "") -> str:
    """Returns the page in Markdown. only: part of the rows that were measured; "" for all."""
    layouts = list(dict.fromkeys((row.layout, row.more) for row, _ in found))
    by_row = {tuple(row): value for row, value in found}
    lines = [
        "# Preference losses in parallel layouts",
        "",
        f"`make preference-layouts` on {time.strftime('%Y-%m-%d')}, torch {version('torch')}, "
        f"megatron-core {version('megatron-core')}, float64 on CPU.",
        "",
        *([f"A part of the matrix: `--only '{only}'`.", ""] if only else []),
        "Two steps of 7 records in each layout beside answers that are computed one by one, each "
        "loss written again: the largest difference of loss, gradients and weights, relative to "
        "the loss, to the largest gradient of the module and to the largest weight. In each layout "
        "the first margins of `sigmoid`, `ipo` and their mixture are 0 to the bit, also with "
        "adapters that are continued (`lora`). `chats`: two of the records are chats to imitate "
        "(`--sft-weight`). `file`: the reference is a file that the layout wrote first, of records "
        "in another order; the first margins are at most 1e-12.",
        "",
        f"| layout | {' | '.join(LOSSES)} |",
        f"|---|{'---|' * len(LOSSES)}",
    ]
    for layout, more in layouts:
        cells = [by_row.get((layout, more, loss)) for loss in LOSSES]
        shown = " | ".join("" if cell is None else f"{cell:.1e}" for cell in cells)
        lines.append(f"| {layout} {more.replace('--', '')} | {shown} |".replace("  ", " "))
    worst = max(value for _, value in found)
    return "\n".join([*lines, "", f"Largest of {len(found)}: {worst:.1e}.", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--only", default="", help="part of a row's name")
    given = parser.parse_args()
    found = list(measured(given.only))
    if given.write is not None:
        given.write.write_text(page(found, given.only), encoding="utf-8")
    over = [str(row) for row, value in found if not value <= LIMIT]
    if over:
        raise SystemExit(f"over {LIMIT:.0e}: {', '.join(over)}")


if __name__ == "__main__":
    main()
