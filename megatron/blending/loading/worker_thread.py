"""pure. A worker in a thread."""

import logging
import queue
import sys
import threading
import traceback
from typing import Any

from megatron.blending.loading.server import END
from megatron.blending.loading.worker import LEAVE_SECONDS, MakeServer, Message, Patience, Start, raise_error, serve
from megatron.blending.streams.failures import Failure

logger = logging.getLogger("megatron.blending")


class ThreadWorker:
    """A server in a thread: for work that waits, or leaves the interpreter's lock alone."""

    def __init__(self, name: str, make_server: MakeServer, ahead: int, patience: Patience) -> None:
        self.name = name
        self._slow, self._timeout = patience
        self._generation = -1
        self._is_at_end = True
        self._commands: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._outputs: queue.SimpleQueue[Message | Failure] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=serve, args=(make_server, self._get, self._outputs.put, ahead), name=name, daemon=True
        )
        self._thread.start()

    def _get(self, is_waiting: bool) -> Any:
        try:
            return self._commands.get(block=is_waiting)
        except queue.Empty:
            return None

    def start(self, start: Start) -> None:
        self._generation = start.generation
        self._commands.put(start)

    def next(self) -> Message | Failure:
        waited = 0.0
        while True:
            try:
                message = self._outputs.get(timeout=self._slow)
            except queue.Empty:
                waited += self._slow
                told = f"{self.name} has given nothing for {waited:.0f} seconds{_stack_of(self._thread)}"
                if waited >= self._timeout:
                    raise RuntimeError(told) from None
                logger.warning("%s", told)
                continue
            if isinstance(message, Failure):
                return message
            if message.generation == self._generation:
                raise_error(self.name, message)
                if message.slot != END:
                    self._commands.put("more")
                return message

    def close(self) -> None:
        self._commands.put("stop")
        if threading.current_thread() is not self._thread:
            self._thread.join(LEAVE_SECONDS)


def _stack_of(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    return "" if frame is None else ":\n" + "".join(traceback.format_stack(frame)).rstrip()
