"""pure. The request to a scheduler, its answer, and the check of any answer.

Invariants of every Schedule (`check_schedule` states them as code):

- each sequence is in exactly one pack, and no pack holds more tokens than the capacity;
- all ranks have the same number of microbatches, a positive multiple of `microbatch_multiple`;
- these are at most as many as sequences, or as fetches if there are more of those, rounded up to
  the multiple: an absurd answer must not use up all memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from megatron.packing.quoting import shown
from megatron.packing.scheduling.cost import PackCost
from megatron.packing.scheduling.options import SchedulerOptions
from megatron.packing.scheduling.step_time import StepModel, step_bound

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


class CapacityError(ValueError):
    """Sequences that must share a pack, or one alone, are longer than the capacity."""


class Sorted(NamedTuple):
    """The sequences of a request, the longest first, equal ones in global order. Where payloads
    cost something the costliest come first, as a short text may have many images.
    """

    order: IntArray
    """int64 [N], global number of each."""
    length: IntArray
    """int64 [N], tokens."""
    cost: FloatArray
    """float64 [N], of the sequence alone, in the unit of the request's cost. Descending, except
    where a longer sequence costs less because few of its tokens count for the loss.
    """


@dataclass(frozen=True, kw_only=True)
class ScheduleRequest:
    """The sequences of one global batch and the packs they may go to.

    Sequences are numbered 0..N-1 in global order: by source rank, then in the order loaded there.
    ValueError where fields contradict one another, CapacityError where a sequence alone is over
    capacity: what can be built can be scheduled.
    """

    lengths: IntArray
    """int64 [N], tokens that each sequence occupies in a pack, alignment included; at least 1."""
    source_rank: IntArray
    """int64 [N], data-parallel rank that loaded each sequence."""
    source_fetch: IntArray
    """int64 [N], number of the `next` call of that rank's iterator that gave it, from 0."""
    steps_delayed: IntArray | None = None
    """int64 [N], steps between loading and this step; None where no sequence ever waits."""
    loss_tokens: IntArray | None = None
    """int64 [N], tokens of each sequence that count for the loss; None where only lengths are
    known.
    """
    squares: IntArray | None = None
    """int64 [N], twice the pairs of tokens that attend in each sequence, alignment included; None
    where all are L^2, as where no sequence is a tree.
    """
    payload_costs: FloatArray | None = None
    """float64 [N], what each sequence costs beside its tokens, in the unit of `cost` (see
    `payload_cost`); None where none has payloads.
    """
    num_ranks: int
    """Data-parallel ranks."""
    num_fetches: int
    """`next` calls per rank."""
    capacity: int
    """Tokens that a pack may hold."""
    cost: PackCost
    """Cost of a pack, which schedulers balance."""
    microbatch_multiple: int = 1
    """Microbatches per rank must be a multiple of this."""
    model: StepModel = field(default_factory=StepModel)
    """Step-time model: how the layout makes ranks wait for one another."""
    seed: int = 0
    """Seed of the run. A scheduler's random choices come from it and `step`, so that a resumed
    run repeats them.
    """
    step: int = 0
    """Number of the optimizer step that the batch is for, from 0."""
    options: SchedulerOptions = field(default_factory=SchedulerOptions)
    """Options that the user set, for a scheduler of their own. The schedulers here read none."""

    def __post_init__(self) -> None:
        for name in ("num_ranks", "capacity", "microbatch_multiple"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, but is {getattr(self, name)}")
        limits: dict[str, tuple[int, int | None]] = {
            "lengths": (1, None),
            "source_rank": (0, self.num_ranks),
            "source_fetch": (0, self.num_fetches),
            "steps_delayed": (0, None),
            "loss_tokens": (0, None),
            "squares": (1, None),
        }
        for name, (low, high) in limits.items():
            if getattr(self, name) is not None:
                _check_array(name, getattr(self, name), len(self.lengths), low, high)
                # A scheduler that sorts them in place would schedule other sequences than those
                # that are packed.
                self._make_read_only(name)
        if self.payload_costs is not None:
            _check_costs("payload_costs", self.payload_costs, len(self.lengths))
            self._make_read_only("payload_costs")
        if self.model.num_virtual_stages > 1 and self.microbatch_multiple % self.model.stage_group:
            raise ValueError(
                "microbatch_multiple must be a multiple of the model's stage_group, "
                f"{self.model.stage_group}, in an interleaved pipeline, but is "
                f"{self.microbatch_multiple}"
            )
        too_long = np.flatnonzero(self.lengths > self.capacity)
        if too_long.size:
            i = too_long[0]
            raise CapacityError(
                f"sequence {i} of the global batch (rank {self.source_rank[i]}, fetch "
                f"{self.source_fetch[i]}) has {self.lengths[i]} tokens, but a pack holds "
                f"{self.capacity}; raise --max-seqlen-per-dp-cp-rank or truncate the sequence"
            )

    def _make_read_only(self, name: str) -> None:
        read_only = getattr(self, name).view()
        read_only.flags.writeable = False
        object.__setattr__(self, name, read_only)

    @cached_property
    def sorted(self) -> Sorted:
        """The sequences, the longest first; with payloads the costliest."""
        if self.payload_costs is None:
            order = sorted_order(-self.lengths)
        else:
            order = np.lexsort((-self.lengths, -self.sequence_costs))
        length = self.lengths[order]
        return Sorted(order, length, self.sequence_costs[order])

    @cached_property
    def sequence_costs(self) -> FloatArray:
        """float64 [N], of each sequence alone, its payloads included."""
        of_tokens = self.cost.of_sequences(self.lengths, self.loss_tokens, self.squares)
        return of_tokens if self.payload_costs is None else of_tokens + self.payload_costs

    @cached_property
    def fewest_packs(self) -> int:
        """Lower bound of the packs of all ranks. It may be below what is possible.

        Bound L2 of Martello and Toth, "Lower bounds and reduction procedures for the bin packing
        problem" (1990): for each t up to capacity / 2, sequences longer than capacity - t are alone
        among those of t tokens or more; those longer than capacity / 2 have a pack each; and what
        is left of the others needs packs of its own. O(N log N).
        """
        length, capacity = self.sorted.length, self.capacity
        if length.size == 0:
            return 0
        if self.payload_costs is not None:
            length = -np.sort(-length)
        sums = np.concatenate(([0], np.cumsum(length)))
        num_large = int(np.searchsorted(-length, -(capacity // 2)))
        t = np.append(length[num_large:], 0)
        num_alone = np.searchsorted(-length[:num_large], t - capacity)
        free_beside_large = (num_large - num_alone) * capacity - (sums[num_large] - sums[num_alone])
        medium = np.append(sums[num_large + 1 :], sums[num_large]) - sums[num_large]
        overflow = np.maximum(medium - free_beside_large, 0)
        of_large = int((num_large - (-overflow // capacity)).max())
        return max(of_large, -(-int(sums[-1]) // capacity))

    @cached_property
    def fewest_microbatches(self) -> int:
        """Lower bound of the microbatches per rank. It may be below what is possible."""
        return rounded_up(self.fewest_packs / self.num_ranks, self.microbatch_multiple)

    @cached_property
    def rank_cost_bound(self) -> float:
        """Lower bound of the costliest rank's cost, without fixed costs.

        The largest of: the mean over ranks; the costliest sequence; and for each k, of the k *
        num_ranks + 1 costliest sequences some rank holds k + 1, at the least the k + 1 cheapest of
        them.

            2 ranks, costs 5 4 4 4 1    ->    mean 9; costliest 5; of the three costliest two share
                                              a rank: 4 + 4 = 8
        """
        cost, num_ranks = -np.sort(-self.sorted.cost), self.num_ranks
        if cost.size == 0:
            return 0.0
        sums = np.concatenate(([0.0], np.cumsum(cost)))
        # Of the costliest k * num_ranks + 1 sequences, the cheapest k + 1 end at k * num_ranks.
        cheapest = np.arange(num_ranks, cost.size, num_ranks)
        k = np.arange(1, cheapest.size + 1)
        pigeonhole = sums[cheapest + 1] - sums[cheapest - k]
        return float(max(sums[-1] / num_ranks, cost[0], pigeonhole.max(initial=0)))

    @cached_property
    def bound(self) -> float:
        """Lower bound of the modelled time, in the unit of the cost. In pipelines it holds for even
        packs only: a schedule of uneven ones may take less.
        """
        # A pack costs at least `least`, and so do those that fill and drain the pipeline.
        least_time = max(
            self.cost.least * (self.fewest_microbatches + filling_packs) / stages
            for stages, filling_packs in self.model.stage_paces()
        )
        return max(self.work_bound, least_time)

    @cached_property
    def work_bound(self) -> float:
        """`bound` as it would be if packs had no least cost."""
        cost, of_rank = self.sorted.cost, self.rank_cost_bound
        if cost.size and self.model.sync_every_microbatch:
            # Ranks wait for one another at every microbatch, so a step takes the sum of each
            # microbatch's costliest pack: at least the mean over ranks, at least any sequence.
            of_rank = max(float(cost.sum()) / self.num_ranks, float(cost.max()))
        return step_bound(cost, of_rank, self.cost.fixed, self.fewest_microbatches, self.model)

    def pack_lengths(self, schedule: Schedule) -> IntArray:
        """Returns the tokens of each pack, int64 [num_ranks * num_microbatches], alignment of
        sequences included.
        """
        tokens = np.zeros(schedule.num_ranks * schedule.num_microbatches, np.int64)
        np.add.at(tokens, schedule.pack, self.lengths)
        return tokens

    def pack_costs(self, schedule: Schedule) -> FloatArray:
        """Returns the cost of each pack, float64 [num_ranks, num_microbatches]: its fixed cost
        included, and at least the least one.
        """
        num_packs = schedule.num_ranks * schedule.num_microbatches
        costs = np.full(num_packs, float(self.cost.fixed))
        costs += np.bincount(schedule.pack, weights=self.sequence_costs, minlength=num_packs)
        return np.maximum(costs, self.cost.least).reshape(schedule.num_ranks, -1)

    def time_of(self, schedule: Schedule) -> float:
        """Returns the modelled time of the step (`StepModel.time_of`), in the unit of the cost."""
        return self.model.time_of(self.pack_costs(schedule))


@dataclass(frozen=True)
class Schedule:
    """Place of each sequence: pack `microbatch[i]` of rank `rank[i]`. Both are int64 [N]."""

    rank: IntArray
    microbatch: IntArray
    num_ranks: int
    num_microbatches: int
    """Per rank, equal on all ranks."""
    context_parallel_size: IntArray | None = None
    """int64 [num_ranks, num_microbatches], of each pack. Only None, the layout's everywhere, is
    trained so far.
    """

    @property
    def pack(self) -> IntArray:
        """int64 [N], rank * num_microbatches + microbatch of each sequence."""
        return self.rank * self.num_microbatches + self.microbatch


class Scheduler(Protocol):
    """Function from request to schedule that keeps the invariants in this module's docstring.

    One rank calls it, and the others receive the schedule. Random choices come from the request's
    `seed` and `step`, so that a resumed run repeats them.
    """

    def __call__(self, request: ScheduleRequest, /) -> Schedule: ...


def check_schedule(request: ScheduleRequest, schedule: object) -> None:
    """Raises ValueError if `schedule` is not a Schedule, or breaks an invariant of this module's
    docstring.
    """
    if not isinstance(schedule, Schedule):
        raise ValueError(f"a scheduler must return a Schedule, but returned {schedule!r:.80}")
    for name in ("num_ranks", "num_microbatches"):
        number = getattr(schedule, name)
        if isinstance(number, bool) or not isinstance(number, int | np.integer):
            raise ValueError(f"schedule.{name} must be an int, but is {shown(number)}")
    if schedule.num_ranks != request.num_ranks:
        raise ValueError(
            f"schedule must be for {request.num_ranks} ranks, but is for {schedule.num_ranks}"
        )
    num_microbatches, multiple = schedule.num_microbatches, request.microbatch_multiple
    if num_microbatches < 1 or num_microbatches % multiple:
        raise ValueError(
            f"microbatches per rank must be a positive multiple of {multiple}, "
            f"but are {num_microbatches}"
        )
    most = rounded_up(max(request.lengths.size, request.num_fetches), multiple)
    if num_microbatches > most:  # memory would end before time does
        raise ValueError(
            f"microbatches per rank must be at most {most}, but are {num_microbatches}"
        )
    _check_array("schedule.rank", schedule.rank, request.lengths.size, 0, request.num_ranks)
    _check_array(
        "schedule.microbatch", schedule.microbatch, request.lengths.size, 0, num_microbatches
    )
    if schedule.context_parallel_size is not None:
        raise ValueError(
            "schedule.context_parallel_size must be None: all packs have the layout's so far"
        )
    check_capacity(request, schedule)


def check_capacity(request: ScheduleRequest, schedule: Schedule) -> None:
    """Raises CapacityError if a pack of `schedule` holds more than the capacity."""
    tokens = request.pack_lengths(schedule)
    fullest = int(tokens.argmax())
    if tokens[fullest] > request.capacity:
        rank, microbatch = divmod(fullest, schedule.num_microbatches)
        raise CapacityError(
            f"microbatch {microbatch} of rank {rank} has {tokens[fullest]} tokens, "
            f"but a pack holds {request.capacity}; raise --max-seqlen-per-dp-cp-rank "
            "or use --sequence-packing-scheduler default"
        )


def rounded_up(number: float, multiple: int) -> int:
    """Returns `number` raised to the next positive multiple of `multiple`."""
    return max(1, math.ceil(number / multiple)) * multiple


def sorted_order(values: IntArray) -> IntArray:
    """Returns the indices that sort `values`, equal ones in order.

    They are those of `np.argsort(values, kind="stable")`, and are found several times faster.

    16-bit numbers are sorted stably in linear time, so longer ones are by the low half first, then
    by the high one.
    """
    above = values - values.min(initial=0)
    order = np.argsort(above.astype(np.uint16), kind="stable")  # the cast takes the low bits
    for shift in range(16, int(above.max(initial=0)).bit_length(), 16):
        order = order[np.argsort((above >> shift).astype(np.uint16)[order], kind="stable")]
    return order


def _check_costs(name: str, values: object, size: int) -> None:
    """Raises ValueError unless `values` is float64 [size], each at least 0 and finite."""
    is_array = isinstance(values, np.ndarray) and values.dtype == np.float64
    if not is_array or values.shape != (size,):  # type: ignore[attr-defined]
        raise ValueError(f"{name} must be float64 [{size}], but is {shown(values)}")
    if size and not 0 <= values.min() <= values.max() < math.inf:  # type: ignore[attr-defined]
        raise ValueError(f"{name} must be at least 0 and finite, but has {shown(values)}")


def _check_array(name: str, values: object, size: int, low: int, high: int | None) -> None:
    """Raises ValueError unless `values` is int64 [size], each at least `low` and below `high`."""
    if not isinstance(values, np.ndarray):
        raise ValueError(f"{name} must be a numpy array, int64 [{size}], but is {shown(values)}")
    if values.dtype != np.int64 or values.shape != (size,):
        raise ValueError(
            f"{name} must be int64 [{size}], but is {values.dtype} {list(values.shape)}"
        )
    if size and (values.min() < low or (high is not None and values.max() >= high)):
        limit = f"at least {low}" + ("" if high is None else f" and below {high}")
        raise ValueError(f"{name} must be {limit}, but spans {values.min()} to {values.max()}")
