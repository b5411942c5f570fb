"""pure. The place that a sample was read from (SourceInfo), and those of a batch (Sources)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any


@dataclass(slots=True)
class SourceInfo:
    """Place that a sample was read from."""

    dataset_path: str
    index: int | str
    shard_name: str
    file_names: tuple[str, ...] = ()


_values = attrgetter("dataset_path", "index", "shard_name", "file_names")


class Sources(tuple[SourceInfo, ...]):
    """Places that the samples of a batch were read from: a tuple of SourceInfo.

    It is pickled by columns. Pickled one by one, each object took a worker as long to send as a
    kilobyte of text.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        if not self or any(type(source) is not SourceInfo for source in self):
            return Sources, (tuple(self),)
        return _of_columns, tuple(zip(*map(_values, self)))


def _of_columns(*columns: Sequence[Any]) -> Sources:
    return Sources(map(SourceInfo, *columns))
