"""mcore. The road of one global batch: draw, gather lengths, schedule, move, pack; once per step, before the pipeline
runs.

Six collectives per step whatever the number of microbatches, none per microbatch:

    owners (tensor-parallel rank 0 of the first and the last stage)
        draw their samples (see `owners`)
        dp_cp  all-gather   64 bytes per rank: counts, and whether anything went wrong
        dp     all-gather   24 bytes per sequence: lengths
    every rank
        mp     all-gather   32 bytes per rank: sizes, and whether anything went wrong
        mp     broadcast    24 bytes per sequence of this data-parallel rank: its plan
    first and last stage
        dp     all-to-all   5 bytes per token, see `sample.encode`
        tp     broadcast    the same bytes to tensor-parallel peers

Whatever fails on one rank (end of data, an exception while drawing, a batch that no schedule fits) is raised alike on
all.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron.packing.batch.layout import Alignment
from megatron.packing.batch.pack import layout_microbatch, pack
from megatron.packing.batch.sample import Sample, decode, num_words
from megatron.packing.step.delay_queue import DelayQueue
from megatron.packing.step.lengths import GlobalBatchError, agree, broadcast_numbers, device_of
from megatron.packing.step.owners import Scheduled, draw_own, schedule_drawn
from megatron.packing.step.redistribute import redistribute, share_with_peers
from megatron.packing.step.settings import PackingSettings
from megatron.packing.step.stats import PackingStats
from megatron.packing.step.step_plan import StepPlan

GROUPS = ["tp", "pp", "cp", "dp", "dp_cp", "mp"]
Microbatch = dict[str, Any]


class PackedIterator(Iterator[Microbatch]):
    """Over the microbatches of one global batch; a type of its own, so that it is not taken for the user's data."""

    def __init__(self, microbatches: Sequence[Microbatch]) -> None:
        self._microbatches = iter(microbatches)

    def __next__(self) -> Microbatch:
        return next(self._microbatches)


@dataclass(frozen=True, kw_only=True)
class GlobalBatch:
    """One global batch, as this rank's pipeline stage will run it."""

    microbatches: list[Microbatch]
    stats: PackingStats
    pack_lengths: list[list[list[int]]]
    """[rank][microbatch] -> real lengths of its sequences; of all data-parallel ranks on owners, empty elsewhere."""
    settings: PackingSettings
    delays: list[int]
    """How many of its sequences have waited 0, 1, 2 ... steps in a `DelayQueue`; on owners, empty without one."""
    num_waiting: int
    """Sequences that wait for a later batch, on all data-parallel ranks; known to owners."""
    seconds: float
    """That the step waited for it."""

    def iterators(self, num_virtual_stages: int | None) -> PackedIterator | list[PackedIterator]:
        """Return what megatron-core's schedules iterate over: with virtual stages a list, an iterator for each."""
        if num_virtual_stages is None:
            return PackedIterator(self.microbatches)
        return [PackedIterator(self.microbatches) for _ in range(num_virtual_stages)]


def stage_has_tokens(groups: ProcessGroupCollection) -> bool:
    """Whether this rank's pipeline stage needs tokens or labels; the others need layouts only."""
    return groups.pp.rank() in (0, groups.pp.size() - 1)


def owns_data(groups: ProcessGroupCollection) -> bool:
    """Whether this rank draws samples: tensor-parallel rank 0 of the first and the last stage."""
    return groups.tp.rank() == 0 and stage_has_tokens(groups)


def schedule_global_batch(
    data_iterator: Any,
    config: TransformerConfig,
    num_microbatches: int,
    groups: ProcessGroupCollection,
    scheduler_type: str | None = None,
    queue: DelayQueue | None = None,
) -> GlobalBatch:
    """`wrap_dataloader`, with everything that is known about the batch."""
    start = time.perf_counter()
    settings = PackingSettings.of(config, groups, scheduler_type)
    owned: Scheduled | None = None
    error: str | None = None
    if owns_data(groups):
        draw = draw_own(data_iterator, num_microbatches, settings, groups, queue)
        try:
            owned = schedule_drawn(draw, num_microbatches, settings, groups, queue)
        except GlobalBatchError as failure:
            error = str(failure)
        except (Exception, SystemExit) as failure:  # a scheduler may be the user's; the other ranks are waiting
            error = f"scheduler '{settings.scheduler}': {type(failure).__name__}: {failure}"
    plan = _share_plan(owned, error, groups)
    if plan is None:
        raise StopIteration
    microbatches = _microbatches(plan, owned, settings.alignment, groups)
    if queue is not None and owned is not None:
        queue.finish(owned.waiting)
    return GlobalBatch(
        microbatches=microbatches,
        stats=plan.stats,
        pack_lengths=[] if owned is None else _pack_lengths(owned),
        settings=settings,
        delays=[] if owned is None else owned.delays,
        num_waiting=0 if owned is None else owned.num_waiting,
        seconds=time.perf_counter() - start,
    )


def _share_plan(owned: Scheduled | None, error: str | None, groups: ProcessGroupCollection) -> StepPlan | None:
    """This data-parallel rank's plan, on every rank of the model-parallel group; None where the data has ended."""
    numbers = owned.plan.to_numbers() if owned is not None else np.empty(0, dtype=np.int64)
    fingerprint = owned.table.fingerprint() if owned is not None else 0
    sizes = agree(groups.mp, [int(owns_data(groups)), len(numbers), fingerprint], error)
    owners = sizes[sizes[:, 0] == 1]
    if (owners != owners[0]).any():
        raise GlobalBatchError("the first and the last pipeline stage drew different samples; give them the same data")
    if owners[0, 1] == 0:
        return None
    source = int(np.flatnonzero(sizes[:, 0])[0])
    mine = source == groups.mp.rank()
    return StepPlan.from_numbers(broadcast_numbers(groups.mp, numbers if mine else int(owners[0, 1]), source))


def _microbatches(
    plan: StepPlan, owned: Scheduled | None, alignment: Alignment, groups: ProcessGroupCollection
) -> list[Microbatch]:
    layouts = plan.layouts(alignment)
    if not stage_has_tokens(groups):
        return [layout_microbatch(layout) for layout in layouts]
    words = None
    if owned is not None:
        table = owned.table
        sizes = num_words(table.length, table.kind)
        words = redistribute(owned.words, sizes, table.source_rank, owned.schedule.rank, groups.dp)
    sizes = plan.num_words
    words = share_with_peers(words, int(sizes.sum()), groups.tp)
    samples = _decode_all(words, plan)
    device = device_of(groups.tp)
    return [pack([samples[i] for i in members], layout, device) for members, layout in zip(plan.members(), layouts)]


def _decode_all(words: Tensor, plan: StepPlan) -> Sequence[Sample]:
    pieces = words.split(plan.num_words.tolist())
    return [decode(int(length), int(kind), piece) for length, kind, piece in zip(plan.length, plan.kind, pieces)]


def _pack_lengths(owned: Scheduled) -> list[list[list[int]]]:
    lengths = owned.table.length
    return [
        [lengths[members].tolist() for members in owned.schedule.packs_of(rank)]
        for rank in range(owned.schedule.num_ranks)
    ]
