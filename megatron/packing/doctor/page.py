"""pure. A diagnosis as one HTML page, with the matrix of influence as a picture."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape
from pathlib import Path

from megatron.packing.doctor.evidence import Evidence
from megatron.packing.doctor.report import Diagnosis, property_rows

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em;
       color: #222; background: #fff }
h1 { font-size: 1.4em } h2 { font-size: 1.1em; margin-top: 1.6em }
table { border-collapse: collapse } td, th { padding: .2em .9em .2em 0; text-align: left }
td.value { font-family: monospace; text-align: right }
.FAULT { color: #b00020; font-weight: bold } .sound { color: #176b2c }
.told { color: #8a5a00 } .not-seen, .see-above { color: #666; font-style: italic }
svg text { font: 12px system-ui, sans-serif }
"""
_CELL = 64
_SMALLEST = 1e-9
"""Influence whose square is still white, but for its border."""


def write_page(diagnosis: Diagnosis, path: Path) -> None:
    """Writes the page; nothing on it is loaded from elsewhere."""
    path.write_text("\n".join(_parts(diagnosis)) + "\n", encoding="utf-8")


def _parts(diagnosis: Diagnosis) -> Iterator[str]:
    evidence = diagnosis.evidence
    yield "<!doctype html>"
    yield f'<html lang="en"><meta charset="utf-8"><title>{escape(diagnosis.verdict())}</title>'
    yield f"<style>{_STYLE}</style>"
    yield f"<h1>{escape(diagnosis.verdict())}</h1>"
    for finding in diagnosis.findings:
        state = "FAULT" if finding.is_fault else "told"
        yield f'<h2 class="{state}">{escape(finding.name)}</h2>'
        yield f"<p>{escape(finding.text)}</p>"
        if finding.mend:
            yield f"<p>To mend: {escape(finding.mend)}</p>"
        if finding.threads:
            yield f"<p>Others met it: {escape(', '.join(finding.threads))}</p>"
    yield "<h2>What was examined</h2><table><tr><th><th><th>largest<th>allowed</tr>"
    for title, state, value, limit in property_rows(diagnosis):
        yield (
            f'<tr><td>{escape(title)}<td class="{state.replace(" ", "-")}">{state}'
            f'<td class="value">{escape(value)}<td class="value">{escape(limit)}</tr>'
        )
    yield "</table>"
    if evidence.influence:
        yield "<h2>Who influences whom</h2>"
        yield (
            "<p>A sequence (row) was changed; its influence on each (column), relative to the "
            "largest logit. Off the diagonal every square must be white.</p>"
        )
        yield picture(evidence)
    for note in evidence.notes:
        yield f'<p class="not-seen">Not seen: {escape(note)}</p>'
    yield (
        f"<p>A pack of {', '.join(map(str, evidence.lengths))} random tokens, "
        f"{escape(evidence.dtype)}; {evidence.num_forwards} forward and "
        f"{evidence.num_backwards} backward passes.</p></html>"
    )


def picture(evidence: Evidence) -> str:
    """Returns the matrix of influence as SVG; red squares are crossings."""
    size = len(evidence.influence)
    width = _CELL * (size + 1)
    parts = [f'<svg width="{width}" height="{width}" role="img" aria-label="matrix of influence">']
    for one, row in enumerate(evidence.influence):
        middle = _CELL * (one + 1.5)
        parts.append(f'<text x="{_CELL - 8}" y="{middle}" text-anchor="end">{one}</text>')
        parts.append(f'<text x="{middle}" y="{_CELL - 8}" text-anchor="middle">{one}</text>')
        for other, value in enumerate(row):
            crosses = one != other and not value <= evidence.exact
            color = "#b00020" if crosses else "#5a7fa8"
            x, y = _CELL * (other + 1), _CELL * (one + 1)
            parts.append(
                f'<rect x="{x}" y="{y}" width="{_CELL}" height="{_CELL}" fill="{color}" '
                f'fill-opacity="{_shade(value):.2f}" stroke="{color if crosses else "#bbb"}"/>'
                f'<text x="{x + _CELL / 2}" y="{y + _CELL / 2 + 4}" text-anchor="middle">'
                f"{value:.0e}</text>"
            )
    return "".join([*parts, "</svg>"])


def _shade(value: float) -> float:
    """Returns 0 for nothing up to 0.85 for an influence as large as the logits, by its exponent."""
    if not value > 0:
        return 0.0
    share = 1 + math.log10(max(min(value, 1.0), _SMALLEST)) / -math.log10(_SMALLEST)
    return 0.1 + 0.75 * share
