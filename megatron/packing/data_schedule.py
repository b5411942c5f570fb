"""mcore. The functions that Megatron's own code calls: `wrap_dataloader` loads, schedules, moves
and packs a global batch, `get_batch_on_this_rank_for_sequence_packing` takes its next microbatch.

    loader = wrap_dataloader(iterator, config, num_microbatches)
    for _ in range(loader.num_microbatches):
        batch = get_batch_on_this_rank_for_sequence_packing(loader.data_iterator)
"""

from __future__ import annotations

from typing import Any, NamedTuple

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.packing.model.get_batch import (
    get_batch_on_this_rank_for_sequence_packing as get_batch_on_this_rank_for_sequence_packing,
)
from megatron.packing.step.delay import DelayQueue
from megatron.packing.step.global_batch import GROUPS, PackedIterator, schedule_global_batch


class WrappedDataLoader(NamedTuple):
    """Result of `wrap_dataloader`: the 4-tuple that Megatron's own code expects, by name."""

    data_iterator: PackedIterator | list[PackedIterator]
    num_microbatches: int
    """Microbatches that each data-parallel rank trains."""
    num_total_tokens_this_global_batch: int
    sequence_square_sum_this_global_batch: int


def wrap_dataloader(
    data_iterator: object,
    config: TransformerConfig,
    num_microbatches: int,
    scheduler_type: str | None = None,
    pg_collection: ProcessGroupCollection | None = None,
    queue: DelayQueue | None = None,
) -> WrappedDataLoader:
    """Loads one global batch and returns it packed, with its number of microbatches and the two
    sums for FLOPs.

    Args:
        data_iterator: on data ranks (see `step.groups`), an iterator whose `next` gives a sample or
            a list of them (see `batch.reading`). Of a list of iterators, one per virtual stage,
            only the first is read. It is not read on other ranks.
        config: megatron-core's, or a namespace of these fields alone: `max_seqlen_per_dp_cp_rank`
            (tokens that one rank may hold; a pack may hold that many times the context-parallel
            size), `sequence_packing_scheduler`, `virtual_pipeline_model_parallel_size`,
            `microbatch_group_size_per_vp_stage`, and `sequence_packing_options` if it has any.
        num_microbatches: `next` calls per data rank (Megatron-LM's name). It is not the number of
            microbatches trained: packing decides that, see `WrappedDataLoader.num_microbatches`.
        scheduler_type: overrides the scheduler of `config`.
        pg_collection: megatron-core's groups `tp`, `pp`, `cp`, `dp` and `mp`; None takes those of
            `parallel_state`.
        queue: holds outliers back for a later step (see `step.delay`). Pass the same one at every
            step of a run, on every rank or on none.

    Returns:
        An iterator over the microbatches (see `batch.microbatches`; with interleaving a list, one
        per virtual stage) on every rank: stages in the middle get layouts. The number of
        microbatches is equal on all ranks. Both sums are over real lengths, exact.

    Raises:
        StopIteration: on all ranks, when no rank has any sample left.
        GlobalBatchError: on all ranks, naming rank and cause, when one of them fails.
    """
    groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(GROUPS)
    batch = schedule_global_batch(
        data_iterator, config, num_microbatches, groups, scheduler_type, queue
    )
    return WrappedDataLoader(
        batch.iterators(config.virtual_pipeline_model_parallel_size),
        batch.stats.microbatches,
        batch.stats.tokens,
        batch.stats.square_sum,
    )


def wrap_data_iterator(
    data_iterator: object,
    config: TransformerConfig,
    num_microbatches: int,
    pg_collection: ProcessGroupCollection | None = None,
) -> WrappedDataLoader:
    """Does what `wrap_dataloader` does, under the name that later Megatron-LM uses."""
    return wrap_dataloader(data_iterator, config, num_microbatches, pg_collection=pg_collection)


def wrap_iterator_helper(
    config: TransformerConfig,
    data_iterator: object,
    num_microbatches: int,
    pg_collection: ProcessGroupCollection | None = None,
) -> WrappedDataLoader | tuple[Any, int, None, None]:
    """Does what `wrap_dataloader` does if packing is on. If it is off, returns the arguments
    unchanged and None for both sums.
    """
    if getattr(config, "sequence_packing_scheduler", None) is None:
        return data_iterator, num_microbatches, None, None
    return wrap_dataloader(data_iterator, config, num_microbatches, pg_collection=pg_collection)
