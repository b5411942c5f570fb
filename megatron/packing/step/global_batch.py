"""mcore. The road of one global batch, once per step: draw, gather, decide, move, tell, pack.

    draw     the drawing rank of each data-parallel replica draws from its iterator (see `groups`)
    gather   one drawing rank hears what all of them have at hand: about 50 bytes per sequence
    decide   it schedules, and all drawing ranks hear the answer: about 20 bytes per sequence
    move     the drawing ranks exchange samples: one all-to-all, about 5 bytes per token (see
             `samples`)
    tell     each sends its replica the plan and the samples: one broadcast of about 5 bytes per
             token
    pack     every rank makes the microbatches that its pipeline stage needs, padded

All of it is on the host and over gloo; the number of collectives does not depend on that of
microbatches, and none is left for the microbatches. Whatever fails on a drawing rank (end of data,
an exception while drawing or scheduling, a batch that no schedule fits) is raised alike on all
ranks.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.packing.batch.columns import Form, num_words
from megatron.packing.batch.microbatches import (
    Microbatch,
    copied_ahead,
    layout_microbatches,
    layouts_of,
    pack,
)
from megatron.packing.batch.samples import IntArray, Samples, joined
from megatron.packing.step.decide import Decision, GlobalBatchError, RankReport, decide
from megatron.packing.step.delay import Delayed, DelayQueue
from megatron.packing.step.draw import Draw, draw_samples
from megatron.packing.step.groups import DataGroups, road_groups
from megatron.packing.step.settings import PackingSettings
from megatron.packing.step.stats import PackingStats

GROUPS = ["tp", "pp", "cp", "dp", "mp"]

T = TypeVar("T")


class PackedIterator(Iterator[Microbatch]):
    """Over the microbatches of one global batch; a type of its own, so that it is not taken for the
    user's data.

    device: a CUDA device to which tensors of tokens are copied, each microbatch while the one
    before it is computed, on a stream of their own; None leaves them on the host.
    """

    def __init__(
        self, microbatches: Sequence[Microbatch], device: torch.device | None = None
    ) -> None:
        self._microbatches: Iterator[Microbatch] = iter(microbatches)
        if device is not None and device.type == "cuda":
            self._microbatches = copied_ahead(self._microbatches, device)

    def __next__(self) -> Microbatch:
        return next(self._microbatches)


@dataclass(frozen=True, kw_only=True)
class GlobalBatch:
    """One global batch, as this rank's pipeline stage will run it."""

    microbatches: list[Microbatch]
    stats: PackingStats
    settings: PackingSettings
    decision: Decision | None
    """Where all sequences went, on the rank that decides (data-parallel rank 0's drawing one); None
    elsewhere.
    """
    delayed: Delayed
    """Sequences that this rank drew and that wait for a later batch."""

    def iterators(
        self, num_virtual_stages: int | None, device: torch.device | None = None
    ) -> PackedIterator | list[PackedIterator]:
        """Return what megatron-core's schedules iterate over: with virtual stages a list, an
        iterator for each.

        device: see `PackedIterator`.
        """
        if num_virtual_stages is None:
            return PackedIterator(self.microbatches, device)
        return [PackedIterator(self.microbatches, device) for _ in range(num_virtual_stages)]


class StepPlan(NamedTuple):
    """What the ranks of a replica are told of a step, beside the samples."""

    stats: PackingStats
    num_sequences: IntArray
    """int64 [microbatches]"""
    lengths: IntArray
    """int64 [sequences of this replica], by microbatch."""
    form: Form


class _Part(NamedTuple):
    """The outcome of a step on a drawing rank: its replica's part, or the error, or None at the end
    of the data.
    """

    plan: StepPlan | str | None
    samples: Samples
    decision: Decision | None = None
    """On the rank that decides."""


def schedule_global_batch(
    data_iterator: object,
    config: TransformerConfig,
    num_microbatches: int,
    groups: ProcessGroupCollection,
    scheduler_type: str | None = None,
    queue: DelayQueue | None = None,
    step: int | None = None,
) -> GlobalBatch:
    """`data_schedule.wrap_dataloader`, with everything that is known about the batch.

    step: its number; None takes that of `PackingOptions`. It may run in a thread (see
    `step.prefetch`), once the first call, or `road_groups`, has made its groups.
    """
    settings = PackingSettings.of(config, groups, scheduler_type, step)
    road = road_groups(groups)
    part = _Part(None, Samples.none())
    if road.drawing is not None:
        part = _draw_and_place(data_iterator, num_microbatches, settings, road.drawing, queue)
    plan, samples = _tell(part, road)
    if plan is None:
        raise StopIteration
    if isinstance(plan, str):
        raise GlobalBatchError(plan)
    layouts = layouts_of(plan.lengths, plan.num_sequences, settings.alignment)
    has_tokens = groups.pp.rank() in (0, groups.pp.size() - 1)
    return GlobalBatch(
        microbatches=pack(samples, plan.num_sequences, layouts)
        if has_tokens
        else layout_microbatches(layouts),
        stats=plan.stats,
        settings=settings,
        decision=part.decision,
        delayed=Delayed.none() if queue is None else queue.delayed,
    )


def _draw_and_place(
    data_iterator: Any,
    num_draws: int,
    settings: PackingSettings,
    drawing: dist.ProcessGroup,
    queue: DelayQueue | None,
) -> _Part:
    """What a drawing rank does, alike on all of them: draw, gather, decide, move."""
    iterator = data_iterator[0] if isinstance(data_iterator, (list, tuple)) else data_iterator
    name = f"data-parallel rank {drawing.rank()} (rank {dist.get_rank()})"
    draw = draw_samples(iterator, num_draws, settings.capacity, settings.over_length_policy, name)
    # megatron-core's RerunDataIterator says whether it gives the samples of the step before once
    # more.
    delayed = (
        None if queue is None else queue.begin(is_repeated=getattr(iterator, "replaying", False))
    )
    at_hand = draw.samples
    if delayed is not None:
        try:
            at_hand = joined([delayed.samples, draw.samples])
        except ValueError as failure:
            draw = Draw.failed(f"{name}: {failure}")
    offers = _gather(RankReport.of(draw, delayed, at_hand), drawing)
    decision: Decision | str | None = None
    if offers is not None:
        try:
            decision = decide(
                offers, num_draws, settings, None if queue is None else queue.max_steps
            )
        except GlobalBatchError as failure:
            decision = str(failure)
    decision = _broadcast(decision, 0, drawing)
    if not isinstance(decision, Decision):
        return _Part(decision, Samples.none())
    if queue is not None and delayed is not None:
        queue.finish(_left_behind(decision, delayed, at_hand, drawing.rank()))
    samples, microbatch = _move(at_hand.in_form(decision.form), decision, drawing)
    order = np.argsort(microbatch, kind="stable")
    samples = samples.take(order)
    num_sequences = np.bincount(microbatch, minlength=decision.stats.microbatches)
    plan = StepPlan(decision.stats, num_sequences, samples.lengths, samples.form)
    return _Part(plan, samples, None if offers is None else decision)


def _gather(offer: RankReport, drawing: dist.ProcessGroup) -> list[RankReport] | None:
    """All offers on the first drawing rank, which decides; None on the others."""
    if drawing.size() == 1:
        return [offer]
    # gather_object would tell all ranks all sizes first, in a ring, and pad each offer to the
    # largest
    mine = torch.frombuffer(bytearray(pickle.dumps(offer)), dtype=torch.uint8)
    size, first = torch.tensor([mine.numel()]), dist.get_global_rank(drawing, 0)
    if drawing.rank() != 0:
        dist.gather(size, dst=first, group=drawing)
        dist.send(mine, first, group=drawing)
        return None
    sizes = [torch.empty_like(size) for _ in range(drawing.size())]
    dist.gather(size, sizes, dst=first, group=drawing)
    offers = [offer]
    for rank in range(1, drawing.size()):
        other = torch.empty(int(sizes[rank]), dtype=torch.uint8)
        dist.recv(other, dist.get_global_rank(drawing, rank), group=drawing)
        offers.append(pickle.loads(other.numpy().tobytes()))
    return offers


def _broadcast(value: T, source: int, group: dist.ProcessGroup) -> T:
    """`value` of group rank `source`, on every rank of the group."""
    if group.size() == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=dist.get_global_rank(group, source), group=group)
    return values[0]


def _left_behind(decision: Decision, delayed: Delayed, at_hand: Samples, rank: int) -> Delayed:
    stays = np.flatnonzero(decision.rank[decision.source_rank == rank] < 0)
    steps = np.zeros(at_hand.lengths.size, np.int64)
    steps[: delayed.steps.size] = delayed.steps
    return Delayed(at_hand.take(stays), steps[stays] + 1)


def _move(
    samples: Samples, decision: Decision, drawing: dist.ProcessGroup
) -> tuple[Samples, npt.NDArray[np.int32]]:
    """Send each sample to the rank that trains it; what is this rank's then, and its
    microbatches."""
    rank, size = drawing.rank(), drawing.size()
    target = decision.rank[decision.source_rank == rank]
    order = np.argsort(target, kind="stable")[int((target < 0).sum()) :]
    outgoing = samples.take(order)
    mine = decision.rank == rank
    if size == 1:
        return outgoing, decision.microbatch[mine]
    parts = outgoing.split(np.bincount(target[order], minlength=size))
    words = [part.to_words() for part in parts]
    lengths = np.split(
        decision.lengths[mine],
        np.cumsum(np.bincount(decision.source_rank[mine], minlength=size))[:-1],
    )
    receive = [num_words(part.size, int(part.sum()), decision.form) for part in lengths]
    incoming = torch.empty(sum(receive), dtype=torch.int32)
    dist.all_to_all_single(
        incoming,
        torch.from_numpy(np.concatenate(words)),
        receive,
        [part.size for part in words],
        group=drawing,
    )
    received = np.split(incoming.numpy(), np.cumsum(receive)[:-1])
    arrived = [Samples.from_words(part, its, decision.form) for part, its in zip(received, lengths)]
    return joined(arrived), decision.microbatch[mine]


def _tell(part: _Part, road: DataGroups) -> tuple[StepPlan | str | None, Samples]:
    """The plan and the samples of this replica, on each of its ranks."""
    group = road.replica
    if group.size() == 1:
        return part.plan, part.samples
    source = dist.get_group_rank(group, road.drawing_rank)
    plan = _broadcast(part.plan, source, group)
    if not isinstance(plan, StepPlan):
        return plan, part.samples
    if road.drawing is not None:
        words = torch.from_numpy(part.samples.to_words())
    else:
        words = torch.empty(
            num_words(len(plan.lengths), int(plan.lengths.sum()), plan.form), dtype=torch.int32
        )
    dist.broadcast(words, src=road.drawing_rank, group=group)
    if road.drawing is not None:
        return plan, part.samples
    return plan, Samples.from_words(words.numpy(), plan.lengths, plan.form)
