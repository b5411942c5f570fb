"""pure. A memory estimate in words: a table of stages, what it assumes, and a verdict."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from megatron.sft.memory_estimate import GIB, gib

_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": GIB, "kb": 10**3, "mb": 10**6}
_UNITS |= {"gb": 10**9, "tib": 2**40, "tb": 10**12}
FRAGMENTATION_PERCENT = 5
"""Share of the tensors' peak that torch's allocator holds beyond it: 2 to 5 % is common where
segments grow, as training lets them.
"""
LIBRARIES_BYTES = 2 * GIB
"""CUDA context, NCCL's buffers, cuBLAS's workspace: 1 to 2 GiB is common."""
ESTIMATED = "estimated: kernels' saved tensors by table; 2 % above what one H200 held"


class Row(NamedTuple):
    """One part, over all stages."""

    name: str
    how: str
    """run, extrapolated or described."""
    sizes: tuple[int, ...]


def with_margin(peak: int) -> int:
    """Returns the memory that a GPU needs for `peak` bytes of tensors: what lies between them, and
    libraries.
    """
    return peak + peak * FRAGMENTATION_PERCENT // 100 + LIBRARIES_BYTES


class Column(NamedTuple):
    """One stage, or several that are alike."""

    name: str
    parts: Mapping[tuple[str, str], int]
    """(name, how) -> bytes, in order."""
    peak: int

    @property
    def margin(self) -> int:
        """Bytes that torch does not allocate for tensors."""
        return with_margin(self.peak) - self.peak


def parse_memory(text: str, flag: str = "--memory") -> int:
    """Returns bytes: `80GiB -> 85899345920`, `80GB -> 80000000000`; ValueError for no size."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].lower() not in _UNITS or not float(match[1]):
        raise ValueError(f"{flag} {text}: must be a size above 0, such as 80GiB or 141GB")
    size = int(float(match[1]) * _UNITS[match[2].lower()])
    if size < 2**20 and not match[2]:
        raise ValueError(f"{flag} {text} is {size:,} bytes; give the unit: {text.strip()}GiB")
    return size


def rows_of(columns: Sequence[Column]) -> list[Row]:
    """Returns the parts of all columns, in the order in which they first occur."""
    names = list(dict.fromkeys(key for column in columns for key in column.parts))
    return [Row(*key, tuple(column.parts.get(key, 0) for column in columns)) for key in names]


def table(columns: Sequence[Column], memory: int | None) -> list[str]:
    """Returns lines for a terminal, in GiB."""
    head = ["GiB on each GPU", "", *(column.name for column in columns)]
    body = [[row.name, row.how, *map(gib, row.sizes)] for row in rows_of(columns)]
    sums = [
        ["peak of tensors", "", *(gib(column.peak) for column in columns)],
        ["margin", "described", *(gib(column.margin) for column in columns)],
        ["together", "", *(gib(column.peak + column.margin) for column in columns)],
    ]
    rows = [head, *body, *sums]
    if memory is not None:
        left = [memory - column.peak - column.margin for column in columns]
        rows.append([f"left of {gib(memory)}", "", *map(gib, left)])
    widths = [max(len(row[index]) for row in rows) for index in range(len(head))]
    return [
        "  ".join(
            cell.ljust(width) if index < 2 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    ]


def verdict(columns: Sequence[Column], memory: int) -> tuple[bool, str]:
    """Returns whether the run fits, and a line that says so."""
    fullest = max(columns, key=lambda column: column.peak + column.margin)
    left = memory - fullest.peak - fullest.margin
    if left >= 0:
        return True, f"fits: {gib(left)} GiB left on {fullest.name}"
    return False, f"does not fit: {gib(-left)} GiB too much on {fullest.name}"


def as_json(columns: Sequence[Column], about: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the estimate in bytes."""
    return {
        **about,
        "status": ESTIMATED,
        "stages": [
            {
                "name": column.name,
                "parts": [
                    {"name": name, "how": how, "bytes": size}
                    for (name, how), size in column.parts.items()
                ],
                "peak_bytes": column.peak,
                "margin_bytes": column.margin,
            }
            for column in columns
        ],
    }
