"""mcore. What the ranks that own data do with a global batch, all of them alike: draw, gather lengths, let outliers
wait, schedule.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from megatron.packing.delay_queue import DelayQueue, Waiting
from megatron.packing.draw import Draw, draw_samples
from megatron.packing.lengths import GlobalBatchError, LengthTable, agree, gather_table
from megatron.packing.scheduling.delay import capacity_that_matters, outliers_to_delay
from megatron.packing.scheduling.problem import Schedule, ScheduleRequest, check_schedule
from megatron.packing.scheduling.registry import get_scheduler
from megatron.packing.settings import PackingSettings
from megatron.packing.stats import packing_stats
from megatron.packing.step_plan import StepPlan


class Scheduled(NamedTuple):
    """A global batch as its owners know it."""

    table: LengthTable
    """Of the sequences of this step."""
    schedule: Schedule
    plan: StepPlan
    words: list[Tensor]
    """Of this rank's sequences in `table`, in global order."""
    waiting: Waiting
    """This rank's sequences that are not in `table`."""
    delays: list[int]
    """How many sequences of the table have waited 0, 1, 2 ... steps; empty without a queue."""
    num_waiting: int
    """Sequences that wait, on all data-parallel ranks."""


class _Gathered(NamedTuple):
    table: LengthTable
    num_dropped: int
    num_cut: int
    ended: bool
    """Some rank's data has ended."""


def draw_own(
    data_iterator: Any,
    num_draws: int,
    settings: PackingSettings,
    groups: ProcessGroupCollection,
    queue: DelayQueue | None,
) -> Draw:
    """What this rank has at hand for a step: the sequences that wait in its queue, then what it draws."""
    iterator = _own_iterator(data_iterator, groups)
    draw = draw_samples(iterator, num_draws, settings.capacity, settings.over_length_policy, _name_of(groups))
    if queue is not None:
        # megatron-core's RerunDataIterator says whether it gives the samples of the step before once more.
        waiting = queue.begin(is_repeated=getattr(iterator, "replaying", False))
        draw.words[:0], draw.rows[:0] = waiting.words, waiting.rows
    return draw


def schedule_drawn(
    draw: Draw, num_draws: int, settings: PackingSettings, groups: ProcessGroupCollection, queue: DelayQueue | None
) -> Scheduled | None:
    """Decide on the global batch, alike on all owners; None where the data has ended everywhere and nothing waits.

    Leaves the queue as it is. Raises GlobalBatchError on every owner alike where one could not draw.
    """
    gathered = _gather(draw, groups)
    if gathered.ended and len(gathered.table.length) == 0:
        return None
    num_ranks = groups.dp.size()
    waits = np.zeros(len(gathered.table.length), np.bool_)
    if queue is not None:
        max_steps = 0 if gathered.ended else queue.max_steps  # no later step will bring company
        waits = _waits(gathered.table, num_ranks, max_steps, settings)
    table = gathered.table.only(~waits)
    request = _request(table, num_ranks, num_draws, settings)
    schedule = get_scheduler(settings.scheduler)(request)
    check_schedule(request, schedule)
    stats = packing_stats(
        request=request,
        schedule=schedule,
        length=table.length,
        alignment=settings.alignment,
        num_dropped=gathered.num_dropped,
        num_cut=gathered.num_cut,
    )
    words, waiting = _divided(draw, waits[gathered.table.source_rank == groups.dp.rank()])
    return Scheduled(
        table=table,
        schedule=schedule,
        plan=StepPlan.for_rank(groups.dp.rank(), table, schedule, stats),
        words=words,
        waiting=waiting,
        delays=[] if queue is None else np.bincount(table.steps_waited, minlength=1).tolist(),
        num_waiting=int(waits.sum()),
    )


def _own_iterator(data_iterator: Any, groups: ProcessGroupCollection) -> Any:
    """With interleaving a rank holds a list of iterators over the same data; one is drawn from."""
    if isinstance(data_iterator, (list, tuple)):
        return data_iterator[0 if groups.pp.rank() == 0 else -1]
    return data_iterator


def _name_of(groups: ProcessGroupCollection) -> str:
    return f"data-parallel rank {groups.dp.rank()} (rank {torch.distributed.get_rank()})"


def _waits(table: LengthTable, num_ranks: int, max_steps: int, settings: PackingSettings) -> np.ndarray:
    """Whether each sequence of the table waits for the next step, bool [N]."""
    lengths = settings.alignment.padded_length(table.length)
    return outliers_to_delay(
        lengths,
        settings.cost,
        table.steps_waited,
        num_ranks=num_ranks,
        pack_capacity=capacity_that_matters(settings.model, settings.capacity, lengths),
        max_steps=max_steps,
    )


def _divided(draw: Draw, waits: np.ndarray) -> tuple[list[Tensor], Waiting]:
    """The words of the samples at hand that leave, and those that wait, as the next step finds them."""
    leave, stay = np.flatnonzero(~waits).tolist(), np.flatnonzero(waits).tolist()
    rows = [(length, kind, min(number, 0) - 1) for length, kind, number in (draw.rows[i] for i in stay)]
    return [draw.words[i] for i in leave], Waiting([draw.words[i] for i in stay], rows)


def _request(table: LengthTable, num_ranks: int, num_draws: int, settings: PackingSettings) -> ScheduleRequest:
    return ScheduleRequest(
        lengths=settings.alignment.padded_length(table.length),
        source_rank=table.source_rank,
        source_draw=np.maximum(table.draw, 0),
        steps_delayed=table.steps_waited,
        num_ranks=num_ranks,
        num_draws=num_draws,
        capacity=settings.capacity,
        microbatch_multiple=settings.microbatch_multiple,
        cost=settings.cost,
        model=settings.model,
    )


def _gather(draw: Draw, groups: ProcessGroupCollection) -> _Gathered:
    """The table of all that is at hand. Raises GlobalBatchError on every owner alike."""
    rows = draw.table
    numbers = [len(rows), draw.checksum(), draw.num_dropped, draw.num_cut, int(draw.ended)]
    answers = agree(groups.dp_cp, [groups.dp.rank(), groups.cp.rank(), *numbers], draw.error)
    in_order = answers[np.lexsort((answers[:, 1], answers[:, 0])), 2:]
    by_rank = in_order.reshape(groups.dp.size(), groups.cp.size(), len(numbers))
    differing = np.flatnonzero((by_rank != by_rank[:, :1]).any((1, 2)))
    if differing.size:
        raise GlobalBatchError(
            f"context-parallel ranks of data-parallel rank {differing[0]} drew different samples; "
            "give them the same data iterator"
        )
    counts, checksums, dropped, cut, ended = by_rank[:, 0].T
    table = gather_table(groups.dp, rows, counts, checksums)
    return _Gathered(table, int(dropped.sum()), int(cut.sum()), bool(ended.any()))
