"""pure. Batches through a pipe: pickled, with arrays and tensors beside the pickle, so that each is copied but once."""

import copyreg
import io
import pickle
import struct
import sys
from typing import Any

_SMALL_BYTES = 4096
_KEPT_BYTES = 1 << 20


class Sender:
    """Sends values over a multiprocessing connection, to `receive`.

    What it writes to is kept from one value to the next, up to a megabyte. Made anew each time, in pieces of ever other
    sizes, it would scatter what else a worker holds over more and more memory: 0.4 MB per million samples of text.
    """

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._buffers: list[pickle.PickleBuffer] = []
        self._file = io.BytesIO()
        self._pickler = pickle.Pickler(self._file, protocol=5, buffer_callback=self._keep)

    def send(self, value: Any) -> None:
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
        # Behind the pickle, which ends by itself: before it, they would have to be known, or all of it be copied.
        self._file.write(struct.pack(f"<{len(views) + 1}Q", *(view.nbytes for view in views), len(views)))
        num_bytes = self._file.tell()
        with self._file.getbuffer() as pickled:
            self._connection.send_bytes(pickled, size=num_bytes)
        for view in views:
            self._connection.send_bytes(view)
        if num_bytes > _KEPT_BYTES:
            self._file.truncate(0)

    def _keep(self, buffer: pickle.PickleBuffer) -> bool:
        """Put a large buffer aside: False tells the pickler so."""
        if buffer.raw().nbytes < _SMALL_BYTES:
            return True
        self._buffers.append(buffer)
        return False


def receive(connection: Any) -> Any:
    """Receive what a Sender sent. Arrays and tensors may be written to."""
    pickled = connection.recv_bytes()
    (num_buffers,) = struct.unpack_from("<Q", pickled, len(pickled) - 8)
    sizes = struct.unpack_from(f"<{num_buffers}Q", pickled, len(pickled) - 8 * (num_buffers + 1))
    buffers = []
    for size in sizes:
        buffer = bytearray(size)
        connection.recv_bytes_into(buffer)
        buffers.append(buffer)
    return pickle.loads(pickled, buffers=buffers)


def _reduced(value: Any) -> Any:
    """How a tensor is pickled: its bytes as a buffer, where it is a plain one, else torch's own way."""
    import torch

    is_plain = value.layout is torch.strided and value.device.type == "cpu" and not value.requires_grad
    if not is_plain or value.is_quantized or value.is_conj() or value.is_neg() or not value.numel():
        return value.__reduce_ex__(5)
    flat = value.contiguous().view(-1).view(torch.uint8).numpy()
    return _tensor, (pickle.PickleBuffer(flat), str(value.dtype).removeprefix("torch."), tuple(value.shape))


def _tensor(buffer: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    import torch

    data = buffer if isinstance(buffer, bytearray) else bytearray(buffer)
    return torch.frombuffer(data, dtype=getattr(torch, dtype)).view(shape)
