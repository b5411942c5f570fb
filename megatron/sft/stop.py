"""pure. Ctrl-C and SIGTERM ask a run to end at the next step boundary; they don't cut it off."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType


class StopSignals:
    """While entered, SIGINT and SIGTERM only set `requested`. A second SIGINT interrupts at once, as usual."""

    def __init__(self) -> None:
        self.requested = False
        self._interrupted = False

    def __enter__(self) -> StopSignals:
        self._previous = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._interrupted and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._interrupted |= number == signal.SIGINT
        self.requested = True
