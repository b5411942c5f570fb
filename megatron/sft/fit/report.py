"""pure. A memory estimate in words: a table of stages, what it assumes, and a verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from megatron.packing.memory_size import GIB
from megatron.sft.memory_estimate import gib

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
