"""pure. What a scheduler is asked and what it answers: which rank and microbatch each sequence of a global batch goes
to.

Invariants of every Schedule (`check_schedule` states them as code):

- each sequence is in exactly one pack, and no pack holds more tokens than the capacity;
- all ranks have the same number of microbatches, a positive multiple of `microbatch_multiple`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt

from megatron.packing.scheduling.bounds import StepBound, step_bound
from megatron.packing.scheduling.cost import PackCost
from megatron.packing.scheduling.step_time import StepModel
from megatron.packing.scheduling.work import Work

IntArray = npt.NDArray[np.int64]


class CapacityError(ValueError):
    """Sequences that must share a pack, or one alone, are longer than the capacity."""


@dataclass(frozen=True, kw_only=True)
class ScheduleRequest:
    """The sequences of one global batch and the packs they may go to.

    Sequences are numbered 0..N-1 in global order: by source rank, then in the order drawn there. ValueError where
    fields contradict one another, CapacityError where a sequence alone is over capacity: what can be built can be
    scheduled.
    """

    lengths: IntArray
    """int64 [N], tokens that each sequence occupies in a pack, alignment included; at least 1."""
    source_rank: IntArray
    """int64 [N], data-parallel rank that drew each sequence."""
    source_draw: IntArray
    """int64 [N], which `next` of that rank's iterator gave it, from 0."""
    num_ranks: int
    """Data-parallel ranks."""
    num_draws: int
    """`next` calls per rank."""
    capacity: int
    """Tokens that a pack may hold."""
    cost: PackCost
    """To balance by."""
    microbatch_multiple: int = 1
    """Microbatches per rank must be a multiple of this."""
    model: StepModel = field(default_factory=StepModel)
    """How the layout makes ranks wait for one another."""

    def __post_init__(self) -> None:
        for name in ("num_ranks", "capacity", "microbatch_multiple"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, but is {getattr(self, name)}")
        for name in ("lengths", "source_rank", "source_draw"):
            # A scheduler that sorts them in place would schedule other sequences than those that are packed.
            read_only = getattr(self, name).view()
            read_only.flags.writeable = False
            object.__setattr__(self, name, read_only)
        _check_array("lengths", self.lengths, self.lengths.size, 1, None)
        _check_array("source_rank", self.source_rank, self.lengths.size, 0, self.num_ranks)
        _check_array("source_draw", self.source_draw, self.lengths.size, 0, self.num_draws)
        if self.model.num_virtual_stages > 1 and self.microbatch_multiple % self.model.stage_group:
            raise ValueError(
                f"microbatch_multiple must be a multiple of the model's stage_group, {self.model.stage_group}, "
                f"in an interleaved pipeline, but is {self.microbatch_multiple}"
            )
        for i in np.flatnonzero(self.lengths > self.capacity)[:1]:
            raise CapacityError(
                f"sequence {i} of the global batch (rank {self.source_rank[i]}, draw {self.source_draw[i]}) has "
                f"{self.lengths[i]} tokens, but a pack holds {self.capacity}; "
                f"raise --max-seqlen-per-dp-cp-rank or truncate the sequence"
            )

    @cached_property
    def work(self) -> Work:
        """The sequences by descending cost, in exact integers."""
        return Work.of(self.lengths, self.cost)

    @cached_property
    def bound(self) -> StepBound:
        """What no schedule's modelled time is below."""
        return step_bound(self.work, self.num_ranks, self.capacity, self.microbatch_multiple, self.model)


@dataclass(frozen=True)
class Schedule:
    """Where each sequence goes: pack `microbatch[i]` of rank `rank[i]`. Both are int64 [N]."""

    rank: IntArray
    microbatch: IntArray
    num_ranks: int
    num_microbatches: int
    """Per rank, equal on all ranks."""

    @property
    def pack(self) -> IntArray:
        """int64 [N], rank * num_microbatches + microbatch of each sequence."""
        return self.rank * self.num_microbatches + self.microbatch

    def packs_of(self, rank: int) -> list[IntArray]:
        """Sequence ids of each microbatch of `rank`: num_microbatches arrays, ascending, int64, maybe empty."""
        ids = np.flatnonzero(self.rank == rank)
        by_microbatch = np.argsort(self.microbatch[ids], kind="stable")
        ends = np.cumsum(np.bincount(self.microbatch[ids], minlength=self.num_microbatches))
        return np.split(ids[by_microbatch], ends[:-1])


class Scheduler(Protocol):
    """A pure function from request to schedule that keeps the invariants in this module's docstring.

    The same request must give the same schedule on every rank and machine: break ties by integers, and sum in a fixed
    order or in integers, as `request.work` offers.
    """

    def __call__(self, request: ScheduleRequest, /) -> Schedule: ...


def check_schedule(request: ScheduleRequest, schedule: Schedule) -> None:
    """ValueError if `schedule` breaks an invariant of this module's docstring."""
    if schedule.num_ranks != request.num_ranks:
        raise ValueError(f"schedule must be for {request.num_ranks} ranks, but is for {schedule.num_ranks}")
    num_microbatches, multiple = schedule.num_microbatches, request.microbatch_multiple
    if num_microbatches < 1 or num_microbatches % multiple:
        raise ValueError(f"microbatches per rank must be a positive multiple of {multiple}, but are {num_microbatches}")
    _check_array("schedule.rank", schedule.rank, request.lengths.size, 0, request.num_ranks)
    _check_array("schedule.microbatch", schedule.microbatch, request.lengths.size, 0, num_microbatches)
    check_capacity(request, schedule)


def check_capacity(request: ScheduleRequest, schedule: Schedule) -> None:
    """CapacityError if a pack of `schedule` holds more than the capacity."""
    tokens = np.zeros(schedule.num_ranks * schedule.num_microbatches, np.int64)
    np.add.at(tokens, schedule.pack, request.lengths)
    fullest = int(tokens.argmax())
    if tokens[fullest] > request.capacity:
        rank, microbatch = divmod(fullest, schedule.num_microbatches)
        raise CapacityError(
            f"microbatch {microbatch} of rank {rank} has {tokens[fullest]} tokens, but a pack holds "
            f"{request.capacity}; raise --max-seqlen-per-dp-cp-rank or use --sequence-packing-scheduler default"
        )


def _check_array(name: str, values: IntArray, size: int, low: int, high: int | None) -> None:
    """ValueError unless `values` is int64 [size] with each element at least `low` and below `high`."""
    if values.dtype != np.int64 or values.shape != (size,):
        raise ValueError(f"{name} must be int64 [{size}], but is {values.dtype} {list(values.shape)}")
    if size and (values.min() < low or (high is not None and values.max() >= high)):
        limit = f"at least {low}" + ("" if high is None else f" and below {high}")
        raise ValueError(f"{name} must be {limit}, but spans {values.min()} to {values.max()}")
