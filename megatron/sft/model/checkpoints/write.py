"""tensor. Writes the files of a checkpoint, and computes their checksums while writing.

To read a file again for its checksum would cost 0.4 CPU seconds per GB more, and disk reads if the
page cache has dropped it by then. So would torch's own checksums, which nobody compares.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO, NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import (
    SerializationFormat,
    WriteResult,
    _StorageWriterTransforms,
    _write_item,
)
from torch.serialization import get_crc32_options, set_crc32_options
from zlib_ng.zlib_ng import crc32

from megatron.sft.model.checkpoints.checksums import BLOCK, Sum

Part = tuple[str, str, tuple[Sequence[Any], Sequence[Any]]]
"""A file that megatron-core asks for: its path, its name in the checkpoint, and its items, as
(items with bytes, items with tensors).
"""


class Written(NamedTuple):
    """Record of the parts that were written."""

    results: dict[int, list[WriteResult]]
    """Number of the part -> place of each of its items, for megatron-core's table of contents."""
    sums: dict[str, Sum]
    """Name in the checkpoint -> size and checksum."""


def write_parts(parts: Iterable[Part]) -> Written:
    """Writes each part to its file, and waits until it is on disk. Of tensors on a device one at a
    time is copied to the host. Raises OSError if the disk is full.
    """
    results, sums = {}, {}
    for number, (path, name, (of_bytes, tensors)) in enumerate(parts):
        with open(path, "wb") as file:
            stream = _SummedStream(file)
            items = (*of_bytes, *tensors)
            try:
                with _no_sums_of_torch():
                    results[number] = [_write(stream, name, item, data) for item, data in items]
            # After a failed write torch raises "unexpected pos 704 vs 598": raise the cause.
            except RuntimeError:
                if stream.failure is not None:
                    raise stream.failure from None
                raise
            file.flush()
            os.fsync(file.fileno())
        sums[name] = stream.sum
    return Written(results, sums)


def _write(stream: io.RawIOBase, name: str, item: Any, data: Any) -> WriteResult:
    transforms, form = _StorageWriterTransforms(), SerializationFormat.TORCH_SAVE
    on_host = data.cpu() if isinstance(data, torch.Tensor) else data
    return _write_item(transforms, stream, on_host, item, name, form)


@contextmanager
def _no_sums_of_torch() -> Iterator[None]:
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


class _SummedStream(io.RawIOBase):
    """A file stream that sums the bytes written to it. It can only be written from start to end.

    torch passes the memory of a tensor in one piece, so that nothing is copied.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.sum = Sum(0, 0)
        self.failure: OSError | None = None
        """First failure of a write, which torch replaces by an error of its own."""

    def write(self, data: Any) -> int:
        """Writes all of `data`, a buffer."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), BLOCK):
            block = view[start : start + BLOCK]
            try:
                self._file.write(block)
            except OSError as error:
                self.failure = self.failure or error
                raise
            self.sum = Sum(self.sum.num_bytes + len(block), crc32(block, self.sum.crc))
        return len(view)

    def tell(self) -> int:
        """Returns the number of bytes written."""
        return self.sum.num_bytes
