"""pure. The text of a plan: the lines that state its assumptions, and the table of schedulers."""

from __future__ import annotations

import numpy as np

from megatron.packing.scheduling.cost import NUM_PASSES
from megatron.planner.compare import PADDED_TO_LONGEST, Comparison, Outcome
from megatron.planner.lengths import Lengths
from megatron.planner.plan_options import LayoutOptions, ModelOptions, PlanOptions
from megatron.planner.step_page import Table


def lead_of(
    found: Lengths,
    model: ModelOptions,
    layout: LayoutOptions,
    options: PlanOptions,
    capacity: int,
    count: int,
) -> list[str]:
    """Returns the lines above the table, with everything that the comparison assumes.

    Args:
        capacity: tokens of a pack over all context-parallel ranks.
        count: number of global batches.
    """
    lengths = found.lengths
    quantiles = np.quantile(lengths, (0.5, 0.9, 0.99)).astype(np.int64).tolist()
    devices = layout.dp * layout.tp * layout.pp * layout.cp
    sizes = (
        ("dp", layout.dp),
        ("tp", layout.tp),
        ("pp", layout.pp),
        ("vpp", layout.vpp),
        ("cp", layout.cp),
    )
    parts = [f"{name} {value}" for name, value in (*sizes, ("ep", layout.ep)) if value > 1] or [
        "one rank"
    ]
    num_layers, stages = model.shape().num_layers, ""
    if num_layers is not None and not layout.stage_layers.are_equal:
        of_parts = layout.stage_layers.of_parts(num_layers)
        stages = f"; stages of {' '.join(map(str, of_parts))} layers"
    speed = "" if model.pack_cost else f", {options.tflops_per_device:g} TFLOP/s per device assumed"
    batches = "1 global batch" if count == 1 else f"{count:,} global batches"
    lines = [
        f"lengths   {lengths.size:,} from {found.described}: mean {lengths.mean():,.0f}, median "
        f"{quantiles[0]:,}, 90% {quantiles[1]:,}, 99% {quantiles[2]:,}, longest {lengths.max():,} "
        "tokens",
        f"model     {model.described()}{speed}",
        f"layout    {', '.join(parts)} = {devices:,} device{'s' * (devices > 1)}"
        f"{stages}; "
        f"{capacity // layout.cp:,} tokens per rank and pack; {batches} of {layout.batch_size:,} "
        "sequences",
    ]
    trees = found.sequences.trees
    if trees is not None:
        apart = int(trees.path_tokens.sum())
        lines.append(
            f"trees     {found.sequences.num_tokens:,} tokens, as separate sequences {apart:,}; "
            "padding, the baseline, is of whole trees"
        )
    if layout.batch_size % layout.dp:
        lines.append(
            f"note      training needs a --global-batch-size that is a multiple of --dp {layout.dp}"
        )
    if count > 1:
        lines.append(f"table     means of the {batches}; pictures show the first")
    return [*lines, f"dropped   {found.dropped:,} records"] if found.dropped else lines


def forward_passes_line(count: int) -> str:
    """Returns the line about `count` forward passes beside those of training, for times."""
    passes = "a forward pass" if count == 1 else f"{count} forward passes"
    factor = 1 + count / NUM_PASSES
    return (
        f"reference each step has {passes} more than training alone, in the times: {factor:.2f} "
        "times as long"
    )


def table_of(comparison: Comparison, seconds_per_unit: float | None) -> Table:
    """Returns the table: a row per scheduler, with the fastest one highlighted."""
    outcomes = comparison.outcomes
    padded = next(outcome for outcome in outcomes if outcome.name == PADDED_TO_LONGEST)
    unit, scale = "time, units", 1.0
    if seconds_per_unit is not None:
        long = padded.step_cost * seconds_per_unit >= 60
        unit, scale = (
            ("time, s", seconds_per_unit) if long else ("time, ms", seconds_per_unit * 1000)
        )
    head = (
        "",
        "microbatches",
        "fill",
        "padding",
        "balance",
        "bubble",
        unit,
        "tokens/s",
        "to schedule",
    )
    rows = [_row(outcome, padded, scale) for outcome in outcomes]
    best = min(range(len(outcomes)), key=lambda place: outcomes[place].step_cost)
    return Table(head, rows, best)


def _row(outcome: Outcome, padded: Outcome, scale: float) -> tuple[str, ...]:
    spent = outcome.step_cost * scale
    return (
        outcome.name,
        f"{outcome.microbatches:,.1f}",
        f"{outcome.fill:.1%}",
        f"{outcome.padding:.1%}",
        f"{outcome.balance:.4f}",
        f"{outcome.bubble:.1%}",
        f"{spent:,.1f}" if 0.1 <= spent < 1e7 else f"{spent:.3g}",
        f"{padded.step_cost / outcome.step_cost:.2f}x",
        "" if outcome.schedule_seconds is None else f"{outcome.schedule_seconds * 1000:.1f} ms",
    )


def text_of(table: Table) -> list[str]:
    """Returns the lines of a table for a terminal."""
    rows = [tuple(table.head), *table.rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(table.head))]
    return [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    ]
