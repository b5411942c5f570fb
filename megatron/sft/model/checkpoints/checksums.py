"""pure. Sizes and CRC-32 of a checkpoint's files, by which damaged or missing files are found.

`checksums.json` is the last file that is written into a checkpoint. Earlier versions did not write
it.

The sums are zlib's. On x86 processors core.cpp computes the same ones in a quarter of the time,
where setup.py found a compiler.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron.packing.folder_gate import is_below
from megatron.packing.quoting import shown
from megatron.packing.user_files import read_json

CHECKSUMS = "checksums.json"
BLOCK = 1 << 18
"""Bytes that are read or written before they are summed: they are still in the cache then."""
_MIN_COMPILED_BYTES = 1 << 10


class Sum(NamedTuple):
    """Size in bytes and CRC-32 of a file."""

    num_bytes: int
    crc: int


def _load() -> Callable[[int, int, int], int] | None:
    found = importlib.util.find_spec("megatron.sft.model.checkpoints._core")
    if found is None or found.origin is None:
        return None
    library = ctypes.CDLL(found.origin)
    if not hasattr(library, "has_multiplication") or not library.has_multiplication():
        return None
    function: Callable[[int, int, int], int] = library.crc32_continued
    function.argtypes = [ctypes.c_uint32, ctypes.c_void_p, ctypes.c_int64]  # type: ignore[attr-defined]
    function.restype = ctypes.c_uint32  # type: ignore[attr-defined]
    # A wrong sum would be written into checkpoints, and be found years later.
    sample = np.arange(999, dtype=np.uint8)
    is_right = function(1, sample.ctypes.data, sample.size) == zlib.crc32(sample.data, 1)
    return function if is_right else None


_COMPILED = _load()
"""CRC-32 of (sum before, address, number of bytes); None without a compiler, or on a processor that
lacks an instruction.
"""


def crc32(data: memoryview, crc: int = 0) -> int:
    """Returns `zlib.crc32(data, crc)`. Other threads run meanwhile. Costs 0.07 CPU seconds per GB,
    and zlib 0.24, of bytes in the cache.
    """
    if _COMPILED is None or len(data) < _MIN_COMPILED_BYTES:
        return zlib.crc32(data, crc)
    return _COMPILED(crc, np.frombuffer(data, np.uint8).ctypes.data, len(data))


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
