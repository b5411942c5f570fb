"""pure. Batches through a pipe: pickled, with arrays and tensors beside the pickle, so that each is copied but once."""

import copyreg
import io
import pickle
import struct
import sys
from typing import Any

_SMALL_BYTES = 4096


def send(connection: Any, value: Any) -> None:
    """Send over a multiprocessing connection."""
    buffers: list[pickle.PickleBuffer] = []
    file = io.BytesIO()
    pickler = pickle.Pickler(file, protocol=5, buffer_callback=lambda buffer: _kept(buffer, buffers))
    if (torch := sys.modules.get("torch")) is not None:
        pickler.dispatch_table = {**copyreg.dispatch_table, torch.Tensor: _reduced}
    pickler.dump(value)
    views = [buffer.raw() for buffer in buffers]
    sizes = [view.nbytes for view in views]
    connection.send_bytes(struct.pack(f"<{1 + len(sizes)}Q", len(sizes), *sizes) + file.getvalue())
    for view in views:
        connection.send_bytes(view)


def receive(connection: Any) -> Any:
    """Receive what `send` sent. Arrays and tensors may be written to."""
    head = connection.recv_bytes()
    (num_buffers,) = struct.unpack_from("<Q", head)
    sizes = struct.unpack_from(f"<{num_buffers}Q", head, 8)
    buffers = []
    for size in sizes:
        buffer = bytearray(size)
        connection.recv_bytes_into(buffer)
        buffers.append(buffer)
    return pickle.loads(memoryview(head)[8 + 8 * num_buffers :], buffers=buffers)


def _kept(buffer: pickle.PickleBuffer, buffers: list[pickle.PickleBuffer]) -> bool:
    """Put a large buffer aside: False tells the pickler so."""
    if buffer.raw().nbytes < _SMALL_BYTES:
        return True
    buffers.append(buffer)
    return False


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
