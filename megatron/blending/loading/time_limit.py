"""pure. Ends a process in which one piece of work takes too much processor time, with one line.

A check between operations does not see a single operation that takes for ever, and Python handles
no signal and runs no other thread while an operation in C holds the interpreter's lock. So timers
of the operating system call functions of the C library here: `warnx` writes the line, and `_exit`
ends the process. In a worker process `_exit` alone does, and the process that reads from it raises
the line as an error.

Timers count processor time of their thread: while a process is stopped or waits they stand still.
Without such timers (outside of Linux with glibc) nothing is ended. Setting and clearing them takes
about 3 microseconds.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

STATUS = 2
"""Exit status of a process that was ended, as of one with a wrong option or file."""
WORKER_STATUS = 82
"""Exit status of a worker that was ended."""
NOTE_BYTES = 4096
_SIGEV_THREAD = 2
_SECONDS_TO_WRITE = 0.2
"""Processor time between the line and the end."""


class _Time(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


class _Interval(ctypes.Structure):
    _fields_ = [("repeat", _Time), ("first", _Time)]


class _Event(ctypes.Structure):
    """`struct sigevent`: 64 bytes in glibc and musl."""

    _fields_ = [
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("rest", ctypes.c_char * 40),
    ]


class TimeLimit:
    """The time limit of this process and the line that it ends with. There is one per process."""

    def __init__(self) -> None:
        self.subject = ""
        """Name of the current work, "record 3 of data.jsonl"; "" if it has none."""
        self._note: Any = ctypes.create_string_buffer(NOTE_BYTES)
        self._noted = ("", "")
        self._is_worker = False
        self._library = _library()
        self._left = _Interval()
        self._left_at = ctypes.byref(self._left)
        self._timers = threading.local()
        """Timers of each thread, and the seconds of each beyond the limit (`ends`)."""

    def report_into(self, note: Any) -> None:
        """Makes this process end silently, its line in `note`, NOTE_BYTES of shared memory."""
        self._note = (ctypes.c_char * NOTE_BYTES).from_buffer(note)
        self._noted, self._is_worker = ("", ""), True
        self._timers = threading.local()

    @contextmanager
    def limited(self, seconds: float, fault: str) -> Iterator[None]:
        """Context whose body may take so many seconds of processor time.

        fault: the line that the process ends with, behind the subject.
        """
        timers = self._timers
        if self._library is None or getattr(timers, "is_set", False):
            yield  # within another such context
            return
        if getattr(timers, "seconds", None) != seconds:
            timers.ends, timers.seconds = self._make_timers(), seconds
            timers.starts = [_after(seconds + more) for _, more in timers.ends]
        self._write_note(fault)
        set_timer = self._library.timer_settime
        for (timer, _), start in zip(timers.ends, timers.starts):
            set_timer(timer, 0, start, None)
        timers.is_set = True
        try:
            yield
        finally:
            for timer, _ in reversed(timers.ends):
                set_timer(timer, 0, _CLEARED, self._left_at)
            timers.is_set = False
            left = self._left.first
            if timers.ends and not left.seconds and not left.nanoseconds:  # the line was written
                time.sleep(_SECONDS_TO_WRITE)
                os._exit(WORKER_STATUS if self._is_worker else STATUS)

    def _write_note(self, fault: str) -> None:
        if self._noted == (self.subject, fault):
            return
        self._noted = self.subject, fault
        text = f"{self.subject}: {fault}" if self.subject else fault
        line = " ".join(text.split()).encode(errors="replace")
        if not self._is_worker:
            line = b"error: " + line.replace(b"%", b"%%")  # warnx reads a format
        self._note.value = line[: NOTE_BYTES - 1]

    def _make_timers(self) -> list[tuple[Any, float]]:
        library = self._library
        if self._is_worker:
            return _timers(library, (library._exit, WORKER_STATUS, 0.0))
        self._name = ctypes.create_string_buffer(_program().encode(errors="replace"))
        name = ctypes.c_void_p.in_dll(library, "program_invocation_short_name")
        name.value = ctypes.addressof(self._name)  # warnx writes it in front of the line
        return _timers(
            library,
            (library.warnx, ctypes.addressof(self._note), 0.0),
            (library._exit, STATUS, _SECONDS_TO_WRITE),
        )


def _after(seconds: float) -> Any:
    """Returns a setting of a timer that ends once, after so many seconds."""
    whole, nanoseconds = divmod(int(seconds * 1e9), 10**9)
    return ctypes.byref(_Interval(_Time(0, 0), _Time(whole, nanoseconds)))


_CLEARED = _after(0)


def _timers(library: Any, *ends: tuple[Any, int, float]) -> list[tuple[Any, float]]:
    """Returns timers on the processor time of this thread; those that cannot be made are missing.

    ends: function of the C library, its argument, and seconds beyond the limit.
    """
    timers = []
    for function, argument, more in ends:
        address = ctypes.cast(function, ctypes.c_void_p).value
        event = _Event(value=argument, notify=_SIGEV_THREAD, function=address)
        timer = ctypes.c_void_p()
        clock = time.CLOCK_THREAD_CPUTIME_ID
        if library.timer_create(clock, ctypes.byref(event), ctypes.byref(timer)) == 0:
            timers.append((timer, more))
    return timers


def _library() -> Any:
    """Returns the C library; None if it lacks what is needed here."""
    if sys.platform != "linux" or ctypes.sizeof(ctypes.c_void_p) != 8:
        return None
    library = ctypes.CDLL(None)
    names = ("timer_create", "timer_settime", "warnx", "_exit", "program_invocation_short_name")
    return library if all(hasattr(library, name) for name in names) else None


def _program() -> str:
    name = Path(sys.argv[0] or "python").name
    return "megatron-sft" if name == "__main__.py" else name


TIME_LIMIT = TimeLimit()


def _begin_again() -> None:
    """Forgets the timers of the parent, which a forked process does not have."""
    TIME_LIMIT._timers = threading.local()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_again)
