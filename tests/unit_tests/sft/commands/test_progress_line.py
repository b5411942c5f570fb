"""A line that says how far a command is, on terminals and in logs."""

from __future__ import annotations

import io
from unittest import mock

from megatron.sft.commands import progress_line
from megatron.sft.commands.progress_line import ProgressLine


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(stream: io.StringIO) -> str:
    """What a command of 25 seconds prints that shows a line each second."""
    clock = mock.patch.object(progress_line.time, "monotonic", side_effect=range(100))
    with clock, ProgressLine(stream) as line:
        for number in range(25):
            line.show(f"step {number}")
    return stream.getvalue()


def test_a_terminal_has_one_line_and_then_none() -> None:
    """Its rest would stand before the first line of the result."""
    text = shown(_Terminal())
    assert "\n" not in text
    assert text.count("\r") == 25 + 2
    assert text.endswith("\r       \r")


def test_a_log_has_few_lines() -> None:
    """Carriage returns in a log are one line of a megabyte."""
    assert shown(io.StringIO()) == "step 9\nstep 19\n"
