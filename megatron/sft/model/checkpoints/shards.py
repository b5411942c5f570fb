"""tensor. Compares the shards of a checkpoint with its table of contents, before any of them is
read.

    .metadata      torch's table: tensor -> shard, offset, length
    *.distcp       shards; none may be missing, end early, or be outside the checkpoint

It is all that can be checked of a checkpoint without checksums, as Megatron-LM and earlier versions
write it. A shard of the same size with other content is only found when it is read.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from megatron.packing.folder_gate import is_below
from megatron.packing.quoting import shown
from megatron.sft.model.checkpoints.checksums import faults_in, file_names, read_checksums
from megatron.sft.model.checkpoints.folder import checkpoint_path, iterations
from megatron.sft.model.checkpoints.unpickling import read_metadata


def shard_faults(checkpoint: Path) -> list[str]:
    """Returns a line for each shard that is not as `.metadata` says. Raises ValueError if
    `.metadata` cannot be read, or could run code.
    """
    faults = []
    for name, end in sorted(_ends(checkpoint).items()):
        path = checkpoint / name
        if not is_below(name):
            faults.append(
                f"{checkpoint / '.metadata'} names the shard {shown(name)}, which is no file of "
                "the checkpoint"
            )
            continue
        try:
            state = os.stat(path)
        except (OSError, ValueError):  # a name that no file system allows
            faults.append(f"{path} is missing")
            continue
        if not stat.S_ISREG(state.st_mode):
            faults.append(f"{path} must be a file, but is none")
        elif state.st_size < end:
            faults.append(f"{path} has {state.st_size:,} bytes, but must have {end:,}")
    return faults


def _ends(checkpoint: Path) -> dict[str, int]:
    """Returns the least size of each shard: the end of its last entry."""
    metadata, ends = read_metadata(checkpoint), dict[str, int]()
    try:
        for entry in (metadata.storage_data or {}).values():
            name, offset, length = entry.relative_path, entry.offset, entry.length
            if [type(value) for value in (name, offset, length)] != [str, int, int]:
                raise TypeError(f"{shown(name)} has the entry {shown((offset, length))}")
            ends[name] = max(ends.get(name, 0), offset + length)
    except (AttributeError, TypeError) as error:
        raise ValueError(
            f"{checkpoint / '.metadata'} must say where tensors are, but does not: {error!s:.200}"
        ) from None
    return ends


def other_sound_iteration(folder: str | Path, damaged: int) -> int | None:
    """Returns the newest checkpoint other than `damaged` in which no fault is found. Reads all of
    its files if it has checksums.
    """
    others = (iteration for iteration in reversed(iterations(folder)) if iteration != damaged)
    return next((found for found in others if _is_sound(checkpoint_path(folder, found))), None)


def _is_sound(checkpoint: Path) -> bool:
    try:
        sums = read_checksums(checkpoint)
        if sums is not None and faults_in(checkpoint, {*sums, *file_names(checkpoint)}, sums):
            return False
        return not shard_faults(checkpoint)
    except (OSError, ValueError):
        return False
