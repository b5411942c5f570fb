"""pure. A worker in a process, which may die or hang, and must not outlive its parent."""

import contextlib
import faulthandler
import gc
import logging
import multiprocessing
import os
import pickle
import select
import signal
import sys
import tempfile
import time
from typing import Any

from megatron.blending.encoding.seeding import seed_generators
from megatron.blending.loading.server import END
from megatron.blending.loading.transport import Sender, receive
from megatron.blending.loading.worker import LEAVE_SECONDS, MakeServer, Message, Patience, Start, raise_error, serve
from megatron.blending.order.reading import salted_seed
from megatron.blending.streams.failures import Failure

logger = logging.getLogger("megatron.blending")

_LOOK_FOR_PARENT_SECONDS = 2.0


class ProcessWorker:
    """A server in a process. It ends when it is closed, when this process ends, and with this object."""

    def __init__(
        self,
        name: str,
        make_server: MakeServer,
        ahead: int,
        patience: Patience,
        start_method: str | None,
        others: "list[ProcessWorker]",
        seed: int = 0,
    ) -> None:
        """`seed`: of the random numbers of functions that are not seeded for each sample, together with the name."""
        self.name = name
        self._slow, self._timeout = patience
        self._generation = -1
        self._owner = os.getpid()
        methods = multiprocessing.get_all_start_methods()
        context = multiprocessing.get_context(start_method or ("fork" if "fork" in methods else "spawn"))
        self._outputs, their_outputs = context.Pipe(duplex=False)
        their_commands, self._commands = context.Pipe(duplex=False)
        handle, self._stack_file = tempfile.mkstemp(prefix="worker-stack-")
        self._stacks = os.fdopen(handle, "rb")
        inherited = [end for worker in [self, *others] for end in (worker._outputs, worker._commands, worker._stacks)]
        to_close = inherited if context.get_start_method() == "fork" else []
        self._process = context.Process(  # type: ignore[attr-defined]
            target=_process_main,
            args=(
                make_server,
                their_commands,
                their_outputs,
                to_close,
                ahead,
                self._stack_file,
                os.getpid(),
                (seed, name),
            ),
            name=name,
            daemon=True,
        )
        try:
            self._process.start()
        except (AttributeError, TypeError, OSError) as error:
            self._forget_stacks()
            raise ValueError(
                f"{name} cannot be started: {error}; functions must be defined at the top of a module "
                "(start_method='fork' takes any)"
            ) from error
        their_outputs.close()
        their_commands.close()
        # Unlike multiprocessing's `wait`, it is made once.
        self._poll = select.poll()
        for file in (self._outputs.fileno(), self._process.sentinel):
            self._poll.register(file, select.POLLIN)

    def start(self, start: Start) -> None:
        self._generation = start.generation
        self._tell(start)

    def next(self) -> Message | Failure:
        while True:
            self._wait()
            try:
                message = receive(self._outputs)
            except (EOFError, OSError):
                raise RuntimeError(self._died()) from None
            if isinstance(message, Failure):
                return message
            if message.generation == self._generation:
                raise_error(self._named(), message)
                if message.slot != END:
                    self._tell("more")
                return message

    def close(self) -> None:
        # A forked worker has a copy of this object, which is not its own to close.
        if os.getpid() != self._owner:
            return
        with contextlib.suppress(OSError, ValueError):
            self._tell("stop")
        # A worker that is about to send into a full pipe finds it closed.
        self._outputs.close()
        self._commands.close()
        self._process.join(LEAVE_SECONDS)
        for end in (self._process.terminate, self._process.kill):
            if self._process.is_alive():
                end()
                self._process.join(LEAVE_SECONDS)
        self._forget_stacks()

    def _forget_stacks(self) -> None:
        self._stacks.close()
        _remove(self._stack_file)

    def _tell(self, command: Any) -> None:
        # If it is gone: what it sent before may still be there, so this is found out when more is asked for.
        with contextlib.suppress(OSError):
            # By far most are "more", which is said by nothing at all: a pickle would take longer than the sending.
            self._commands.send_bytes(b"" if command == "more" else pickle.dumps(command))

    def _wait(self) -> None:
        started = time.monotonic()
        while True:
            # Outputs first: it may have sent something on its way out.
            ready = [file for file, _ in self._poll.poll(self._slow * 1000)]
            if self._outputs.fileno() in ready:
                return
            if ready:
                raise RuntimeError(self._died())
            waited = time.monotonic() - started
            told = f"{self._named()} has given nothing for {waited:.0f} seconds{self._stack()}"
            if waited >= self._timeout:
                raise RuntimeError(told)
            logger.warning("%s", told)

    def _named(self) -> str:
        return f"{self.name} (pid {self._process.pid})"

    def _died(self) -> str:
        self._process.join(LEAVE_SECONDS)
        code = self._process.exitcode
        how = f"exit code {code}" if code is None or code >= 0 else f"killed by {signal.Signals(-code).name}"
        hint = "; is there enough memory?" if code == -signal.SIGKILL else ""
        return f"{self._named()} died: {how}{hint}"

    def _stack(self) -> str:
        """Where the process stands, by its own account."""
        try:
            before = self._num_told()
            if not before:
                # It has not said yet that it can take the signal, which until then would end it.
                return ": it is still starting; its imports may be slow"
            os.kill(self._process.pid or 0, signal.SIGUSR1)
            for _ in range(20):
                time.sleep(0.02)
                if self._num_told() > before:
                    break
            self._stacks.seek(before)
            return ":\n" + self._stacks.read().decode(errors="replace").rstrip()
        except OSError:
            return ""

    def _num_told(self) -> int:
        return os.fstat(self._stacks.fileno()).st_size


def _process_main(
    make_server: MakeServer,
    commands: Any,
    outputs: Any,
    to_close: list[Any],
    ahead: int,
    stack_file: str,
    parent: int,
    salt: tuple[int, str],
) -> None:
    # The end of the pipe must be seen when the parent is gone, so no other process may hold it open.
    for inherited in to_close:
        inherited.close()
    # What was inherited stays as it is: collections would look at all of it, and so copy its pages.
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    stacks = open(stack_file, "a")  # noqa: SIM115 - for as long as this process lives
    # Both have it open now. Were it the parent's to remove, it would stay when that is killed.
    _remove(stack_file)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    # From now on this process may be asked where it stands.
    print("started", file=stacks, flush=True)
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)

    poll = select.poll()
    poll.register(commands.fileno(), select.POLLIN)

    def get(is_waiting: bool) -> Any:
        while not poll.poll(_LOOK_FOR_PARENT_SECONDS * 1000 if is_waiting else 0):
            if not is_waiting:
                return None
            if os.getppid() != parent:
                return "stop"
        command = commands.recv_bytes()
        told = pickle.loads(command) if command else "more"
        if isinstance(told, Start):
            # Else forked workers would all draw what their parent was about to.
            seed, name = salt
            place = f"{name} pass {told.pass_number} slot {told.slot}"
            seed_generators(salted_seed(seed, place) % 2**32)
        return told

    # The error is that the other end was closed.
    with contextlib.suppress(EOFError, OSError):
        serve(make_server, get, Sender(outputs).send, ahead)


def _remove(path: str) -> None:
    # It may be gone; or open, where that is an obstacle.
    with contextlib.suppress(OSError):
        os.unlink(path)
