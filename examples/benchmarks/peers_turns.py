"""pure. Steps of several processes by turns: each does one, tells that it is done, and sleeps until
it is called again.

A pair of named pipes for each process (`path`.go, `path`.done); sleeping in one takes no CPU.
"""

from __future__ import annotations

import os
import select
from pathlib import Path

TIMEOUT_SECONDS = 300


class Turns:
    """The side that calls a process."""

    def __init__(self, path: Path) -> None:
        pipes = [path.with_suffix(suffix) for suffix in (".go", ".done")]
        for pipe in pipes:
            os.mkfifo(pipe)
        # Open for both: so neither side waits for the other to open it.
        self._go, self._done = (os.open(pipe, os.O_RDWR) for pipe in pipes)

    def call(self) -> None:
        """Lets the process do its next step."""
        os.write(self._go, b".")

    def is_done(self, timeout_seconds: float) -> bool:
        """Returns whether the process has ended a step; waits for it."""
        ready, _, _ = select.select([self._done], [], [], timeout_seconds)
        return bool(ready and os.read(self._done, 1))

    def close(self) -> None:
        os.close(self._go)
        os.close(self._done)


def done(path: Path) -> None:
    """Tells that a step is done, and waits for the next turn."""
    with open(path.with_suffix(".done"), "wb", buffering=0) as pipe:
        pipe.write(b".")
    with open(path.with_suffix(".go"), "rb", buffering=0) as pipe:
        pipe.read(1)
