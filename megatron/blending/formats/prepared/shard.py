"""pure. A shard of a prepared folder is an archive, and where in it each sample starts, by its
`.tar.idx`.
"""

import warnings
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.blending.formats.files import File, LocalFile, is_file, open_file
from megatron.blending.formats.prepared.tar import BLOCK, Buffer, TarError, scan_tar

# A process may have 65,530 memory maps; a shard takes two, and costs 30 microseconds to be mapped
# again.
_MAPPED_SHARDS = 8192
# Of a remote shard the offsets are in memory, 8 bytes per sample.
_REMOTE_SHARDS = 512


class Shard(NamedTuple):
    """A Shard is one archive, opened."""

    file: File
    content: Any
    """The memory that a local file is mapped to."""
    offsets: memoryview
    """Offset at which each sample starts, then that at which the last ends."""


def open_shard(prefix: str, name: str, num_samples: int, opened_at: int) -> Shard:
    """Opens shard `name`, by its index file or else by reading it through; ValueError if it is not
    as it was prepared.

    `opened_at`: when the data set was opened. What is cached is for those that were opened then.
    """
    location = prefix + name
    file = open_file(location)
    content = file.content if isinstance(file, LocalFile) else None
    fault = "is not there"
    if is_file(location + ".idx"):
        offsets = open_file(location + ".idx").array(np.uint64)
        fault = _fault_of_offsets(offsets, file, num_samples)
        if not fault:
            return Shard(file, content, offsets.data)
    warnings.warn(
        f"{location}.idx: {fault}; the archive is read through instead. Prepare the data set again",
        stacklevel=2,
    )
    try:
        scan = scan_tar(file if isinstance(file, LocalFile) else Buffer(file.read(0, file.size)))
    except TarError as error:
        raise ValueError(f"{location}: {error}") from error
    if len(scan.samples) != num_samples:
        raise ValueError(
            f"{location}: has {len(scan.samples)} samples, but {num_samples} when it was prepared; "
            "prepare the data set again"
        )
    return Shard(
        file,
        content,
        np.array([*(sample.start for sample in scan.samples), scan.end], np.uint64).data,
    )


def _fault_of_offsets(offsets: npt.NDArray[np.uint64], file: File, num_samples: int) -> str:
    """Says why offsets are not those of the archive, "" if they are: where they end, the archive
    must end.
    """
    if len(offsets) != num_samples + 1:
        return f"has {len(offsets) - 1} samples instead of {num_samples}"
    end = int(offsets[-1])
    if end > file.size or (offsets > end).any():
        return f"goes beyond its end, byte {end}, or that of the archive, {file.size}"
    if file.read(end, min(end + BLOCK, file.size)).strip(b"\0"):
        return f"ends at byte {end}, but the archive continues"
    if num_samples and not file.read(last := int(offsets[-2]), min(last + BLOCK, end)).strip(b"\0"):
        return f"goes to byte {end}, but the archive ends before {last}"
    return ""


open_local_shard = lru_cache(_MAPPED_SHARDS)(open_shard)
open_remote_shard = lru_cache(_REMOTE_SHARDS)(open_shard)
