"""pure. The workers of a rank: processes that make its outputs ahead, or the rank itself without
any. A worker that dies or hangs is an error with its stack. No worker outlives its parent.
"""

import contextlib
import logging
import mmap
import multiprocessing
import os
import pickle
import select
import signal
import struct
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any

from megatron.blending.formats.mapped_memory import map_descriptor
from megatron.blending.loading.messages import END, MakeServer, Message, Start
from megatron.blending.loading.time_limit import NOTE_BYTES, WORKER_STATUS
from megatron.blending.loading.worker import (
    aligned,
    is_shared,
    process_main,
    remove,
)
from megatron.blending.streams.failures import Failure, FailureLog, FatalSampleError
from megatron.blending.streams.worker_config import WorkerConfig

logger = logging.getLogger("megatron.blending")

_HURRIED_SECONDS = 5.0
_LEAVE_SECONDS = 3.0
"""Seconds that a worker has to stop, before it is terminated."""


class WorkerProcess:
    """A server in a process of its own. The process ends with `close`, with this object, and with
    the parent process.
    """

    def __init__(
        self,
        name: str,
        make_server: MakeServer,
        ahead: int,
        config: WorkerConfig,
        others: "list[WorkerProcess]",
    ) -> None:
        self.name = name
        self._slow, self._timeout = config.slow_worker_seconds, config.worker_timeout_seconds
        self._generation = -1
        self._owner = os.getpid()
        methods = multiprocessing.get_all_start_methods()
        context = multiprocessing.get_context(
            config.start_method or ("fork" if "fork" in methods else "spawn")
        )
        # A socket, through which descriptors of shared memory can be sent.
        self._connection, theirs = context.Pipe(duplex=True)
        handle, self._stack_file = tempfile.mkstemp(prefix="worker-stack-")
        self._stacks = os.fdopen(handle, "rb")
        inherited = [
            end for worker in [self, *others] for end in (worker._connection, worker._stacks)
        ]
        is_forked = context.get_start_method() == "fork"
        to_close = inherited if is_forked else []
        # Other start methods cannot pass it on, so that there a worker writes its line itself.
        self._note = mmap.mmap(-1, NOTE_BYTES) if is_forked else None
        salt = config.seed + config.seed_offset, name
        self._process = context.Process(  # type: ignore[attr-defined]
            target=process_main,
            args=(
                *(make_server, theirs, to_close, ahead, self._stack_file, os.getpid(), salt),
                self._note,
            ),
            name=name,
            daemon=True,
        )
        try:
            self._process.start()
        except (AttributeError, TypeError, OSError) as error:
            self._forget_stacks()
            raise ValueError(
                f"{name} cannot be started: {error}; functions must be defined at the top of a "
                "module (start_method='fork' takes any)"
            ) from error
        theirs.close()
        # One poll object for all waits. multiprocessing's `wait` makes a new one each time.
        self._poll = select.poll()
        for file in (self._connection.fileno(), self._process.sentinel):
            self._poll.register(file, select.POLLIN)

    def start(self, start: Start) -> None:
        self._generation = start.generation
        self._received: dict[int, deque[Message]] = {}
        self._send(start)

    def next(self, lane: int = 0) -> Message | Failure:
        """Returns the next output of a lane since the latest `start`, or a sample that failed.

        Raises RuntimeError if the worker died or hangs, and ValueError if its time limit ended it.
        If the worker itself failed, raises its error.
        """
        while True:
            if waiting := self._received.get(lane):
                message = waiting.popleft()
                if message.turn != END:
                    self._send(lane)
                return message
            self._wait()
            try:
                message = receive(self._connection)
            except (EOFError, OSError):
                raise self._died() from None
            if isinstance(message, Failure):
                return message
            if message.generation != self._generation:
                continue
            if message.error is not None:
                raise self._error(*message.error)
            # An output of another lane. The worker gets its credit back when that lane takes it.
            self._received.setdefault(message.lane, deque()).append(message)

    def hurry(self) -> None:
        """Limits every further wait to a few seconds, for a run that is asked to stop."""
        self._slow = self._timeout = min(self._timeout, _HURRIED_SECONDS)

    def close(self) -> None:
        # A forked worker has a copy of this object, and must not close its sibling.
        if os.getpid() != self._owner:
            return
        with contextlib.suppress(OSError, ValueError):
            self._send("stop")
        # Close the connection: a worker that waits to send into a full socket then fails and ends.
        self._connection.close()
        leave = min(_LEAVE_SECONDS, self._timeout / 10)
        self._process.join(leave)
        for end in (self._process.terminate, self._process.kill):
            if self._process.is_alive():
                end()
                self._process.join(leave)
        self._forget_stacks()

    def _forget_stacks(self) -> None:
        self._stacks.close()
        remove(self._stack_file)

    def _send(self, command: Any) -> None:
        # Ignore the error of a worker that has died: outputs that it sent before can still be read.
        # The next wait reports it.
        with contextlib.suppress(OSError):
            is_lane = isinstance(command, int)
            self._connection.send_bytes(
                command.to_bytes(2, "little") if is_lane else pickle.dumps(command)
            )

    def _wait(self) -> None:
        # Time is counted in polls. A clock would go on while all processes are suspended.
        waited = 0.0
        while True:
            # Check for outputs first: the worker may have sent some before it died.
            ready = [file for file, _ in self._poll.poll(self._slow * 1000)]
            if self._connection.fileno() in ready:
                return
            if ready:
                raise self._died()
            waited += self._slow
            reported = f"{self._named()} has given nothing for {waited:.0f} seconds{self._stack()}"
            if waited >= self._timeout:
                raise RuntimeError(reported)
            logger.warning("%s", reported)

    def _error(self, text: str, pickled: bytes) -> Exception:
        """Returns the error of a worker, as the same exception that a run without workers raises.

        StopIteration, which would end a loop silently, and errors that cannot be pickled become
        RuntimeError.
        """
        reported = f"{self._named()}: {text}"
        error = pickle.loads(pickled) if pickled else None
        if isinstance(error, FatalSampleError):
            return FatalSampleError(reported)
        if error is None or isinstance(error, StopIteration):
            return RuntimeError(reported)
        error.__cause__ = RuntimeError(reported)
        return error

    def _named(self) -> str:
        return f"{self.name} (pid {self._process.pid})"

    def _died(self) -> Exception:
        self._process.join(_LEAVE_SECONDS)
        code = self._process.exitcode
        if code == WORKER_STATUS and self._note is not None:
            return ValueError(self._note[:].partition(b"\0")[0].decode(errors="replace"))
        how = (
            f"exit code {code}"
            if code is None or code >= 0
            else f"killed by {signal.Signals(-code).name}"
        )
        hint = "; is there enough memory?" if code == -signal.SIGKILL else ""
        return RuntimeError(f"{self._named()} died: {how}{hint}")

    def _stack(self) -> str:
        """Returns the stack of the process, which it writes when it gets SIGUSR1."""
        try:
            before = self._num_reported()
            if not before:
                # It has not reported yet that it handles the signal, which would end it before.
                return ": it is still starting; its imports may be slow"
            os.kill(self._process.pid or 0, signal.SIGUSR1)
            for _ in range(20):
                time.sleep(0.02)
                if self._num_reported() > before:
                    break
            self._stacks.seek(before)
            return ":\n" + self._stacks.read().decode(errors="replace").rstrip()
        except OSError:
            return ""

    def _num_reported(self) -> int:
        return os.fstat(self._stacks.fileno()).st_size


def receive(connection: Connection) -> Any:
    """Receives a value that a Sender sent. Its arrays and tensors are writable; large ones are in
    shared memory.
    """
    pickled = connection.recv_bytes()
    # `Sender.send` has written: the pickle, the sizes of its buffers, and their number. Read them
    # from the end; pickle finds the end of the pickle itself.
    (num_buffers,) = struct.unpack_from("<Q", pickled, len(pickled) - 8)
    sizes = struct.unpack_from(f"<{num_buffers}Q", pickled, len(pickled) - 8 * (num_buffers + 1))
    buffers: list[Any] = []
    if is_shared(sum(sizes)):
        handle = recv_handle(connection)
        try:
            # Python's `mmap` would keep a file descriptor for as long as the batch is kept.
            total = sum(map(aligned, sizes))
            mapped = map_descriptor(handle, total, mmap.PROT_READ | mmap.PROT_WRITE)
            memory = memoryview(mapped).cast("B")
        finally:
            os.close(handle)
        at = 0
        for size in sizes:
            buffers.append(memory[at : at + size])
            at += aligned(size)
        return pickle.loads(pickled, buffers=buffers)
    for size in sizes:
        buffers.append(bytearray(size))
        connection.recv_bytes_into(buffers[-1])
    return pickle.loads(pickled, buffers=buffers)


class WorkerPool:
    """The workers of a rank. The constructor starts their processes; `start` makes all of them
    begin at a position, as often as needed.
    """

    def __init__(
        self,
        make: Callable[[int], MakeServer],
        config: WorkerConfig,
        prefetch_factor: int,
        log: FailureLog,
    ) -> None:
        """Args:
        make: function from the number of a worker to the function that makes its server, which is
            sent to the worker's process.
        log: receives the samples that fail in any worker.
        """
        self._log = log
        self._workers: list[Any] = []
        self._generation = -1
        self.close = weakref.finalize(self, _close_all, self._workers)
        if config.num_workers == 0:
            self._workers.append(make(0)(log.add))
            return
        try:
            for number in range(config.num_workers):
                name = f"worker {number} of rank {config.this_rank}"
                self._workers.append(
                    WorkerProcess(name, make(number), prefetch_factor, config, self._workers)
                )
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._workers)

    def start(self, start: Start) -> None:
        self._generation += 1
        for worker in self._workers:
            worker.start(start._replace(generation=self._generation))

    def hurry(self) -> None:
        """Limits the wait for a silent worker to a few seconds. Any thread may call it."""
        for worker in self._workers:
            if isinstance(worker, WorkerProcess):
                worker.hurry()

    def next(self, worker: int, lane: int) -> Message:
        while isinstance(given := self._workers[worker].next(lane), Failure):
            self._log.add(given)
        return given


def _close_all(workers: Sequence[Any]) -> None:
    for worker in workers:
        worker.close()
