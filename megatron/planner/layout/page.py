"""pure. Layouts as one HTML page without other files: a bar of time by part, and bars of memory by
pipeline stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import NamedTuple

GIB = 2**30
_WIDTH, _HEIGHT, _LABEL = 700, 22, 210
_COLORS = (
    *("#1c63a8", "#cd6210", "#35b779", "#7a4fa3", "#c44e6a", "#8a8a2b"),
    *("#4aa3b5", "#9b6a4a", "#666f7a", "#2d7d46", "#b0a0d8", "#d8b26a"),
    *("#d98ca0", "#5f7a1f", "#2b3f8c", "#a8b8c4"),
)
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1b2733; background: #f5f6f8; margin: 0;
  padding: 32px 24px; }
main { max-width: 1000px; margin: 0 auto; }
section { background: #fff; border: 1px solid #e1e5ea; border-radius: 10px; padding: 16px 24px;
  margin: 20px 0; }
h1 { font-size: 26px; } h2 { font-size: 18px; margin: 0; }
svg { display: block; font: 12px system-ui, sans-serif; }
.muted { color: #5b6875; }
.part { display: inline-block; margin-right: 14px; font-size: 12px; }
.part i { display: inline-block; width: 11px; height: 11px; margin-right: 5px; }
"""


class Bar(NamedTuple):
    """One layout."""

    name: str
    times: Mapping[str, float]
    """Seconds of a step by part."""
    memory: Sequence[tuple[str, Mapping[str, int]]]
    """Pipeline stage -> bytes by part."""


def layout_page(layouts: Sequence[Bar], memory: int, tokens: float) -> str:
    """Returns the page. memory: of a GPU, marked in each bar; tokens: of a step."""
    longest = max(sum(one.times.values()) for one in layouts)
    largest = max(sum(parts.values()) for one in layouts for _, parts in one.memory)
    scale = max(largest, memory)
    of_times = _colors(one.times for one in layouts)
    of_memory = _colors(parts for one in layouts for _, parts in one.memory)
    sections = []
    for one in layouts:
        seconds = sum(one.times.values())
        rows = [_row("modelled time", one.times, of_times, longest, "s", 1.0)]
        rows += [
            _row(name, parts, of_memory, scale, "GiB", 1 / GIB, memory)
            for name, parts in one.memory
        ]
        sections.append(
            f"<section><h2>{escape(one.name)}</h2><p class='muted'>{figure(seconds)} s per step of "
            f"{tokens:,.0f} tokens</p>{''.join(rows)}</section>"
        )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>Layouts</title>'
        f"<style>{_STYLE}</style></head><body><main><h1>Layouts</h1><p class='muted'>Times are "
        "modelled. Memory is estimated, without margin; the line is a GPU's memory.</p>"
        f"<p>Time: {_legend(of_times)}</p><p>Memory: {_legend(of_memory)}</p>"
        f"{''.join(sections)}</main></body></html>\n"
    )


def figure(value: float) -> str:
    """`0.0012345 -> 0.00123`, `12.345 -> 12.3`, `12345.6 -> 12,346`."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _colors(bars: Iterable[Mapping[str, float]]) -> dict[str, str]:
    """Returns a colour for each part of any bar: stages that lack a part leave it out."""
    names = dict.fromkeys(name for parts in bars for name in parts)
    return {name: _COLORS[number % len(_COLORS)] for number, name in enumerate(names)}


def _legend(colors: Mapping[str, str]) -> str:
    return "".join(
        f'<span class="part"><i style="background: {color}"></i>{escape(name)}</span>'
        for name, color in colors.items()
    )


def _row(
    name: str,
    parts: Mapping[str, float],
    colors: Mapping[str, str],
    whole: float,
    unit: str,
    factor: float,
    mark: float | None = None,
) -> str:
    shapes, start = [], 0.0
    for part, size in parts.items():
        width = max(size, 0) / whole * _WIDTH
        shapes.append(
            f'<rect x="{_LABEL + start:.1f}" y="3" width="{width:.1f}" height="{_HEIGHT - 6}" '
            f'fill="{colors[part]}"><title>{escape(part)}: '
            f"{figure(size * factor)} {unit}</title></rect>"
        )
        start += width
    if mark is not None:
        x = _LABEL + mark / whole * _WIDTH
        shapes.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{_HEIGHT}" stroke="#111" '
            'stroke-dasharray="3 2"/>'
        )
    total = sum(parts.values()) * factor
    return (
        f'<svg width="{_LABEL + _WIDTH + 20}" height="{_HEIGHT}"><text x="0" y="15">'
        f"{escape(name)} {figure(total)} {unit}</text>{''.join(shapes)}</svg>"
    )
