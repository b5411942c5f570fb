"""pure. Compares schedulers on the same global batches, with padding as the baseline.

Two baselines model training without packing:

    padding, to the longest          one sequence per microbatch, padded to the longest sequence
    padding, to the microbatch's     as many consecutive sequences of a rank per microbatch as fit
                                     the capacity, padded to the longest of them
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.packing.scheduling.problem import Scheduler, ScheduleRequest, check_schedule
from megatron.packing.step.stats import PackingStats, padded_rows
from megatron.planner.sequences import Sequences
from megatron.planner.step_record import StepLayout, StepRecord

IntArray = npt.NDArray[np.int64]

PADDED_TO_LONGEST = "padding, to the longest"
PADDED_PER_MICROBATCH = "padding, to the microbatch's"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of a scheduler: means over the global batches."""

    name: str
    microbatches: float
    """Microbatches of each rank."""
    fill: float
    """Tokens without padding over the capacity of the packs."""
    padding: float
    """Share of the computed tokens that are padding."""
    balance: float
    """Modelled time over the lower bound."""
    bubble: float
    """Share of the modelled time of all devices in which they wait."""
    step_cost: float
    """Modelled time of a step, in units of the cost model."""
    schedule_seconds: float | None
    """Time to schedule a global batch (median); None for padding, which schedules nothing."""


class Failed(NamedTuple):
    """A scheduler that raised or returned an invalid schedule, with the reason."""

    name: str
    reason: str


class Comparison(NamedTuple):
    """All outcomes, baselines first, and each scheduler's schedule of the first global batch."""

    outcomes: list[Outcome]
    failed: list[Failed]
    records: list[StepRecord]


class _Asked(NamedTuple):
    """A global batch, and the request for its schedule."""

    title: str
    batch: Sequences
    request: ScheduleRequest


class _Account(NamedTuple):
    """Sums over one scheduled batch."""

    microbatches: int
    tokens: int
    computed: int
    capacity: int
    time: float
    bound: float
    bubble: float
    seconds: float | None


def compare(
    batches: Sequence[Sequences],
    layout: StepLayout,
    schedulers: Mapping[str, Scheduler],
    longest: int,
) -> Comparison:
    """Schedules each global batch with each scheduler.

    longest: length that the first baseline pads to.
    """
    asked = [
        _Asked(_title_of(number, len(batches), batch.size), batch, layout.request(batch))
        for number, batch in enumerate(batches, start=1)
    ]
    padded = {
        PADDED_TO_LONGEST: [
            _padded_to(
                np.full((layout.num_ranks, request.num_fetches), longest), 1, request, batch, layout
            )
            for _, batch, request in asked
        ],
        PADDED_PER_MICROBATCH: [
            _padded_per_microbatch(request, batch, layout) for _, batch, request in asked
        ],
    }
    outcomes = [_outcome(name, accounts) for name, accounts in padded.items()]
    failed, records = [], []
    for name, scheduler in schedulers.items():
        try:
            ran = [_run(name, scheduler, layout, each) for each in asked]
        except (Exception, SystemExit) as error:
            # A user's scheduler may raise anything. The others are still compared.
            failed.append(Failed(name, f"{type(error).__name__}: {error}"))
            continue
        outcomes.append(_outcome(name, [account for account, _ in ran]))
        records.append(ran[0][1])
    return Comparison(outcomes, failed, records)


def outcome_of(name: str, records: Sequence[StepRecord]) -> Outcome:
    """Returns the outcome of steps that were scheduled by a run."""
    return _outcome(name, [_account(record.stats, None) for record in records])


def modelled_cost(batches: Sequence[Sequences], layout: StepLayout, scheduler: Scheduler) -> float:
    """Returns the modelled time of all batches together, in units of the cost model."""
    total = 0.0
    for batch in batches:
        request = layout.request(batch)
        total += request.time_of(scheduler(request))
    return total


def _title_of(number: int, count: int, size: int) -> str:
    """Returns the title of a batch in pictures: `"batch 1 of 8, 256 sequences"`."""
    sequences = "1 sequence" if size == 1 else f"{size:,} sequences"
    return sequences if count == 1 else f"batch {number} of {count:,}, {sequences}"


def _run(
    name: str, scheduler: Scheduler, layout: StepLayout, asked: _Asked
) -> tuple[_Account, StepRecord]:
    start = time.perf_counter()
    schedule = scheduler(asked.request)
    seconds = time.perf_counter() - start
    check_schedule(asked.request, schedule)
    record = StepRecord.of(asked.title, name, layout, asked.batch, schedule)
    return _account(record.stats, seconds), record


def _account(stats: PackingStats, seconds: float | None) -> _Account:
    return _Account(
        microbatches=stats.microbatches,
        tokens=stats.tokens,
        computed=stats.padded_tokens,
        capacity=stats.capacity_tokens,
        time=stats.step_cost,
        bound=stats.step_cost_bound,
        bubble=stats.bubble,
        seconds=seconds,
    )


def _outcome(name: str, accounts: Sequence[_Account]) -> Outcome:
    """Returns the means over global batches. Shares are computed from sums, not averaged."""
    tokens, cost = sum(each.tokens for each in accounts), sum(each.time for each in accounts)
    seconds = [each.seconds for each in accounts if each.seconds is not None]
    return Outcome(
        name=name,
        microbatches=statistics.fmean(each.microbatches for each in accounts),
        fill=tokens / sum(each.capacity for each in accounts),
        padding=1 - tokens / sum(each.computed for each in accounts),
        balance=cost / sum(each.bound for each in accounts),
        bubble=sum(each.bubble * each.time for each in accounts) / cost,
        step_cost=cost / len(accounts),
        schedule_seconds=statistics.median(seconds) if seconds else None,
    )


def _padded_per_microbatch(
    request: ScheduleRequest, batch: Sequences, layout: StepLayout
) -> _Account:
    """Returns the account of the second baseline: see the module."""
    shapes_of = [
        padded_rows(request.lengths[request.source_rank == rank].tolist(), layout.capacity)
        for rank in range(layout.num_ranks)
    ]
    width = max(map(len, shapes_of))  # ranks with fewer microbatches run empty ones
    padded = np.array([shapes + [(0, 0)] * (width - len(shapes)) for shapes in shapes_of], np.int64)
    return _padded_to(padded[..., 0], padded[..., 1], request, batch, layout)


def _padded_to(
    longest: IntArray,
    count: IntArray | int,
    request: ScheduleRequest,
    batch: Sequences,
    layout: StepLayout,
) -> _Account:
    """Returns the account of padded microbatches, [ranks, microbatches]: each has `count`
    sequences, padded to `longest`.
    """
    pack = layout.alignment.pack
    longest = -(-longest // pack) * pack
    # Add empty microbatches up to the multiple: 5 microbatches and a multiple of 4 need 3 more.
    more = -longest.shape[1] % layout.microbatch_multiple
    each = layout.cost.of_sequences(longest)
    if batch.payload_costs is not None:  # of a mean sequence
        each = each + (longest > 0) * batch.payload_costs.mean()
    work = np.pad(each * count, ((0, 0), (0, more)))
    costs = np.maximum(work + layout.cost.fixed, layout.cost.least)
    spent = _time_of(costs, layout)
    return _Account(
        microbatches=costs.shape[1],
        tokens=batch.num_tokens,
        computed=int((longest * count).sum()),
        capacity=costs.size * layout.capacity,
        time=spent,
        bound=request.bound,
        bubble=1 - float(costs.sum()) / (spent * layout.num_ranks * layout.model.num_stages),
        seconds=None,
    )


def _time_of(costs: npt.NDArray[np.float64], layout: StepLayout) -> float:
    """Returns the modelled time of packs, [ranks, microbatches].

    A long pipeline of equal packs is not simulated to its end: once it is in its steady state, each
    further microbatch adds its cost.
    """
    model = layout.model
    few = 4 * model.num_stages * layout.microbatch_multiple
    if model.num_stages == 1 or costs.shape[1] <= few or costs.min() != costs.max():
        return model.time_of(costs)
    return model.time_of(costs[:1, :few]) + float(costs[0, 0]) / model.effective_stages * (
        costs.shape[1] - few
    )
