"""mcore. The data path of one global batch: load, gather, decide, exchange payloads,
move, broadcast, pack.

    load       the data rank of each data-parallel replica reads its iterator (`load`, `groups`);
               what waited comes before what it loaded (`delay`)
    gather     the first data rank, the scheduling rank, receives a report of each (`decide`): about
               50 bytes per sequence
    decide     it schedules, and all data ranks receive the schedule: about 20 bytes per sequence
    payloads   the data ranks exchange keys or tensors (`payloads`), only in steps in which samples
               have some
    move       the data ranks exchange samples: one all-to-all, about 5 bytes per token
    broadcast  each data rank sends the plan and the samples to its replica, in one broadcast of
               about 5 bytes per token, and payloads to the ranks of the first stage
    pack       every rank makes the microbatches that its pipeline stage needs, padded

Module `exchange` holds the messages of gather, decide, move and broadcast, in this order.
All of it is on the host and over gloo. The number of collectives does not depend on the number of
microbatches, and none is left for the microbatches. An error on a data rank (end of data, an
exception while loading or scheduling, a batch that no schedule fits) is raised alike on all ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.packing.batch.columns import AXIS_POSITIONS, PAYLOADS
from megatron.packing.batch.microbatches import (
    Microbatch,
    copied_ahead,
    layout_microbatches,
    layouts_of_samples,
    pack,
)
from megatron.packing.batch.payload_bytes import payloads_of_packs
from megatron.packing.batch.payloads import Payload
from megatron.packing.batch.samples import Samples
from megatron.packing.batch.tree_shapes import ShapedSamples, shaped
from megatron.packing.device import CPU, Device
from megatron.packing.step.decide import Decision, GlobalBatchError, RankReport
from megatron.packing.step.delay import Delayed, DelayQueue, LocalSamples
from megatron.packing.step.exchange import (
    ReplicaPart,
    StepPlan,
    broadcast_part,
    decide_together,
    move,
)
from megatron.packing.step.groups import data_groups
from megatron.packing.step.load import load_samples
from megatron.packing.step.payload_store import PayloadStore, restore_of
from megatron.packing.step.payloads import Moved, move_payloads
from megatron.packing.step.run_fields import RunFields, run_fields_of
from megatron.packing.step.settings import PackingOptions, PackingSettings, reads_tokens
from megatron.packing.step.stats import PackingStats
from megatron.packing.step.trees import reason_against, warn_of_trees

logger = logging.getLogger(__name__)

GROUPS = ["tp", "pp", "cp", "dp", "mp"]


class PackedIterator(Iterator[Microbatch]):
    """Iterator over the microbatches of one global batch.

    It is a type of its own, so that it is not taken for the user's data.
    """

    def __init__(self, microbatches: Sequence[Microbatch], device: Device = CPU) -> None:
        """Takes the microbatches.

        Args:
            device: a GPU to which tensors of tokens are copied on a stream of their own, each
                microbatch while the one before it is computed; the CPU leaves them on the host.
        """
        self._microbatches: Iterator[Microbatch] = iter(microbatches)
        if device.is_gpu:
            self._microbatches = copied_ahead(self._microbatches, device.place)

    def __next__(self) -> Microbatch:
        return next(self._microbatches)


@dataclass(frozen=True, kw_only=True)
class GlobalBatch:
    """One global batch, as this rank's pipeline stage will run it."""

    microbatches: list[Microbatch]
    stats: PackingStats
    settings: PackingSettings
    decision: Decision | None
    """The schedule of all sequences, on the scheduling rank; None elsewhere."""
    delayed: Delayed
    """Sequences that this rank loaded and that wait for a later batch."""

    def iterators(
        self, num_virtual_stages: int | None, device: Device = CPU
    ) -> PackedIterator | list[PackedIterator]:
        """Returns the iterator for megatron-core's schedules: with virtual stages a list of them.

        Args:
            device: see `PackedIterator`.
        """
        if num_virtual_stages is None:
            return PackedIterator(self.microbatches, device)
        # Each virtual stage runs all microbatches at its own time: one list, an iterator for each.
        return [PackedIterator(self.microbatches, device) for _ in range(num_virtual_stages)]


def schedule_global_batch(
    data_iterator: object,
    config: TransformerConfig,
    num_microbatches: int,
    groups: ProcessGroupCollection,
    scheduler_type: str | None = None,
    queue: DelayQueue | None = None,
    step: int | None = None,
) -> GlobalBatch:
    """Does what `data_schedule.wrap_dataloader` does, and returns all that is known of the batch.

    It may run in a thread (see `step.prefetch`), once the first call, or `data_groups`, has made
    its groups.

    Args:
        step: its number; None takes that of `PackingOptions`.
    """
    settings = PackingSettings.of(config, groups, scheduler_type, step)
    options = PackingOptions.of(config)
    groups_of_data = data_groups(groups)
    part: ReplicaPart | GlobalBatchError | StopIteration | None = None
    if groups_of_data.data_ranks_group is not None:
        try:
            part = _load_and_place(
                data_iterator,
                num_microbatches,
                settings,
                groups_of_data.data_ranks_group,
                queue,
                options.payloads,
                run_fields_of(config),
            )
        # The other ranks of the replica wait in `broadcast_part`, so the error is sent to them.
        # Whatever is raised in loading or scheduling has become one of these two, on all data
        # ranks. Anything else comes after it, of a broken connection or a defect: it ends this
        # process, and the collectives of ranks that wait for it fail, at the latest by their
        # timeout.
        except (GlobalBatchError, StopIteration) as failure:
            part = failure
    plan, samples, payloads, delayed, decision = broadcast_part(part, groups_of_data)
    reason = reason_against(config, plan.schema, options.megatron_lm_calls)
    if reason is not None:
        raise GlobalBatchError(reason)
    # Data and schedule were checked above: from here on only a defect, or a lack of memory, ends a
    # step. One that ended earlier has left the queue unchanged.
    if queue is not None:
        queue.finish(delayed)
    if getattr(config, "mrope_section", None) is not None:  # also where all samples are text
        samples = samples.with_schema((AXIS_POSITIONS,))
    layouts = layouts_of_samples(samples, plan.num_sequences, settings.alignment)
    microbatches = (
        pack(samples, plan.num_sequences, layouts)
        if reads_tokens(config, groups.pp)
        else layout_microbatches(layouts, samples=samples)
    )
    if payloads:
        payloads_by_pack = payloads_of_packs(payloads, plan.num_sequences)
        microbatches = [
            {**microbatch, "payloads": of_pack}
            for microbatch, of_pack in zip(microbatches, payloads_by_pack, strict=True)
        ]
    return GlobalBatch(
        microbatches=microbatches,
        stats=plan.stats,
        settings=settings,
        decision=decision,
        delayed=delayed,
    )


def _load_and_place(
    data_iterator: Any,
    num_fetches: int,
    settings: PackingSettings,
    data_ranks_group: dist.ProcessGroup,
    queue: DelayQueue | None,
    store: PayloadStore | None,
    run_fields: RunFields,
) -> ReplicaPart:
    """Runs load, gather, decide and move on a data rank; collective over the data ranks.

    Raises GlobalBatchError, or StopIteration at the end of the data, on all data ranks alike.
    """
    name = f"data-parallel rank {data_ranks_group.rank()} (rank {dist.get_rank()})"
    is_scheduling_rank = data_ranks_group.rank() == 0
    iterator: Any = None
    try:
        iterator = data_iterator[0] if isinstance(data_iterator, (list, tuple)) else data_iterator
        loaded = load_samples(
            iterator,
            num_fetches,
            settings.capacity,
            settings.over_length_policy,
            name,
            None if store is None else store.cost_of,
            run_fields.warned,
        )
        # megatron-core's RerunDataIterator gives the samples of the step before once more while it
        # is `replaying`.
        is_repeated = getattr(iterator, "replaying", False)
        local = LocalSamples.of(loaded, queue, name, is_repeated=is_repeated)
        shaped_samples, report = _reported(local, settings, warns=is_scheduling_rank)
    except Exception as failure:  # a defect, or no memory: the other data ranks wait for a report
        logger.exception("the samples of a step cannot be prepared")
        local = LocalSamples.failed(f"{name}: {type(failure).__name__}: {failure}")
        shaped_samples, report = _reported(local, settings, warns=False)
    max_delay = None if queue is None else queue.max_steps
    decision = decide_together(
        report, num_fetches, settings, data_ranks_group, max_delay, run_fields
    )
    # All ranks send the same columns: a receiver computes bytes from lengths and this schema.
    samples = shaped_samples.samples.with_schema(decision.schema)
    moved, restore = None, None
    if PAYLOADS in decision.schema:
        # Delayed samples from a checkpoint may have payloads although this run sets no store.
        store = store or PayloadStore()
        restore = store.restore or restore_of(iterator)
        moved = move_payloads(samples, local.payloads, decision, data_ranks_group, store, restore)
    waits = decision.rank[decision.source_rank == data_ranks_group.rank()] < 0
    # A whole sample waits or leaves: the parts of a tree that is cut are never delayed.
    stays = shaped_samples.original_index[waits]
    delayed = local.left_behind(stays, restores=restore is not None)
    arrived, microbatch_of = move(samples, decision, data_ranks_group)
    arrived = arrived.with_schema(decision.schema)  # also where no sample arrived
    plan, samples, payloads = _in_order_of_packs(arrived, microbatch_of, decision.stats, moved)
    return ReplicaPart(plan, samples, payloads, delayed, decision if is_scheduling_rank else None)


def _reported(
    local: LocalSamples, settings: PackingSettings, *, warns: bool
) -> tuple[ShapedSamples, RankReport]:
    """Returns the sequences that this rank offers to the step, and its report of them.

    Args:
        warns: whether this rank warns of trees for all.
    """
    # The queue holds trees as they were loaded; their shape is that of this layout.
    shaped_samples = shaped(local.samples, settings.trees)
    if warns:
        warn_of_trees(local.samples, shaped_samples, settings.paths_apart)
    report = RankReport.of(local.loaded, local.delayed, shaped_samples, settings.alignment)
    return shaped_samples, report


def _in_order_of_packs(
    arrived: Samples,
    microbatch_of: npt.NDArray[np.int32],
    stats: PackingStats,
    moved: Moved | None,
) -> tuple[StepPlan, Samples, Sequence[Payload | None]]:
    """Returns the samples that this replica trains by microbatch, with their plan and payloads.

    Args:
        arrived: those samples, in the order in which they arrived.
        microbatch_of: int32 [n], the microbatch of each.
        moved: their payloads; None if no sample of the step has any.
    """
    if moved is not None:
        stats = replace(
            stats,
            payloads=moved.number,
            payload_bytes=moved.max_bytes,
            moved_payload_bytes=moved.sent_bytes,
        )
    # microbatch_of 1 0 1    ->    order 1 0 2, num_sequences 1 2
    order = np.argsort(microbatch_of, kind="stable")
    samples = arrived.take(order)
    num_sequences = np.bincount(microbatch_of, minlength=stats.microbatches)
    plan = StepPlan(stats, num_sequences, samples.sizes, samples.schema)
    payloads = () if moved is None else [moved.held[i] for i in order.tolist()]
    return plan, samples, payloads
