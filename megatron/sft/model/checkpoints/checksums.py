"""pure. Sizes and CRC-32 of a checkpoint's files, by which damaged or missing files are found.

`checksums.json` is the last file that is written into a checkpoint. Earlier versions did not write
it.

The sums are zlib's; zlib-ng computes the same ones in a tenth of the time.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from zlib_ng.zlib_ng import crc32

from megatron.packing.folder_gate import is_below
from megatron.packing.quoting import shown
from megatron.packing.user_files import read_json

CHECKSUMS = "checksums.json"
BLOCK = 1 << 18
"""Bytes that are read or written before they are summed: they are still in the cache then."""


class Sum(NamedTuple):
    """Size in bytes and CRC-32 of a file."""

    num_bytes: int
    crc: int


def sum_of(path: Path) -> Sum:
    """Reads a file once, in blocks in the same memory, and returns its sum."""
    num_bytes, crc = 0, 0
    block = memoryview(bytearray(BLOCK))
    with path.open("rb", buffering=0) as file:
        while length := file.readinto(block):
            num_bytes, crc = num_bytes + length, crc32(block[:length], crc)
    return Sum(num_bytes, crc)


def file_names(checkpoint: Path) -> list[str]:
    """Returns all files of a checkpoint but the checksums, relative to it, in order."""
    names = (str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file())
    return sorted(name for name in names if name != CHECKSUMS)


def write_checksums(checkpoint: Path, sums: dict[str, Sum]) -> None:
    """Writes `checksums.json`, which `faults_in` compares files with."""
    (checkpoint / CHECKSUMS).write_text(json.dumps({"crc32": sums}, indent=0) + "\n")


def read_checksums(checkpoint: Path) -> dict[str, Sum] | None:
    """Returns the sums in `checksums.json`, by file name; None for a checkpoint without it. Raises
    ValueError if the file is damaged.
    """
    path = checkpoint / CHECKSUMS
    if not os.path.lexists(path):
        return None
    try:
        found = read_json(path)
        files = found.get("crc32") if isinstance(found, dict) else None
        if not isinstance(files, dict) or not files:
            raise ValueError('it names no file, as {"crc32": {file: [size, checksum]}} does')
        return {name: _sum(name, values) for name, values in files.items()}
    except ValueError as error:
        raise ValueError(
            f"{path} must hold the sizes and checksums of the checkpoint's files: {error!s:.200}"
        ) from None


def _sum(name: str, values: object) -> Sum:
    if not is_below(name):
        raise ValueError(f"it names {shown(name)}, which is no file of the checkpoint")
    if not isinstance(values, list) or [type(value) for value in values] != [int, int]:
        raise ValueError(f"of {shown(name)} it has no two whole numbers")
    return Sum(*values)


def faults_in(checkpoint: Path, names: Iterable[str], sums: dict[str, Sum]) -> list[str]:
    """Returns a line for each of the files `names` that is missing, was changed, or does not belong
    to the checkpoint.
    """
    faults = []
    for name in names:
        path = checkpoint / name
        if name not in sums:
            faults.append(f"{path} was not saved with this checkpoint")
        elif (size := _size_of(path)) is None:
            faults.append(f"{path} is missing")
        elif size != sums[name].num_bytes:
            faults.append(f"{path} has {size:,} bytes, but {sums[name].num_bytes:,} were saved")
        elif sum_of(path) != sums[name]:
            faults.append(f"{path} is damaged: its checksum is not that of what was saved")
    return faults


def _size_of(path: Path) -> int | None:
    try:
        return path.stat().st_size if path.is_file() else None
    except (OSError, ValueError):  # a name that no file system allows, from a damaged list
        return None
