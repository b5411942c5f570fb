"""pure. A worker process makes outputs ahead of what it is asked for, and sends them.

A worker may have as many outputs on the way as it was given credit for. It is told to start again
at any time; outputs of before carry an older generation, and are thrown away by whoever gets them.
A failed sample is reported at once, ahead of the output that it was to be part of: it is known also
if the worker then dies, hangs or gives up.

What is sent is a pickle, with large arrays and tensors beside it: by far most of a batch of images.
They are written into shared memory without a name, whose descriptor follows through the socket, so
that the rank maps it and copies nothing; it is gone when both have let go of it, whichever of them
dies.
"""

import contextlib
import copyreg
import faulthandler
import gc
import io
import mmap
import os
import pickle
import select
import signal
import struct
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from typing import TYPE_CHECKING, Any

from megatron.blending.loading.messages import END, MakeServer, Message, Server, Start
from megatron.blending.loading.time_limit import TIME_LIMIT
from megatron.blending.loading.unpicklable import unpicklable
from megatron.blending.order.reading import salted_seed
from megatron.blending.streams.failures import Failure, FatalSampleError
from megatron.blending.streams.seeding import seed_generators

if TYPE_CHECKING:
    import torch

SMALL_BYTES = 4096
"""A smaller buffer stays in the pickle."""
SHARED_BYTES = 1 << 18
"""Bytes of buffers from which they go through shared memory: below, mapping it takes longer than
copying.
"""
_KEPT_BYTES = 1 << 20
_PARENT_SECONDS = 2.0
"""Seconds after which an idle worker checks that its parent is alive."""


class Sender:
    """A Sender sends values over a multiprocessing connection.

    What it writes to is kept from one value to the next, up to a megabyte. Made again each time, in
    pieces of ever other sizes, it would scatter what else a worker holds over more and more memory:
    0.4 MB per million samples of text.
    """

    def __init__(self, connection: Connection, receiver: int) -> None:
        """`receiver`: the id of the process at the other end."""
        self._connection = connection
        self._receiver = receiver
        self._buffers: list[pickle.PickleBuffer] = []
        self._file = io.BytesIO()
        self._pickler = pickle.Pickler(self._file, protocol=5, buffer_callback=self._keep)

    def send(self, value: object) -> None:
        if (torch := sys.modules.get("torch")) is not None:
            self._pickler.dispatch_table = {**copyreg.dispatch_table, torch.Tensor: _reduced}
        self._file.seek(0)
        try:
            self._pickler.dump(value)
            views = [buffer.raw() for buffer in self._buffers]
        finally:
            # Else it would keep what it pickled.
            self._pickler.clear_memo()
            self._buffers.clear()
        # The sizes of the buffers stand behind the pickle, which marks its own end: they are known
        # only when it is written, and in front of it they would cost a copy of it. Two buffers of
        # 5000 and 8192 bytes -> pickle, 5000, 8192, 2.
        self._file.write(
            struct.pack(f"<{len(views) + 1}Q", *(view.nbytes for view in views), len(views))
        )
        num_bytes = self._file.tell()
        with self._file.getbuffer() as pickled:
            self._connection.send_bytes(pickled, size=num_bytes)
        if is_shared(sum(view.nbytes for view in views)):
            self._share(views)
        else:
            for view in views:
                self._connection.send_bytes(view)
        if num_bytes > _KEPT_BYTES:
            self._file.truncate(0)

    def _keep(self, buffer: pickle.PickleBuffer) -> bool:
        """Puts a large buffer aside: False tells the pickler so."""
        if buffer.raw().nbytes < SMALL_BYTES:
            return True
        self._buffers.append(buffer)
        return False

    def _share(self, views: list[memoryview]) -> None:
        handle = os.memfd_create("batch")
        try:
            os.ftruncate(handle, sum(aligned(view.nbytes) for view in views))
            with mmap.mmap(handle, 0) as memory:
                at = 0
                for view in views:
                    memory[at : at + view.nbytes] = view
                    at += aligned(view.nbytes)
            send_handle(self._connection, handle, self._receiver)
        finally:
            os.close(handle)


def is_shared(num_bytes: int) -> bool:
    """Returns whether buffers of so many bytes together go through shared memory."""
    return num_bytes >= SHARED_BYTES and hasattr(os, "memfd_create")


def aligned(num_bytes: int) -> int:
    """Returns how many bytes of shared memory a buffer takes: so that each begins where any type
    may.
    """
    return -(-num_bytes // 64) * 64


def _reduced(value: "torch.Tensor") -> tuple[Any, ...] | str:
    """Pickles a tensor: its bytes as a buffer, where it is a plain one, else in torch's own way."""
    import torch

    is_plain = (
        value.layout is torch.strided and value.device.type == "cpu" and not value.requires_grad
    )
    if not is_plain or value.is_quantized or value.is_conj() or value.is_neg() or not value.numel():
        return value.__reduce_ex__(5)
    flat: Any = value.contiguous().view(-1).view(torch.uint8).numpy()
    return _tensor, (
        pickle.PickleBuffer(flat),
        str(value.dtype).removeprefix("torch."),
        tuple(value.shape),
    )


def _tensor(buffer: Any, dtype: str, shape: tuple[int, ...]) -> "torch.Tensor":
    import torch

    data = bytearray(buffer) if memoryview(buffer).readonly else buffer
    return torch.frombuffer(data, dtype=getattr(torch, dtype)).view(shape)


def serve(
    make_server: MakeServer,
    get: Callable[[bool], Any],
    put: Callable[[Message | Failure], None],
    ahead: int,
) -> None:
    """Works until asked to stop. `get(whether to wait)` gives the next command or None, `put` sends
    an output.
    """

    def report(failure: Failure) -> None:
        # The rank may be gone. That is no failure of a sample, and the next output shows it.
        with contextlib.suppress(OSError):
            put(failure)

    server: Server | None = None
    credit: list[int] = []  # of each lane: outputs that may be sent
    generation = -1
    while True:
        # Reads all commands before it makes the next output, as one may end the work. Without
        # credit it waits for a command.
        while (command := get(not any(credit))) is not None:
            if command == "stop":
                return
            if isinstance(command, int):  # the rank took an output of that lane
                # After a failure there is no server, and no credit until the next start.
                credit[command] += server is not None
                continue
            # A start, which may follow a failure. The rank throws away outputs of earlier
            # generations that are still on their way.
            generation, credit = command.generation, [ahead] * len(command.cells)
            try:
                server = make_server(report) if server is None else server
                server.start(command)
            except Exception as error:
                put(_failed(generation, error))
                credit = [0] * len(credit)
        for lane in range(len(credit)):
            if not credit[lane] or server is None:
                continue
            try:
                message = server.next(lane)
            except Exception as error:
                put(_failed(generation, error))
                credit, server = [0] * len(credit), None
                break
            try:
                put(message)
            except OSError:  # nobody is there any more
                raise
            except Exception as error:
                put(_failed(generation, unpicklable(message, error, server.places())))
                credit, server = [0] * len(credit), None
                break
            credit[lane] = 0 if message.turn == END else credit[lane] - 1


def _failed(generation: int, error: Exception) -> Message:
    is_sample = isinstance(error, FatalSampleError)
    text = str(error) if is_sample else "".join(traceback.format_exception(error)).rstrip()
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:  # whatever a class of the user's does there
        pickled = b""
    return Message(generation, 0, -1, error=(text, pickled))


def process_main(
    make_server: MakeServer,
    connection: Connection,
    to_close: list[Any],
    ahead: int,
    stack_file: str,
    reader: int,
    salt: tuple[int, str],
    note: Any = None,
) -> None:
    """Runs a worker. `salt`: seed and name, for random numbers of functions that are not seeded for
    each sample. `note`: shared memory for the line of a worker that its time limit ends.
    """
    if note is not None:
        TIME_LIMIT.report_into(note)
    # The end of the socket must be seen when the parent is gone, so no other process may hold it
    # open.
    for inherited in to_close:
        inherited.close()
    # What was inherited stays as it is: collections would go through all of it, and so copy its
    # pages.
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A closed terminal sends SIGHUP. This process ends with the one that reads from it instead.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    stacks = open(stack_file, "a")  # noqa: SIM115 - for as long as this process lives
    # Both have it open now. Were it the parent's to remove, it would stay when that is killed.
    remove(stack_file)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    # From now on this process may be asked where it stands.
    print("started", file=stacks, flush=True)
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)

    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    # The reader, or multiprocessing's fork server, which ends with it.
    parent = os.getppid()

    def get(is_waiting: bool) -> Any:
        while not poll.poll(_PARENT_SECONDS * 1000 if is_waiting else 0):
            if not is_waiting:
                return None
            if os.getppid() != parent:
                return "stop"
        command = connection.recv_bytes()
        # By far most ask for one more output of a lane: its number, as a pickle would take longer
        # than the sending.
        asked = pickle.loads(command) if len(command) > 2 else int.from_bytes(command, "little")
        if isinstance(asked, Start):
            # Else forked workers would all draw what their parent was about to.
            seed, name = salt
            begun = [cells.next for cells in asked.cells]
            place = f"{name} pass {asked.pass_number} cells {begun}"
            seed_generators(salted_seed(seed, place) % 2**32)
        return asked

    # The error is that the other end was closed.
    with contextlib.suppress(EOFError, OSError):
        serve(make_server, get, Sender(connection, reader).send, ahead)


def remove(path: str) -> None:
    """Removes a file that may be gone; or open, where that is an obstacle."""
    with contextlib.suppress(OSError):
        os.unlink(path)
