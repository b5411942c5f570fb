"""pure. What a run achieved, as a table and a picture: `python -m megatron.sft.report RUN_DIR`.

Reads `metrics.jsonl`, and `packs.jsonl` where there is one: a line per step with the lengths of the sequences, by
data-parallel rank and microbatch.

    {"iteration": 1, "capacity": 1024, "packs": [[[700, 300], [512]], [[1000], [600, 424]]]}

"Padded baseline" is the same sequences trained without packing, each padded to `seq_length`.
"""

import argparse
import importlib.util
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megatron.sft.metrics import METRICS_FILE, Evaluation, StepMetrics, read_jsonl, read_metrics

PACKS_FILE = "packs.jsonl"
PLOT_FILE = "report.png"
STEPS_PER_MEAN = 5
PACKS_DRAWN = 64

BLUE, ORANGE, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"  # Okabe and Ito's, for colour-blind eyes too
STYLE: Any = {
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.titlesize": 11,
    "figure.constrained_layout.hspace": 0.07,
    "figure.constrained_layout.wspace": 0.05,
    "font.size": 9,
    "grid.color": "#DDDDDD",
    "legend.frameon": False,
}


class Change(NamedTuple):
    """A loss at the start and at the end of a run."""

    before: float
    after: float
    first_step: int
    last_step: int


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A run in numbers. Shares are in 0..1; NaN where there is nothing to divide by."""

    run_dir: Path
    num_steps: int
    num_sequences: int
    num_tokens: int
    """Real ones."""
    training_loss: Change
    """Means of the first and the last few steps."""
    held_out_loss: dict[str, Change]
    """Per split, its first and last evaluation."""
    tokens_per_second: float
    """Median step."""
    tflops_per_device: float
    """Median step."""
    data_share: float
    """Share of the time that steps waited for data."""
    padding: float
    """Share of the computed tokens that was padding."""
    baseline_padding: float
    """The same for the padded baseline."""
    padding_removed: float
    """Share of the baseline's padding tokens that this run did not compute."""
    fewer_tokens: float
    """Tokens that the baseline computes for each one computed here."""
    balance_mean: float
    balance_worst: float
    fill: float
    """Share of the packs' capacity that real tokens took."""
    dropped_samples: int
    cut_samples: int
    skipped_steps: int
    files: list[Path]


def summarize(run_dir: Path | str) -> Summary:
    """The summary of the run in a folder; ValueError if its metrics are absent or hold no training step."""
    run_dir = Path(run_dir)
    steps, evaluations, events = read_metrics(run_dir)
    runs = [event for event in events if event["event"] == "run"]
    if not steps or not runs:
        missing = "training step" if runs else '"run" event'
        raise ValueError(f"{run_dir / METRICS_FILE} must hold at least one {missing}, but has none; train first")
    tokens = sum(step.tokens for step in steps)
    padded = sum(step.padded_tokens for step in steps)
    sequences = sum(step.sequences for step in steps)
    baseline = sequences * runs[-1]["seq_length"]
    return Summary(
        run_dir=run_dir,
        num_steps=len(steps),
        num_sequences=sequences,
        num_tokens=tokens,
        training_loss=training_change(steps),
        held_out_loss=held_out_changes(evaluations),
        tokens_per_second=statistics.median(step.tokens_per_second for step in steps),
        tflops_per_device=statistics.median(step.tflops_per_device for step in steps),
        data_share=ratio(sum(step.data_seconds for step in steps), sum(step.step_seconds for step in steps)),
        padding=1 - ratio(tokens, padded),
        baseline_padding=1 - ratio(tokens, baseline),
        padding_removed=1 - ratio(padded - tokens, baseline - tokens),
        fewer_tokens=ratio(baseline, padded),
        balance_mean=statistics.fmean(step.balance for step in steps),
        balance_worst=max(step.balance for step in steps),
        fill=ratio(tokens, sum(step.capacity_tokens for step in steps)),
        dropped_samples=sum(step.dropped_samples for step in steps),
        cut_samples=sum(step.cut_samples for step in steps),
        skipped_steps=sum(step.skipped for step in steps),
        files=sorted(run_dir.iterdir()),
    )


def ratio(numerator: float, denominator: float) -> float:
    """NaN rather than an error over zero."""
    return numerator / denominator if denominator else math.nan


def mean_of_finite(values: Iterable[float]) -> float:
    """One overflowed step shall not hide the others."""
    finite = [value for value in values if math.isfinite(value)]
    return statistics.fmean(finite) if finite else math.nan


def training_change(steps: Sequence[StepMetrics]) -> Change:
    """Means over `STEPS_PER_MEAN` steps at each end, over fewer in a run so short that they would overlap."""
    count = max(1, min(STEPS_PER_MEAN, len(steps) // 2))
    before = mean_of_finite(step.loss for step in steps[:count])
    after = mean_of_finite(step.loss for step in steps[-count:])
    return Change(before, after, steps[0].iteration, steps[-1].iteration)


def held_out_changes(evaluations: Sequence[Evaluation]) -> dict[str, Change]:
    """`[valid 5.6 @ 0, valid 3.1 @ 50, valid 2.4 @ 100] -> {"valid": (5.6, 2.4, 0, 100)}`."""
    changes: dict[str, Change] = {}
    for evaluation in evaluations:
        now = Change(evaluation.loss, evaluation.loss, evaluation.iteration, evaluation.iteration)
        first = changes.setdefault(evaluation.split, now)
        changes[evaluation.split] = Change(first.before, now.after, first.first_step, now.last_step)
    return changes


def table(summary: Summary) -> list[tuple[str, str]]:
    """The report as (what, how much)."""
    loss, mean, worst = summary.training_loss, summary.balance_mean, summary.balance_worst
    rows = [
        ("trained", f"{summary.num_steps:,} steps, {summary.num_sequences:,} sequences, {summary.num_tokens:,} tokens"),
        ("training loss", f"{loss.before:.4f} -> {loss.after:.4f}   (means of the first and the last steps)"),
    ]
    for split, change in summary.held_out_loss.items():
        steps = f"(after step {change.first_step} and step {change.last_step})"
        rows.append((f"{split} loss", f"{change.before:.4f} -> {change.after:.4f}   {steps}"))
    rows += [
        ("speed", f"{summary.tokens_per_second:,.0f} tokens/s   (median step)"),
        ("", f"{summary.tflops_per_device:.3g} TFLOP/s per device   (median step)"),
        ("", f"{summary.data_share:.1%} of the time waiting for data"),
        ("padding", f"{summary.padding:.1%} of the tokens computed, {summary.baseline_padding:.1%} without packing"),
        ("padding removed", f"{summary.padding_removed:.1%}, for {summary.fewer_tokens:.2f}x fewer tokens computed"),
        ("balance", f"{mean:.3f} mean, {worst:.3f} worst   (most loaded rank / lower bound)"),
        ("fill", f"{summary.fill:.1%} of the packs' capacity"),
        ("samples", f"{summary.dropped_samples:,} dropped, {summary.cut_samples:,} cut"),
    ]
    if summary.skipped_steps:
        rows.append(("optimizer", f"{summary.skipped_steps:,} steps skipped, as gradients overflowed"))
    names = ", ".join(f"{path.name}/" if path.is_dir() else path.name for path in summary.files)
    return [*rows, ("files", f"{summary.run_dir}: {names}")]


def print_report(summary: Summary) -> None:
    """Prints the table on stdout."""
    rows = table(summary)
    width = max(len(name) for name, _ in rows)
    rule = "-" * max(len(value) + width + 3 for _, value in rows)
    print(rule)
    for name, value in rows:
        print(f"{name:<{width}}   {value}")
    print(rule)


def plot(run_dir: Path | str, path: Path | str) -> None:
    """Draws loss, waste and, where `packs.jsonl` is, the packs of a few steps into a PNG. Needs matplotlib."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    run_dir = Path(run_dir)
    summary = summarize(run_dir)
    steps, evaluations, _ = read_metrics(run_dir)
    packs = read_jsonl(run_dir / PACKS_FILE) if (run_dir / PACKS_FILE).is_file() else []
    with rc_context(STYLE):
        figure = Figure(figsize=(11, 7.6 if packs else 3.8), dpi=130, layout="constrained")
        rows = figure.add_gridspec(2 if packs else 1, 2, width_ratios=(3, 2))
        plot_loss(figure.add_subplot(rows[0, 0]), steps, evaluations)
        plot_waste(figure.add_subplot(rows[0, 1]), steps, summary)
        if packs:
            plot_packs(figure.add_subplot(rows[1, :]), packs, summary)
        figure.savefig(path)


def plot_series(axes: Any, steps: Sequence[int], values: Sequence[float], color: str, label: str) -> None:
    """A line over steps; where they are many, its running mean over the faint line itself."""
    last, reach = len(values) - 1, len(values) // 50
    smooth = []
    for at in range(len(values)):
        near = min(reach, at, last - at)
        smooth.append(mean_of_finite(values[at - near : at + near + 1]))
    axes.plot(steps, values, color=color, alpha=0.25, linewidth=0.8)
    axes.plot(steps, smooth, color=color, linewidth=1.8, label=label)
    axes.xaxis.get_major_locator().set_params(integer=True)


def plot_loss(axes: Any, steps: Sequence[StepMetrics], evaluations: Sequence[Evaluation]) -> None:
    """Training loss, smoothed where there are many steps, and the held-out points."""
    plot_series(axes, [step.iteration for step in steps], [step.loss for step in steps], BLUE, "training")
    splits = dict.fromkeys(evaluation.split for evaluation in evaluations)
    for split, color, marker in zip(splits, (ORANGE, GREEN, PURPLE), "osD"):
        points = [(each.iteration, each.loss) for each in evaluations if each.split == split]
        axes.plot(*zip(*points), marker + "-", color=color, linewidth=1, markersize=5, label=f"held out: {split}")
    axes.set(xlabel="step", ylabel="loss per token", title="Loss")
    axes.legend()


def plot_waste(axes: Any, steps: Sequence[StepMetrics], summary: Summary) -> None:
    """What a step computed in vain, and how much more than the others the most loaded rank had to do."""
    iterations = [step.iteration for step in steps]
    plot_series(
        axes, iterations, [100 * (step.balance - 1) for step in steps], ORANGE, "most loaded rank, over lower bound"
    )
    plot_series(axes, iterations, [100 * step.padding for step in steps], BLUE, "padding, of tokens computed")
    axes.set(
        xlabel="step", ylabel="percent", title=f"Waste  (without packing, {summary.baseline_padding:.0%} is padding)"
    )
    axes.set_ylim(0, 1.35 * max(*axes.get_ylim(), 1))
    axes.legend(loc="upper left")


def plot_packs(axes: Any, lines: Sequence[dict[str, Any]], summary: Summary) -> None:
    """The packs of a few steps as stacks of sequences under the capacity."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm

    drawn = packs_to_draw(lines)
    at = [pack.at for pack in drawn]
    axes.bar(at, [pack.capacity for pack in drawn], width=1, color="#E8E8E8")
    boxes = [
        (pack.at, length, sum(pack.lengths[:index])) for pack in drawn for index, length in enumerate(pack.lengths)
    ]
    lengths = [length for _, length, _ in boxes]
    color: Any = ScalarMappable(LogNorm(min(lengths), max(min(lengths) + 1, *lengths)), colormaps["viridis_r"])
    axes.bar(
        [x for x, _, _ in boxes],
        lengths,
        bottom=[bottom for _, _, bottom in boxes],
        width=1,
        color=color.to_rgba(lengths),
        edgecolor="white",
        linewidth=0.4,
    )
    axes.figure.colorbar(color, ax=axes, label="tokens of a sequence", format="{x:,.0f}", pad=0.01, aspect=30)
    ticks: dict[int, list[float]] = {}
    for pack in drawn:
        ticks.setdefault(pack.iteration, []).append(pack.at)
    axes.set_xticks([statistics.fmean(places) for places in ticks.values()], [f"step {step}" for step in ticks])
    axes.tick_params(axis="x", length=0)
    axes.set(ylabel="tokens", title=f"Packs, rank by rank  ({summary.fill:.0%} filled over the run; grey is room left)")
    axes.margins(x=0.01, y=0.02)


class DrawnPack(NamedTuple):
    """One bar of the picture."""

    iteration: int
    at: float
    """Place on the x axis."""
    capacity: int
    lengths: list[int]


def packs_to_draw(lines: Sequence[dict[str, Any]]) -> list[DrawnPack]:
    """About `PACKS_DRAWN` packs, of steps evenly spread over the run; gaps part the ranks, wider ones the steps."""
    packs_per_step = max(sum(len(rank) for rank in line["packs"]) for line in lines)
    count = min(len(lines), max(1, PACKS_DRAWN // packs_per_step))
    drawn: list[DrawnPack] = []
    at = 0.0
    for index in range(count):
        line = lines[(len(lines) - 1) * (index + 1) // count]
        for rank in line["packs"][: max(1, PACKS_DRAWN // len(line["packs"][0]))]:
            for lengths in rank:
                drawn.append(DrawnPack(line["iteration"], at, line["capacity"], lengths))
                at += 1
            at += 0.4
        at += 1.2
    return drawn


def main() -> None:
    """`python -m megatron.sft.report RUN_DIR`: prints the report and draws `RUN_DIR/report.png`."""
    parser = argparse.ArgumentParser(description="Prints what a run achieved and draws RUN_DIR/report.png.")
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the folder that holds metrics.jsonl")
    run_dir = parser.parse_args().run_dir
    try:
        has_matplotlib = importlib.util.find_spec("matplotlib") is not None
        if has_matplotlib:
            plot(run_dir, run_dir / PLOT_FILE)
        print_report(summarize(run_dir))
    except ValueError as error:
        parser.exit(1, f"error: {error}\n")
    print(
        f"plot: {run_dir / PLOT_FILE}"
        if has_matplotlib
        else "no plot: matplotlib is missing; do pip install matplotlib"
    )


if __name__ == "__main__":
    main()
