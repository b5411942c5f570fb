"""pure. Scheduled steps as one HTML page without other files: SVG, no script, each block with a
tooltip.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

import numpy as np

from megatron.planner.step_blocks import Block, Line
from megatron.planner.step_picture import StepPicture, ticks

_LEFT, _WIDTH, _RIGHT = 74, 1000, 26
"""Widths in a drawing, in pixels: labels, lines, margin."""
_FILL_STOPS = (
    (0.0, (253, 231, 37)),
    (0.5, (53, 183, 121)),
    (0.75, (33, 145, 140)),
    (1.0, (49, 74, 125)),
)
_FORWARD = ((0.0, (191, 215, 237)), (1.0, (28, 99, 168)))
_BACKWARD = ((0.0, (250, 216, 180)), (1.0, (205, 98, 16)))
_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; color: #1b2733;
  background: #f5f6f8;
  margin: 0; padding: 32px 24px 64px; }
main { max-width: 1148px; margin: 0 auto; }
h1 { font-size: 26px; margin: 0 0 4px; letter-spacing: -.01em; }
h2 { font-size: 18px; margin: 0; }
p { margin: 4px 0 12px; }
.muted { color: #5b6875; }
section { background: #fff; border: 1px solid #e1e5ea; border-radius: 10px;
  padding: 20px 24px; margin: 20px 0; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 6px 10px; border-bottom: 1px solid #edf0f3;
  white-space: nowrap; }
th { color: #5b6875; font-weight: 600; font-size: 13px; }
th:first-child, td:first-child { text-align: left; }
tr.best td { font-weight: 600; background: #eef6f1; }
ul { margin: 8px 0 0; padding-left: 20px; }
svg { display: block; width: 100%; height: auto; margin-top: 10px;
  font: 11px system-ui, sans-serif; }
svg text { fill: #5b6875; } svg text.head { fill: #1b2733; font-weight: 600; font-size: 12.5px; }
rect:hover { stroke: #111; stroke-width: 1.2; }
"""


class Table(NamedTuple):
    """Rows of text under a head; `best` is the row to stress."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    best: int | None = None


def page(
    title: str,
    lead: str,
    pictures: Sequence[StepPicture],
    table: Table | None,
    advice: Sequence[str],
) -> str:
    """Returns the page; all pictures have the time scale of the longest step."""
    longest = max((picture.cost for picture in pictures), default=1.0) or 1.0
    body = [f"<h1>{escape(title)}</h1>", f'<p class="muted">{escape(lead)}</p>']
    if table is not None:
        body.append(f"<section>{_table(table)}</section>")
    if advice:
        items = "".join(f"<li>{escape(sentence)}</li>" for sentence in advice)
        body.append(f"<section><h2>Advice</h2><ul>{items}</ul></section>")
    body += [_section(picture, picture.cost / longest) for picture in pictures]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta '
        f'charset="utf-8"><title>{escape(title)}</title>\n'
        f"<style>{_STYLE}</style></head>\n<body><main>\n"
        + "\n".join(body)
        + "\n</main></body></html>\n"
    )


def drawing(picture: StepPicture, scale: float = 1.0) -> str:
    """Returns one step as an SVG element; the step takes `scale` of the width."""
    shapes = _Shapes(picture, scale)
    shapes.head("Share of all devices that computes")
    shapes.profile()
    where = ", as the last pipeline stage runs them" if picture.stages else ""
    shapes.head(f"Data-parallel ranks: packs{where}", _fill_legend())
    shapes.lines(picture.ranks, 420)
    if picture.stages:
        legend = _legend(
            [("forward", _colour(_FORWARD, 0.8)), ("backward", _colour(_BACKWARD, 0.8))]
        )
        shapes.head(
            f"Pipeline stages of rank {picture.slowest_rank}, the slowest (darker: costlier pack)",
            legend,
        )
        shapes.lines(picture.stages, 300)
    shapes.axis()
    return shapes.svg()


class _Shapes:
    """Collects SVG elements from top to bottom."""

    def __init__(self, picture: StepPicture, scale: float) -> None:
        self._picture, self._scale = picture, scale
        self._y = 0.0
        self._parts: list[str] = []

    def head(self, text: str, legend: str = "") -> None:
        """Writes a line of text over what follows."""
        self._y += 26
        self._parts.append(
            f'<text class="head" x="{_LEFT}" y="{self._y:.0f}">{escape(text)}</text>'
        )
        if legend:
            self._parts.append(
                f'<g transform="translate({_LEFT + _WIDTH} {self._y:.0f})">{legend}</g>'
            )
        self._y += 8

    def profile(self) -> None:
        """Draws an area over time."""
        height, busy = 46.0, self._picture.busy
        step = _WIDTH * self._scale / busy.size
        points = [f"{_LEFT},{self._y + height:.1f}"]
        for place, share in enumerate(busy.tolist()):
            y = self._y + height * (1 - share)
            points += [
                f"{_LEFT + place * step:.1f},{y:.1f}",
                f"{_LEFT + (place + 1) * step:.1f},{y:.1f}",
            ]
        points.append(f"{_LEFT + busy.size * step:.1f},{self._y + height:.1f}")
        self._idle(self._y, height)
        self._parts.append(f'<polygon points="{" ".join(points)}" fill="#7fa8c9"/>')
        for share, label in ((1, "100%"), (0, "0%")):
            y = self._y + height * (1 - share) + (9 if share else 0)
            self._parts.append(
                f'<text x="{_LEFT - 8}" y="{y:.1f}" text-anchor="end">{label}</text>'
            )
        self._y += height

    def lines(self, lines: Sequence[Line], height: float) -> None:
        """Draws lines one under the other, in `height` pixels at most."""
        row = min(24.0, max(6.0, height / len(lines)))
        gap = 1.0 if row < 12 else 3.0
        every = max(1, round(11 / row + 0.4))
        for index, line in enumerate(lines):
            self._idle(self._y, row - gap)
            if index % every == 0:
                y = self._y + (row - gap) / 2 + 4
                self._parts.append(
                    f'<text x="{_LEFT - 8}" y="{y:.1f}" '
                    f'text-anchor="end">{escape(line.name)}</text>'
                )
            self._parts += [self._block(block, row - gap) for block in line.blocks]
            self._cuts(line.blocks, row - gap)
            self._y += row

    def axis(self) -> None:
        """Draws modelled time under all, and where the bound and the end of the step are."""
        top, self._y = 34.0, self._y + 4
        for share, label in ticks(self._picture, self._scale):
            x = _LEFT + _WIDTH * share * self._scale
            self._parts.append(
                f'<text x="{x:.1f}" y="{self._y + 12:.1f}" text-anchor="middle">{label}</text>'
            )
        for share, colour, dash in (
            (self._picture.bound, "#c0392b", "4 3"),
            (1.0, "#1b2733", "none"),
        ):
            if share <= 1.0:
                x = _LEFT + _WIDTH * share * self._scale
                name = self._picture.bound_name if dash != "none" else "end"
                self._parts.append(
                    f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{self._y:.1f}" '
                    f'stroke="{colour}" stroke-dasharray="{dash}" '
                    f'stroke-width="1.2"><title>{name}</title></line>'
                )
        self._y += 18

    def svg(self) -> str:
        """Returns all of it."""
        width, height = _LEFT + _WIDTH + _RIGHT, self._y + 6
        label = escape(self._picture.title, quote=True)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:.0f}" '
            'role="img" '
            f'aria-label="{label}">\n' + "\n".join(self._parts) + "\n</svg>"
        )

    def _idle(self, y: float, height: float) -> None:
        width = _WIDTH * self._scale
        self._parts.append(
            f'<rect x="{_LEFT}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
            'fill="#eceff2"/>'
        )

    def _block(self, block: Block, height: float) -> str:
        stops = {"pack": _FILL_STOPS, "forward": _FORWARD, "backward": _BACKWARD}[block.kind]
        x, width = self._place(block)
        return (
            f'<rect x="{x:.1f}" y="{self._y:.1f}" width="{max(width, 0.4):.1f}" '
            f'height="{height:.1f}" '
            f'fill="{_colour(stops, block.shade)}"><title>{escape(block.text)}</title></rect>'
        )

    def _place(self, block: Block) -> tuple[float, float]:
        """Returns x and width; neighbours are parted by a pixel where they are wide enough."""
        x, end = (_LEFT + _WIDTH * self._scale * share for share in (block.start, block.end))
        return x, end - x - (1 if end - x > 4 else 0)

    def _cuts(self, blocks: Sequence[Block], height: float) -> None:
        """Draws white lines between the sequences of packs, where they are wide enough to see."""
        path = []
        for block in blocks:
            x, width = self._place(block)
            last = x
            for cut in block.cuts:
                at = x + cut * width
                if at - last > 2.5 and x + width - at > 2.5:
                    path.append(f"M{at:.1f} {self._y:.1f}v{height:.1f}")
                    last = at
        if path:
            self._parts.append(
                f'<path d="{"".join(path)}" stroke="#fff" stroke-opacity=".45" stroke-width=".6"/>'
            )


def _section(picture: StepPicture, scale: float) -> str:
    of_what = "of the modelled step" if picture.seconds is None else "modelled time"
    line = "" if picture.bound > 1 else f"red line: {picture.bound_name}; "
    notes = [f"scale: {of_what}; {line}hover over a block for its pack", *picture.notes]
    return (
        f'<section><h2>{escape(picture.title)}</h2><p class="muted">{escape(picture.facts)}</p>'
        f'{drawing(picture, scale)}<p class="muted">{escape("; ".join(notes))}</p></section>'
    )


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table.head)
    rows = []
    for index, row in enumerate(table.rows):
        stress = ' class="best"' if index == table.best else ""
        rows.append(f"<tr{stress}>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>")
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>"


def _colour(stops: Sequence[tuple[float, tuple[int, int, int]]], share: float) -> str:
    share = min(max(share, 0.0), 1.0)
    places = [place for place, _ in stops]
    return "#" + "".join(
        f"{round(float(np.interp(share, places, [colour[part] for _, colour in stops]))):02x}"
        for part in range(3)
    )


def _fill_legend() -> str:
    shares = (0.0, 0.25, 0.5, 0.75, 1.0)
    return _legend([(f"{share:.0%}", _colour(_FILL_STOPS, share)) for share in shares], "fill")


def _legend(entries: Sequence[tuple[str, str]], name: str = "") -> str:
    """Returns a legend that ends at x = 0."""
    x, parts = 0, []
    for label, colour in reversed(entries):
        x -= 7 * len(label) + 24
        parts.append(
            f'<rect x="{x}" y="-9" width="11" height="11" fill="{colour}"/><text '
            f'x="{x + 15}">{label}</text>'
        )
    return "".join(parts) + (f'<text x="{x - 8}" text-anchor="end">{name}</text>' if name else "")
