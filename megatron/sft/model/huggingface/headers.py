"""pure. Reads and checks the header of one safetensors file."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any, NamedTuple

from megatron.packing.quoting import shown
from megatron.packing.user_files import parse_json

MAX_HEADER_BYTES = 100_000_000
_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}
_BYTES |= {"F8_E4M3": 1, "F8_E8M0": 1, "U8": 1, "I8": 1, "I32": 4, "I64": 8}
"""Bytes per number of each type."""
_LFS_POINTER = b"version https://git-lfs.github.com"
_COPY_AGAIN = "copy it again from where it came"


class Quantized(NamedTuple):
    """The scales of a quantized tensor."""

    scales: Stored
    block: tuple[int, int]
    """Rows and columns that share a scale."""


class Stored(NamedTuple):
    """One tensor in a file."""

    path: Path
    name: str
    """Name in the file, in any spelling that transformers loads."""
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    """Its bytes in the file: [begin, end)."""
    quantized: Quantized | None = None
    """None for a tensor that is not quantized. Of others, `name`, `begin` and `end` are those of
    their codes, and `shape` is that of their values.
    """


def read_header(file: Path) -> dict[str, Any]:
    """Returns dtype, shape and data_offsets of each tensor in a safetensors file, by name. Offsets
    count from the first byte of the file. Raises ValueError if the file is damaged or cut off.

    A file is: 8 bytes with the size of the header, the header in JSON, the tensors without gaps.
    """
    with file.open("rb") as stream:
        length = stream.read(8)
        (size,) = struct.unpack("<Q", length) if len(length) == 8 else (0,)
        text = stream.read(min(size, MAX_HEADER_BYTES))
    try:
        header: Any = parse_json(text.decode()) if 0 < size == len(text) else None
        metadata = header.pop("__metadata__", None) or {}
        if not all(isinstance(text, str) for text in metadata.values()) or not all(
            _is_entry(**entry) for entry in header.values()
        ):
            raise TypeError
    except (ValueError, TypeError, AttributeError):
        raise ValueError(_no_header(file)) from None
    end = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        # Sorted by offset, each tensor must begin where the last one ends, and have the bytes of
        # its shape. A file that was cut off or overwritten fails this.
        begin, until = entry["data_offsets"]
        of_type = _BYTES.get(entry["dtype"])
        if begin != end or (of_type and until - begin != of_type * math.prod(entry["shape"])):
            raise ValueError(
                f"{file} must hold one tensor after the other, each of the size that its shape "
                f"says, but {shown(name)} is not so; {_COPY_AGAIN}"
            )
        end = until
    if file.stat().st_size != 8 + size + end:
        raise ValueError(
            f"{file} must have {8 + size + end} bytes, but has {file.stat().st_size}; {_COPY_AGAIN}"
        )
    for entry in header.values():
        entry["data_offsets"] = [8 + size + offset for offset in entry["data_offsets"]]
    return header


def _no_header(file: Path) -> str:
    """Returns what is wrong with a file that is not in the format."""
    with file.open("rb") as stream:
        begin = stream.read(len(_LFS_POINTER))
    if begin == _LFS_POINTER:
        return (
            f"{file} must be a safetensors file, but is the pointer of Git LFS to one; do git lfs "
            "pull where it was cloned"
        )
    content = "has no header" if begin else "is empty"
    return f"{file} must be a safetensors file, but {content}; {_COPY_AGAIN}"


def _is_entry(dtype: object, shape: list[Any], data_offsets: list[Any]) -> bool:
    begin, end = data_offsets
    return (
        isinstance(dtype, str)
        and type(begin) is type(end) is int
        and 0 <= begin <= end
        and all(type(size) is int and size >= 0 for size in shape)
    )
