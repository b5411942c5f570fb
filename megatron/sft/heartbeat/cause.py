"""pure. Causes for which all ranks end, and the clock that measures silence."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

USER_ERROR = 2
"""Exit status of a message for the user."""
ANSWER_SECONDS = 5.0
"""Time in which a rank that lives answers a question."""
GRACE_SECONDS = 0.5
"""Time in which the ranks of a lost machine are gathered into one message."""
_PERIOD_SECONDS = 5.0
"""Longest time between two pings."""
_PATIENCE = 0.75
"""Silence that ends a run, as a part of the timeout of collectives: they do not fail before it."""


class Cause(NamedTuple):
    """The reason for which all ranks end."""

    text: str
    status: int
    """Status with which each process ends."""
    rank: int | None
    """Rank that reports it; None if every rank reports the same."""


def gone(ranks: Sequence[int], more: str = "") -> str:
    """Returns the message of ranks whose process has ended without a word."""
    verb = "is" if len(ranks) == 1 else "are"
    return f"{ranks_text(ranks)} {verb} gone{more}: killed (out of memory? see dmesg), or cut off"


def silent(ranks: Sequence[int], seconds: float) -> str:
    """Returns the message of ranks that are connected, but do not answer."""
    verb = "has" if len(ranks) == 1 else "have"
    return f"{ranks_text(ranks)} {verb} not answered for {seconds:.0f} s: stopped, hung, or cut off"


class Clock:
    """Measures how long others are silent, without the time in which this process did not run."""

    def __init__(self, timeout_seconds: float) -> None:
        """timeout_seconds: timeout of collectives."""
        self.patience = _PATIENCE * timeout_seconds
        """Silence that ends a run, in seconds."""
        self.period = min(_PERIOD_SECONDS, timeout_seconds / 24)
        """Time between two pings, in seconds. `tick` is called at least as often."""
        self._last = time.monotonic()

    def tick(self) -> tuple[float, float]:
        """Returns the time, and the seconds since the last tick in which this process did not run:
        it was stopped, as by a scheduler that suspends the job, and others are not to blame.
        """
        now = time.monotonic()
        pause, self._last = now - self._last, now
        return now, max(0.0, pause - 2 * self.period)


def ranks_text(ranks: Sequence[int]) -> str:
    """Returns ascending ranks as text.

    `[1, 2, 3, 6] -> "ranks 1-3, 6"`, `[2] -> "rank 2"`
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    parts = [str(start) if start == end else f"{start}-{end}" for start, end in runs]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(parts)}"
