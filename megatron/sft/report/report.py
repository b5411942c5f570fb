"""pure. What a run achieved, as a table and a picture: `python -m megatron.sft.report RUN_DIR`.

Reads `metrics.jsonl`, and `packs.jsonl` where there is one: a line per step with the lengths of the sequences, by
data-parallel rank and microbatch.

    {"iteration": 1, "capacity": 1024, "packs": [[[700, 300], [512]], [[1000], [600, 424]]]}
"""

import argparse
import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path

from megatron.sft.report.json_lines import read_jsonl
from megatron.sft.report.metrics_file import read_metrics
from megatron.sft.report.source_metrics import dropped_line
from megatron.sft.report.summary import Summary, ratio, summarize

PACKS_FILE = "packs.jsonl"
PLOT_FILE = "report.png"
MOST_SOURCES = 10


def source_rows(summary: Summary) -> list[tuple[str, str]]:
    """A row for each of the largest sources."""
    rows = [
        (
            f"source {name}",
            f"{source.num_sequences:,} samples, {source.num_tokens:,} tokens "
            f"({ratio(source.num_tokens, summary.num_tokens):.1%}), loss {source.before:.4f} -> {source.after:.4f}",
        )
        for name, source in list(summary.sources.items())[:MOST_SOURCES]
    ]
    left = len(summary.sources) - len(rows)
    return [*rows, ("", f"and {left} sources more")] if left else rows


def table(summary: Summary) -> list[tuple[str, str]]:
    """The report as (what, how much)."""
    loss = summary.training_loss
    rows = [
        ("trained", f"{summary.num_steps:,} steps, {summary.num_sequences:,} sequences, {summary.num_tokens:,} tokens"),
        ("training loss", f"{loss.before:.4f} -> {loss.after:.4f}   (means of the first and the last steps)"),
    ]
    for split, change in summary.held_out_loss.items():
        steps = f"(after step {change.first_step} and step {change.last_step})"
        rows.append((f"{split} loss", f"{change.before:.4f} -> {change.after:.4f}   {steps}"))
    rows += source_rows(summary)
    left_out = f"{summary.dropped_samples:,} dropped" + (
        f" ({dropped_line(summary.dropped)})" if summary.dropped else ""
    )
    rows += [
        ("speed", f"{summary.tokens_per_second:,.0f} tokens/s   (median step)"),
        ("", f"{summary.tflops_per_device:.3g} TFLOP/s per device   (median step)"),
        ("", f"{summary.data_share:.1%} of the time waiting for data"),
        ("padding", f"{summary.padding:.1%} of the tokens computed, {summary.baseline_padding:.1%} without packing"),
        (
            "padding removed",
            "none to remove"
            if math.isnan(summary.padding_removed)
            else f"{summary.padding_removed:.1%}, for {summary.fewer_tokens:.2f}x fewer tokens computed",
        ),
        *schedule_rows(summary),
        ("fill", f"{summary.fill:.1%} of the packs' capacity"),
        ("samples", f"{left_out}, {summary.cut_samples:,} cut"),
    ]
    if math.isfinite(summary.prediction_error):
        share = f"which were {summary.passes_share:.0%} of the time"
        rows.append(("prediction", f"{summary.prediction_error:.1%} mean absolute error of the passes, {share}"))
    if summary.delays:
        rows.append(("delay", f"{delay_histogram(summary.delays)}; {summary.waiting:,} still wait"))
    if summary.skipped_steps:
        rows.append(("optimizer", f"{summary.skipped_steps:,} steps skipped, as gradients overflowed"))
    names = ", ".join(f"{path.name}/" if path.is_dir() else path.name for path in summary.files)
    return [*rows, ("files", f"{summary.run_dir}: {names}")]


def schedule_rows(summary: Summary) -> list[tuple[str, str]]:
    """How good the schedules were, as (what, how much)."""
    mean, worst = summary.balance_mean, summary.balance_worst
    if summary.num_stages == 1:
        rows = [("balance", f"{mean:.4f} mean, {worst:.4f} worst   (modelled step time / lower bound)")]
    else:
        even = "modelled step time / least of even packs"
        rows = [("balance", f"{mean:.3f} mean, {worst:.3f} worst   ({even})"), ("bubble", f"{summary.bubble:.1%} mean")]
    if summary.num_ranks > 1:
        rows.append(("moved", f"{summary.moved:.1%} of the tokens, between data-parallel ranks"))
    return rows


def delay_histogram(delays: Sequence[int]) -> str:
    """`[90, 0, 8] -> "sequences by steps waited: 0: 90, 2: 8"`."""
    return "sequences by steps waited: " + ", ".join(f"{i}: {count:,}" for i, count in enumerate(delays) if count)


def print_report(summary: Summary) -> None:
    """Prints the table on stdout."""
    rows = table(summary)
    width = max(len(name) for name, _ in rows)
    rule = "-" * max(len(value) + width + 3 for _, value in rows)
    print(rule)
    for name, value in rows:
        print(f"{name:<{width}}   {value}")
    print(rule)


def report(run_dir: Path | str) -> None:
    """Draws `RUN_DIR/report.png`, where matplotlib is, and prints the table. ValueError as in `summarize`."""
    run_dir = Path(run_dir)
    summary = summarize(run_dir)
    if importlib.util.find_spec("matplotlib") is None:
        print_report(summary)
        print("no plot: matplotlib is missing; do pip install matplotlib")
        return
    from megatron.sft.report.plot import plot

    lines = read_jsonl(run_dir / PACKS_FILE) if (run_dir / PACKS_FILE).is_file() else []
    packs = [line for line in lines if any(any(rank) for rank in line["packs"])]
    plot(run_dir / PLOT_FILE, read_metrics(run_dir), packs, summary)
    print_report(summarize(run_dir))
    print(f"plot: {run_dir / PLOT_FILE}")


def main() -> None:
    """`python -m megatron.sft.report RUN_DIR`."""
    parser = argparse.ArgumentParser(description="Prints what a run achieved and draws RUN_DIR/report.png.")
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the folder that holds metrics.jsonl")
    try:
        report(parser.parse_args().run_dir)
    except ValueError as error:
        parser.exit(1, f"error: {error}\n")
