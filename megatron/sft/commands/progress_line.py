"""pure. One line on stderr with the progress of a command."""

from __future__ import annotations

import sys
import time
from typing import TextIO

_SECONDS_ON_A_TERMINAL, _SECONDS_IN_A_LOG = 0.2, 10.0


class ProgressLine:
    """Context in which `show` prints progress: on a terminal a line that replaces the last one, in
    a log file a new line every ten seconds.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._is_terminal = self._stream.isatty()
        self._last, self._width = time.monotonic(), 0

    def show(self, text: str) -> None:
        """Prints `text`, unless the last line was printed a moment ago."""
        now = time.monotonic()
        if now - self._last < (_SECONDS_ON_A_TERMINAL if self._is_terminal else _SECONDS_IN_A_LOG):
            return
        self._last = now
        if self._is_terminal:
            self._stream.write(f"\r{text.ljust(self._width)}")
            self._width = len(text)
        else:
            self._stream.write(f"{text}\n")
        self._stream.flush()

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._width:
            self._stream.write(f"\r{' ' * self._width}\r")
            self._stream.flush()
