"""tensor. What one data-parallel rank does in a step, as the numbers that its model-parallel peers receive.

Everything here is known once the schedule is, so it travels once per step, as exact int64; nothing is left for the
microbatches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron.packing.layout import Alignment, PackLayout
from megatron.packing.lengths import LengthTable
from megatron.packing.sample import num_words
from megatron.packing.scheduling.problem import Schedule
from megatron.packing.stats import PackingStats

_NUM_STATS = len(PackingStats.__dataclass_fields__)


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """The sequences of one data-parallel rank in global order, int64 [n] each, and the whole batch's account."""

    stats: PackingStats
    microbatch: np.ndarray
    length: np.ndarray
    kind: np.ndarray

    @classmethod
    def for_rank(cls, rank: int, table: LengthTable, schedule: Schedule, stats: PackingStats) -> StepPlan:
        """The part of `schedule` that data-parallel rank `rank` does."""
        mine = schedule.rank == rank
        return cls(stats=stats, microbatch=schedule.microbatch[mine], length=table.length[mine], kind=table.kind[mine])

    @property
    def num_words(self) -> np.ndarray:
        """int64 [n]: int32 words of each sample on the wire."""
        return num_words(self.length, self.kind)

    def members(self) -> list[np.ndarray]:
        """For each microbatch the indices of its sequences, ascending."""
        return [np.flatnonzero(self.microbatch == m) for m in range(self.stats.num_microbatches)]

    def layouts(self, alignment: Alignment) -> list[PackLayout]:
        """For each microbatch its layout."""
        return [PackLayout.of(self.length[members].tolist(), alignment) for members in self.members()]

    def to_numbers(self) -> np.ndarray:
        """int64 [fields of the account + 3 n]."""
        return np.concatenate((self.stats.to_numbers(), self.microbatch, self.length, self.kind))

    @classmethod
    def from_numbers(cls, numbers: np.ndarray) -> StepPlan:
        """The inverse of `to_numbers`."""
        microbatch, length, kind = numbers[_NUM_STATS:].reshape(3, -1)
        stats = PackingStats.from_numbers(numbers[:_NUM_STATS])
        return cls(stats=stats, microbatch=microbatch, length=length, kind=kind)
