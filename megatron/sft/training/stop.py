"""pure. Ends of a run before its last step: Ctrl-C, SIGTERM and SIGHUP, which ask it to end at the
next step boundary and do not cut it off; and those that its options ask for.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType

from megatron.sft.options.training import TrainingConfig

_STARTED = time.monotonic()
"""Time at which this process was started, but for its first imports."""


class Stopped(Exception):
    """Some rank was asked to stop. Raised alike on every rank."""


class StopRules:
    """Ends that the options of a run ask for."""

    def __init__(self, training: TrainingConfig) -> None:
        self._training = training

    def is_out_of_time(self) -> bool:
        """Returns whether --exit-duration-in-mins are over, on this rank."""
        minutes = self._training.exit_duration_in_mins
        return minutes is not None and time.monotonic() - _STARTED > 60 * minutes

    def exits_after(self, iteration: int) -> bool:
        """Returns whether --exit-interval ends the run after that step."""
        interval = self._training.exit_interval
        is_last = iteration >= self._training.train_iters
        return interval is not None and iteration % interval == 0 and not is_last

    def stops_early(self, evaluations_since_best: int) -> bool:
        """Returns whether --early-stopping ends the run."""
        limit = self._training.early_stopping
        return limit is not None and evaluations_since_best >= limit


def _stop_signals() -> list[signal.Signals]:
    """Returns the signals that ask for a stop: SIGINT, SIGTERM, and SIGHUP unless it is ignored, as
    by nohup.

    torchrun handles SIGHUP even under nohup: it passes the signal on to its ranks and kills them 30
    seconds later. Its ranks stop then and save, however SIGHUP was set.
    TORCHELASTIC_SIGNALS_TO_HANDLE is how it tells them so.
    """
    is_passed_on = "SIGHUP" in os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", "")
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN and not is_passed_on:
        return [signal.SIGINT, signal.SIGTERM]
    return [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


class StopSignals:
    """While entered, stop signals only set `requested`. A second SIGINT interrupts at once, as
    usual.
    """

    def __init__(self, on_sigterm: Callable[[threading.Event], None] | None = None) -> None:
        """on_sigterm: called in a thread at the first SIGTERM or SIGHUP, even while the main thread
        waits for another rank, with the event `agreed`.
        """
        self.requested = False
        self.agreed = threading.Event()
        """Set once all ranks know that they end."""
        self._interrupted = False
        self._on_sigterm = on_sigterm

    def __enter__(self) -> StopSignals:
        self._previous = {number: signal.signal(number, self._note) for number in _stop_signals()}
        if self._on_sigterm is not None:
            self._written, read = socket.socketpair()
            self._written.setblocking(False)
            threading.Thread(
                target=self._listen, args=(read,), name="stop signals", daemon=True
            ).start()
            signal.set_wakeup_fd(self._written.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._on_sigterm is not None:
            signal.set_wakeup_fd(-1)
            self._written.close()
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._interrupted and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._interrupted |= number == signal.SIGINT
        self.requested = True

    def _listen(self, read: socket.socket) -> None:
        # Python runs a handler in the main thread alone, once that is back from where it waits;
        # this is told at once. It listens to the end: Python complains where nobody hears a signal.
        on_sigterm = self._on_sigterm
        with read:
            while numbers := read.recv(1):
                if on_sigterm is not None and numbers[0] in (signal.SIGTERM, signal.SIGHUP):
                    on_sigterm(self.agreed)
                    on_sigterm = None
