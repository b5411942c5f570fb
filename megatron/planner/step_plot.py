"""pure. Scheduled steps as a matplotlib figure: as `step_page`, without words on single blocks.
Needs matplotlib.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from megatron.planner.step_blocks import Line
from megatron.planner.step_picture import StepPicture, ticks

_STYLE: Any = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 9.5,
    "font.size": 8.5,
    "legend.frameon": False,
}
_IDLE = "#ECEFF2"


def figure_of(pictures: Sequence[StepPicture]) -> Figure:
    """Draws all steps one under the other, on the time scale of the longest."""
    longest = max(picture.cost for picture in pictures) or 1.0
    rows: list[tuple[StepPicture, str, float]] = []
    for picture in pictures:
        rows.append((picture, "busy", 0.5))
        rows.append((picture, "ranks", _height(picture.ranks)))
        if picture.stages:
            rows.append((picture, "stages", _height(picture.stages)))
    with rc_context(_STYLE):
        heights = [height for *_, height in rows]
        figure = Figure(
            figsize=(11, sum(heights) + 0.75 * len(rows) + 0.3), dpi=130, layout="constrained"
        )
        figure.get_layout_engine().set(hspace=0.03)  # type: ignore[union-attr, call-arg]
        grid = figure.add_gridspec(
            len(rows), 1, height_ratios=[height + 0.35 for height in heights]
        )
        for place, (picture, kind, _) in enumerate(rows):
            axes = figure.add_subplot(grid[place])
            _draw(axes, picture, kind)
            _time_axis(
                axes, picture, longest, last=place == len(rows) - 1 or rows[place + 1][1] == "busy"
            )
    return figure


def _height(lines: Sequence[Line]) -> float:
    return min(3.2, max(0.4, 0.2 * len(lines)))


def _draw(axes: Axes, picture: StepPicture, kind: str) -> None:
    if kind == "busy":
        edges = np.linspace(0, 1, picture.busy.size + 1)
        axes.stairs(np.ones(picture.busy.size), edges, fill=True, color=_IDLE)
        axes.stairs(picture.busy, edges, fill=True, color="#7FA8C9")
        axes.set_ylim(0, 1)
        axes.set_yticks([0, 1], ["0%", "100%"])
        notes = [picture.facts, "; ".join(picture.notes), "share of all devices that computes"]
        axes.set_title("\n".join([picture.title, *filter(None, notes)]), fontsize=8.5)
        return
    lines = picture.ranks if kind == "ranks" else picture.stages
    _draw_lines(axes, lines)
    if kind == "ranks":
        where = ", as the last stage runs them" if picture.stages else ""
        axes.set_title(f"data-parallel ranks: packs{where}", fontsize=9)
        colour = colormaps["viridis_r"]
        handles = [
            Patch(color=colour(0.9 * fill), label=f"{fill:.0%} filled")
            for fill in (0.25, 0.5, 0.75, 1.0)
        ]
    else:
        axes.set_title(f"pipeline stages of rank {picture.slowest_rank}, the slowest", fontsize=9)
        handles = [
            Patch(color="#1C63A8", label="forward"),
            Patch(color="#CD6210", label="backward"),
        ]
    axes.legend(
        handles=handles,
        loc="lower right",
        bbox_to_anchor=(1, 1),
        ncols=4,
        borderaxespad=0.1,
        fontsize=8,
    )


def _draw_lines(axes: Axes, lines: Sequence[Line]) -> None:
    colours = {
        "pack": colormaps["viridis_r"],
        "forward": colormaps["Blues"],
        "backward": colormaps["Oranges"],
    }
    axes.barh(range(len(lines)), 1.0, height=0.85, color=_IDLE)
    corners, faces = [], []
    for row, line in enumerate(lines):
        for start, end, kind, shade, *_ in line.blocks:
            top, bottom = row - 0.42, row + 0.42
            corners.append(((start, top), (end, top), (end, bottom), (start, bottom)))
            faces.append(colours[kind](0.9 * shade if kind == "pack" else 0.3 + 0.55 * shade))
    edge = 0.3 if len(corners) < 3000 else 0.0
    axes.add_collection(
        PolyCollection(
            np.array(corners).tolist(), facecolors=faces, edgecolors="white", linewidths=edge
        )
    )
    every = max(1, len(lines) // 16)
    places = range(0, len(lines), every)
    axes.set_yticks(places, [lines[place].name for place in places])
    axes.set_ylim(len(lines) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)


def _time_axis(axes: Axes, picture: StepPicture, longest: float, *, last: bool) -> None:
    axes.set_xlim(0, longest / picture.cost if picture.cost else 1)
    if picture.bound <= 1:
        axes.axvline(picture.bound, color="#C0392B", linestyle=(0, (4, 3)), linewidth=0.9)
    axes.axvline(1.0, color="#1B2733", linewidth=0.9)
    if not last:
        axes.set_xticks([])
        axes.spines["bottom"].set_visible(False)
        return
    marks = ticks(picture, picture.cost / longest if picture.cost else 1.0)
    axes.set_xticks([share for share, _ in marks], [label for _, label in marks])
    bound = f"; dashed red: {picture.bound_name}" if picture.bound <= 1 else ""
    axes.set_xlabel(f"modelled time{bound}", loc="left")
