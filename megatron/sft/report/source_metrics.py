"""pure. What a step or an evaluation measured of each source."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_MOST_IN_A_LINE = 4


@dataclass(frozen=True, kw_only=True)
class SourceMetrics:
    """One source's part, summed over all ranks. Counts are exact integers."""

    sequences: int
    tokens: int
    """Real tokens: sum of the sequences' lengths."""
    num_loss_tokens: int
    """Tokens that the loss is taken on."""
    loss: float
    """Per-token mean; NaN where it has no such token."""


def sources_line(sources: Mapping[str, SourceMetrics]) -> str:
    """`"chats 2.3141 (6 samples, 3,012 tokens), code 1.9020 (2 samples, 512 tokens)"`: those of most tokens."""
    most = sorted(sources, key=lambda name: -sources[name].tokens)
    parts = [_told(name, sources[name]) for name in most[:_MOST_IN_A_LINE]]
    if len(most) > _MOST_IN_A_LINE:
        parts.append(f"{len(most) - _MOST_IN_A_LINE} more")
    return ", ".join(parts)


def _told(name: str, source: SourceMetrics) -> str:
    loss = "" if math.isnan(source.loss) and not source.num_loss_tokens else f" {source.loss:.4f}"
    return f"{name}{loss} ({source.sequences} samples, {source.tokens:,} tokens)"


def dropped_line(dropped: Mapping[str, Mapping[str, int]]) -> str:
    """`{"chats": {"over length": 2}} -> "2 over length of chats"`."""
    return ", ".join(
        f"{number:,} {reason} of {name}" for name, reasons in dropped.items() for reason, number in reasons.items()
    )


def sources_of_record(sources: Mapping[str, Mapping[str, Any]]) -> dict[str, SourceMetrics]:
    """What was written to `metrics.jsonl`, null as NaN."""
    return {
        name: SourceMetrics(**{**source, "loss": math.nan if source["loss"] is None else source["loss"]})
        for name, source in sources.items()
    }
