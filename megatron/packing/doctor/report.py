"""pure. A diagnosis as text and as JSON."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from megatron.packing.doctor.decisions.decision_row import PROPERTIES
from megatron.packing.doctor.decisions.step_rows import is_readable, share_limit
from megatron.packing.doctor.evidence import Evidence
from megatron.packing.doctor.loss_reading import read_loss

_WIDTH = 100
FORMAT = 1
"""Of the JSON report: grows where a field goes or means something else, not where one comes."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A fault, or what looks like one and is expected."""

    name: str
    property: str
    """Key of `decision_row.PROPERTIES`."""
    text: str
    mend: str
    threads: tuple[str, ...]
    is_fault: bool


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Result of an examination."""

    evidence: Evidence
    findings: tuple[Finding, ...]

    @property
    def faults(self) -> list[Finding]:
        """Returns the findings that are faults."""
        return [finding for finding in self.findings if finding.is_fault]

    @property
    def is_sound(self) -> bool:
        """Returns whether no fault was found."""
        return not self.faults

    def verdict(self) -> str:
        """Returns the first line of the report."""
        if self.is_sound:
            told = [finding.name for finding in self.findings]
            told += ["what was not seen"] if self.evidence.notes else []
            also = f" (told below: {', '.join(told)})" if told else ""
            return f"{self.evidence.subject}: no contamination found{also}."
        return f"{self.evidence.subject}: {'; '.join(finding.name for finding in self.faults)}."

    def text(self) -> str:
        """Returns the report for a terminal."""
        return "\n".join(_lines(self)) + "\n"

    def json(self) -> str:
        """Returns verdict, findings and evidence as JSON; numbers that are not finite are null."""
        data = {
            "format": FORMAT,
            "verdict": self.verdict(),
            "is_sound": self.is_sound,
            "findings": [asdict(finding) for finding in self.findings],
            "evidence": asdict(self.evidence),
        }
        return json.dumps(_finite(data), indent=1) + "\n"


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and value - value != 0:
        return None
    return value


def property_rows(diagnosis: Diagnosis) -> Iterator[tuple[str, str, str, str]]:
    """Yields what is examined, its state ("sound", "FAULT", "told" where it is none, "see above"
    where another fault explains it, "not seen"), the largest value, and what counts as nothing.
    """
    evidence = diagnosis.evidence
    by_property = {finding.property: finding for finding in reversed(diagnosis.findings)}
    hidden = {"packed", "backward", "causal", "padding"} if evidence.crossings else set()
    if not is_readable(evidence):
        hidden |= {"step", "norm"}
    for key, (value, limit) in measured(evidence).items():
        finding = by_property.get(key)
        state = "sound" if value is not None else "not seen"
        if finding is not None:
            state = "FAULT" if finding.is_fault else "told"
        elif value is not None and key in hidden:
            state = "see above"
        yield (
            PROPERTIES[key],
            state,
            "" if value is None else f"{value:.1e}" if isinstance(value, float) else value,
            "" if value is None else f"{limit:.1e}" if isinstance(limit, float) else limit,
        )


def measured(evidence: Evidence) -> dict[str, tuple[float | str | None, float | str]]:
    """Returns for each property the largest value that was measured, and its limit."""
    e = evidence
    influence = [
        value
        for one, row in enumerate(e.influence)
        for other, value in enumerate(row)
        if one != other
    ]
    declared = [r for r in e.reach if r.declared is not None]
    # Labels cannot be read from gradients of another form, nor weights where labels are wrong.
    reading = None if e.loss is None else read_loss(e.loss)
    has_labels = reading is not None and reading.is_cross_entropy
    has_weights = reading is not None and reading.mean_per != ""
    return {
        "repeat": (max(e.repeat.difference, e.repeat.after_another), e.exact),
        "crossing": (max(influence, default=None), e.exact),
        "causal": (max(e.early, default=None), e.exact),
        "padding": (e.padding, max(e.exact, e.rounding)),
        "window": (
            " ".join(str(r.packed) for r in declared) or None,
            " ".join(str(r.declared) for r in declared),
        ),
        "packed": (max([*e.alone, *e.offset, *e.order], default=None), e.tolerance),
        "backward": (e.backward, e.exact),
        "labels": ("read" if has_labels else None, ""),
        "weights": ("read" if has_weights else None, ""),
        "step": (
            None if e.step is None else max(abs(share.share - 1) for share in e.step.shares),
            0.0 if e.step is None else share_limit(e.step),
        ),
        "norm": (None if e.step is None or e.step.norm is None else e.step.norm - 1, 0.01),
    }


def _lines(diagnosis: Diagnosis) -> Iterator[str]:
    evidence = diagnosis.evidence
    yield diagnosis.verdict()
    yield ""
    width = max(map(len, PROPERTIES.values())) + 2
    yield f"{'':{width}}{'':10}{'largest':>12}  {'allowed':>8}"
    for title, state, value, limit in property_rows(diagnosis):
        yield f"{title:{width}}{state:10}{value:>12}  {limit:>8}".rstrip()
    for finding in diagnosis.findings:
        yield ""
        yield f"{'FAULT' if finding.is_fault else 'No fault'}: {finding.name}"
        for text in (finding.text, f"To mend: {finding.mend}" if finding.mend else ""):
            yield from textwrap.wrap(text, _WIDTH, initial_indent="  ", subsequent_indent="  ")
        if finding.threads:
            yield f"  Others met it: {', '.join(finding.threads)}"
    if evidence.crossings:
        yield ""
        yield "Influence of a sequence (row) on another (column), relative to the largest logit:"
        for index, row in enumerate(evidence.influence):
            yield f"  {index}  " + "  ".join(f"{value:8.1e}" for value in row)
    for note in evidence.notes:
        yield from textwrap.wrap(f"Not seen: {note}", _WIDTH, subsequent_indent="  ")
    yield ""
    yield (
        f"A pack of {', '.join(map(str, evidence.lengths))} random tokens, {evidence.dtype}; "
        f"{evidence.num_forwards} forward and {evidence.num_backwards} backward passes."
    )
