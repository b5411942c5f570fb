"""tensor. Writes the files of a checkpoint, with their checksums made on the way.

A file that is read again for its checksum costs 0.4 CPU seconds per GB more, and a copy in the
page cache that may be gone by then.
"""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, BinaryIO, NamedTuple

from torch.distributed.checkpoint.filesystem import (
    SerializationFormat,
    WriteResult,
    _StorageWriterTransforms,
    _write_item,
)

from megatron.sft.model.checkpoints.checksums import Sum

Part = tuple[str, str, tuple[Sequence[Any], Sequence[Any]]]
"""A file that megatron-core wants written: path, name in the checkpoint, (items with their bytes,
items with their tensors on the host).
"""


class Written(NamedTuple):
    """Record of the parts that were written."""

    results: dict[int, list[WriteResult]]
    """Part -> where each of its items is; megatron-core makes the table of contents of them."""
    sums: dict[str, Sum]
    """Name in the checkpoint -> size and checksum."""


def write_parts(parts: Iterable[Part]) -> Written:
    """Writes each part into its file, and waits until the disk has it; OSError where it has no
    room.
    """
    results, sums = {}, {}
    for number, (path, name, (of_bytes, tensors)) in enumerate(parts):
        with open(path, "wb") as file:
            stream = _SummedStream(file)
            items = (*of_bytes, *tensors)
            try:
                results[number] = [_write(stream, name, item, data) for item, data in items]
            except RuntimeError:  # torch's "unexpected pos 704 vs 598", once a write has failed
                if stream.failure is not None:
                    raise stream.failure from None
                raise
            file.flush()
            os.fsync(file.fileno())
        sums[name] = stream.sum
    return Written(results, sums)


def _write(stream: io.RawIOBase, name: str, item: Any, data: Any) -> WriteResult:
    transforms, form = _StorageWriterTransforms(), SerializationFormat.TORCH_SAVE
    return _write_item(transforms, stream, data, item, name, form)


class _SummedStream(io.RawIOBase):
    """A file that is written from its start to its end, and adds up what it is given.

    torch gives a tensor's memory in one piece, so that nothing is copied.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.sum = Sum(0, 0)
        self.failure: OSError | None = None
        """The first one of a write, which torch hides."""

    def write(self, data: Any) -> int:
        """Writes all of `data`, a buffer."""
        view = memoryview(data).cast("B")
        try:
            self._file.write(view)
        except OSError as error:
            self.failure = self.failure or error
            raise
        self.sum = Sum(self.sum.num_bytes + len(view), zlib.crc32(view, self.sum.crc))
        return len(view)

    def tell(self) -> int:
        """Returns the number of bytes written."""
        return self.sum.num_bytes
