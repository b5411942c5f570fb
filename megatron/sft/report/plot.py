"""pure. Draws the picture of a run: loss, waste, and the packs of a few steps. Needs matplotlib."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from megatron.packing.folder_gate import open_output
from megatron.sft.report.metrics import Evaluation, StepMetrics, mean_of_finite
from megatron.sft.report.metrics_file import Metrics

PACKS_DRAWN = 64
MEANS_DRAWN = 1000
# Colours of Okabe and Ito, which colour-blind people can distinguish.
BLUE, ORANGE, GREEN, PURPLE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
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


def plot(
    path: Path, metrics: Metrics, packs: Sequence[dict[str, Any]], padding_without_packing: float
) -> None:
    """Draws a PNG of a run.

    Args:
        packs: lines of packs.jsonl; may be empty.
        padding_without_packing: share of padding without packing, 0 to 1.
    """
    with rc_context(STYLE):
        figure = Figure(figsize=(11, 7.6 if packs else 3.8), dpi=130, layout="constrained")
        rows = figure.add_gridspec(2 if packs else 1, 2, width_ratios=(3, 2))
        plot_loss(figure.add_subplot(rows[0, 0]), metrics.steps, metrics.evaluations)
        plot_waste(figure.add_subplot(rows[0, 1]), metrics.steps, padding_without_packing)
        if packs:
            fill = sum(step.tokens for step in metrics.steps) / sum(
                step.capacity_tokens for step in metrics.steps
            )
            plot_packs(figure.add_subplot(rows[1, :]), packs, fill)
        with open_output(path, "wb") as file:
            figure.savefig(file, format="png")


def plot_series(
    axes: Axes, steps: Sequence[int], values: Sequence[float], color: str, label: str
) -> None:
    """Draws a faint line over steps, and its running mean over 2 % of the steps."""
    at, smooth = running_means(values)
    axes.plot(steps, values, color=color, alpha=0.25, linewidth=0.8)
    axes.plot([steps[place] for place in at], smooth, color=color, linewidth=1.8, label=label)
    axes.locator_params(axis="x", integer=True)


def running_means(values: Sequence[float]) -> tuple[list[int], list[float]]:
    """Returns places among the values, and the means of 2 % of the values around them.

    A mean is taken over as many values before as after, and at the ends over fewer. The places are
    at most 1,001, evenly apart: a mean at each of 10^5 steps would be 4 * 10^8 additions.
    """
    last, reach = len(values) - 1, len(values) // 50
    places = sorted({*range(0, len(values), max(1, -(-len(values) // MEANS_DRAWN))), max(0, last)})
    means = []
    for at in places if values else ():
        near = min(reach, at, last - at)
        means.append(mean_of_finite(values[at - near : at + near + 1]))
    return places[: len(means)], means


def plot_loss(axes: Axes, steps: Sequence[StepMetrics], evaluations: Sequence[Evaluation]) -> None:
    """Draws the training loss, smoothed, and the losses of held-out splits as points."""
    plot_series(
        axes, [step.iteration for step in steps], [step.loss for step in steps], BLUE, "training"
    )
    splits = dict.fromkeys(evaluation.split for evaluation in evaluations)
    # Three colours and four markers in turn make twelve pairs.
    for split, color, marker in zip(splits, cycle((ORANGE, GREEN, PURPLE)), cycle("osD^")):
        points = [(each.iteration, each.loss) for each in evaluations if each.split == split]
        axes.plot(
            *zip(*points),
            marker + "-",
            color=color,
            linewidth=1,
            markersize=5,
            label=f"held out: {split}",
        )
    axes.set(xlabel="step", ylabel="loss per token", title="Loss")
    axes.legend()


def plot_waste(axes: Axes, steps: Sequence[StepMetrics], padding_without_packing: float) -> None:
    """Draws the waste of each step in percent: padding, and the time over the lower bound, or with
    several pipeline stages the bubble.

    To add a curve, call `plot_series` once more.
    """
    iterations = [step.iteration for step in steps]
    if steps[-1].num_stages == 1:
        over_bound = [100 * (step.balance - 1) for step in steps]
        plot_series(axes, iterations, over_bound, ORANGE, "modelled time, over lower bound")
    else:
        plot_series(
            axes,
            iterations,
            [100 * step.bubble for step in steps],
            ORANGE,
            "bubble, of modelled time",
        )
    plot_series(
        axes,
        iterations,
        [100 * step.padding for step in steps],
        BLUE,
        "padding, of tokens computed",
    )
    axes.set(
        xlabel="step",
        ylabel="percent",
        title=f"Waste  (without packing, {padding_without_packing:.0%} is padding)",
    )
    axes.set_ylim(0, 1.35 * max(*axes.get_ylim(), 1))
    axes.legend(loc="upper left")


def plot_packs(axes: Axes, lines: Sequence[dict[str, Any]], fill: float) -> None:
    """Draws the packs of a few steps: stacks of sequences, in front of the capacity."""
    drawn = packs_to_draw(lines)
    at = [pack.at for pack in drawn]
    axes.bar(at, [pack.capacity for pack in drawn], width=1, color="#E8E8E8")
    boxes = [
        (pack.at, length, sum(pack.lengths[:index]))
        for pack in drawn
        for index, length in enumerate(pack.lengths)
    ]
    lengths = [length for _, length, _ in boxes]
    color: Any = ScalarMappable(
        LogNorm(min(lengths), max(min(lengths) + 1, *lengths)), colormaps["viridis_r"]
    )
    axes.bar(
        [x for x, _, _ in boxes],
        lengths,
        bottom=[bottom for _, _, bottom in boxes],
        width=1,
        color=color.to_rgba(lengths),
        edgecolor="white",
        linewidth=0.4,
    )
    axes.figure.colorbar(
        color, ax=axes, label="tokens of a sequence", format="{x:,.0f}", pad=0.01, aspect=30
    )
    ticks: dict[int, list[float]] = {}
    for pack in drawn:
        ticks.setdefault(pack.iteration, []).append(pack.at)
    axes.set_xticks(
        [statistics.fmean(places) for places in ticks.values()], [f"step {step}" for step in ticks]
    )
    axes.tick_params(axis="x", length=0)
    axes.set(
        ylabel="tokens",
        title=f"Packs, rank by rank  ({fill:.0%} filled over the run; grey is free capacity)",
    )
    axes.margins(x=0.01, y=0.02)


class DrawnPack(NamedTuple):
    """A pack as a bar of the picture."""

    iteration: int
    at: float
    """Place on the x axis."""
    capacity: int
    lengths: list[int]


def packs_to_draw(lines: Sequence[dict[str, Any]]) -> list[DrawnPack]:
    """Returns about `PACKS_DRAWN` packs, from steps that are spread evenly over the run. There is a
    gap between ranks, and a wider one between steps.
    """
    packs_per_step = max(sum(len(rank) for rank in line["packs"]) for line in lines)
    count = min(len(lines), max(1, PACKS_DRAWN // packs_per_step))
    drawn: list[DrawnPack] = []
    at = 0.0
    for index in range(count):
        # Evenly spread, with the last step: 3 of 100 lines are 33, 66 and 99.
        line = lines[(len(lines) - 1) * (index + 1) // count]
        for rank in line["packs"][: max(1, PACKS_DRAWN // len(line["packs"][0]))]:
            for lengths in rank:
                drawn.append(DrawnPack(line["iteration"], at, line["capacity"], lengths))
                at += 1
            at += 0.4
        at += 1.2
    return drawn
