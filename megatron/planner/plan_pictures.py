"""pure. The pictures of a plan: steps drawn on a page (--html), or in one image (--png)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron.packing.user_files import disk_fault
from megatron.planner.compare import Comparison
from megatron.planner.plan_options import PlanOptions
from megatron.planner.step_page import Table, page
from megatron.planner.step_picture import StepPicture, picture_of
from megatron.planner.step_record import StepRecord

_MAX_PLOTTED = 3
"""Steps in one image."""
_MAX_OPERATIONS = 60_000
"""Largest number of passes that is drawn: it takes a second or two."""


def draw(
    options: PlanOptions,
    comparison: Comparison,
    table: Table,
    advice: Sequence[str],
    lead: Sequence[str],
) -> None:
    """Writes the page and the image that the options ask for, and prints their paths."""
    if options.html is None and options.png is None:
        return
    pictures = _pictures(comparison.records)
    if pictures and options.html is not None:
        write(Path(options.html), page("Packing plan", " · ".join(lead), pictures, table, advice))
        print(f"\npage: {options.html}")
    if pictures and options.png is not None:
        _plot(options.png, pictures[:_MAX_PLOTTED])


def _pictures(records: Sequence[StepRecord]) -> list[StepPicture]:
    """Returns pictures of the steps. Prints the names of those with too many passes to draw."""
    seen = [record for record in records if operations_of(record) <= _MAX_OPERATIONS]
    if len(seen) < len(records):
        names = ", ".join(record.scheduler for record in records if record not in seen)
        print(f"\nnot drawn, as they have over {_MAX_OPERATIONS:,} passes of microbatches: {names}")
    return [picture_of(record) for record in seen]


def _plot(path: str, pictures: Sequence[StepPicture]) -> None:
    from megatron.planner.step_plot import figure_of

    figure = figure_of(pictures)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"--png {path}: {error}; give the path of a .png file") from error
    print(f"\npicture: {path}")


def operations_of(record: StepRecord) -> int:
    """Returns the number of forward and backward passes of a step, over all stages."""
    model = record.layout.model
    return record.num_microbatches * model.num_stages * model.num_virtual_stages * 2


def write(path: Path, text: str) -> None:
    """Writes a file. Raises ValueError if that is not possible."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path}: {disk_fault(error)}; give another place") from error
