"""pure. What a worker does, in a process or a thread of its own: a server that works ahead of what it is asked for.

A worker may have as many outputs on the way as it was given credit for. It is told to start anew at any time; outputs
of before carry an older generation, and are thrown away by whoever gets them.

A sample that fails is told at once, ahead of the output that it was to be part of: it is known also if the worker then
dies, hangs or gives up.
"""

import contextlib
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from megatron.blending.loading.server import END, Server
from megatron.blending.streams.failures import Failure, FatalSampleError

LEAVE_SECONDS = 3.0
"""How long a worker that is told to stop is waited for."""


class Message(NamedTuple):
    """One output, and what else the state of the stream needs once it was used."""

    generation: int
    slot: int
    value: Any
    lanes: dict[int, Any]
    """States of the lanes that it changed."""
    num_failed: int
    num_skipped: int
    error: tuple[str, bool] | None = None
    """What went wrong in place of an output, and whether it was a sample."""


class Start(NamedTuple):
    generation: int
    pass_number: int
    slot: int
    lanes: dict[int, Any]
    base: int
    since: int


class Patience(NamedTuple):
    """How long a worker may give nothing: until it is named in the log, until it is an error."""

    slow_seconds: float
    timeout_seconds: float


class Worker(Protocol):
    def start(self, start: Start) -> None: ...

    def next(self) -> Message | Failure:
        """Return the next output of the latest generation, or a sample, of any, that failed.

        RuntimeError if the worker failed, died or hangs.
        """

    def close(self) -> None: ...


MakeServer = Callable[[Callable[[Failure], None]], Server]
"""Called with what is to be told of failures."""


def serve(make_server: MakeServer, get: Callable[[bool], Any], put: Callable[[Message | Failure], None], ahead: int):
    """Work until told to stop. `get(whether to wait)` gives the next command or None, `put` sends an output."""

    def tell(failure: Failure) -> None:
        # Whoever would read it may be gone, which is no failure of a sample: it is found out with the next output.
        with contextlib.suppress(OSError):
            put(failure)

    server: Server | None = None
    credit, generation = 0, -1
    while True:
        while (command := get(credit == 0)) is not None:
            if command == "stop":
                return
            if command == "more":
                credit += server is not None
                continue
            generation, credit = command.generation, ahead
            try:
                server = make_server(tell) if server is None else server
                server.start(*command[1:])
            except Exception as error:
                put(_failed(generation, error))
                credit = 0
        if not credit or server is None:
            continue
        try:
            slot, value = server.next()
        except Exception as error:
            put(_failed(generation, error))
            credit, server = 0, None
            continue
        counts = server.failures.num_failed, server.failures.num_skipped
        put(Message(generation, slot, value, server.changed_states(), *counts))
        credit = 0 if slot == END else credit - 1


def _failed(generation: int, error: Exception) -> Message:
    is_sample = isinstance(error, FatalSampleError)
    text = str(error) if is_sample else "".join(traceback.format_exception(error)).rstrip()
    return Message(generation, -1, None, {}, 0, 0, (text, is_sample))


def raise_error(name: str, message: Message) -> None:
    if message.error is not None:
        text, is_sample = message.error
        raise (FatalSampleError if is_sample else RuntimeError)(f"{name}: {text}")
