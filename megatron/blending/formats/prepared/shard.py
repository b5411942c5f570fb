"""pure. Opens a shard of a prepared folder: the archive, and the offsets of its samples, which its
`.tar.idx` has.
"""

import warnings
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.blending.formats.files import File, LocalFile, is_file, open_file
from megatron.blending.formats.prepared.tar import BLOCK, Buffer, TarError, scan_tar

# Shards that stay mapped. A process may have 65,530 memory maps, and a shard takes two. Mapping it
# again takes 30 microseconds.
_MAPPED_SHARDS = 8192
# Remote shards whose offsets stay in memory, 8 bytes per sample.
_REMOTE_SHARDS = 512


class Shard(NamedTuple):
    """An opened archive."""

    file: File
    content: Any
    """Mapped memory of a local file; None for a remote one."""
    offsets: memoryview
    """Offset of each sample, and the end of the last one."""


def open_shard(prefix: str, name: str, num_samples: int, opened_at: int) -> Shard:
    """Opens shard `name`, by its index file, or without a valid one by scanning the archive. Raises
    ValueError if the shard is not as it was prepared.

    opened_at: time at which the data set was opened, as a part of the cache's key. Data sets that
    were opened at another time do not share the shard.
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
    """Returns why offsets cannot be those of the archive; "" if they can. The archive must end at
    the last offset.
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
