"""mcore. What Megatron's own code calls: one global batch drawn, scheduled, moved and packed,
behind an iterator, and `get_batch_on_this_rank_for_sequence_packing`, which takes the next
microbatch from there.
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
    """What Megatron's own code expects of `wrap_dataloader`, by name."""

    data_iterator: PackedIterator | list[PackedIterator]
    num_microbatches: int
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
    """Draw one global batch and return it packed, with its number of microbatches and the two sums
    for FLOPs.

    data_iterator: on drawing ranks (see `step.groups`), an iterator whose `next` gives a sample or
    a list of them (see `batch.reading`), or a list of such iterators with interleaving; not read
    elsewhere.
    num_microbatches: how many times each drawing rank calls `next`. config:
    `max_seqlen_per_dp_cp_rank` (tokens that one rank may hold; a pack may hold that many times the
    context-parallel size), `sequence_packing_scheduler` (unless `scheduler_type`),
    `virtual_pipeline_model_parallel_size`, `microbatch_group_size_per_vp_stage`, and
    `sequence_packing_options` where it has any; a namespace of these alone will do. queue: lets
    outliers wait for company (see `step.delay`); the same one at every step of a run, on every rank
    or on none.

    Returns an iterator over the microbatches (see `batch.microbatches`; one per virtual stage in a
    list with interleaving) on every rank: stages in the middle get layouts. The number of
    microbatches is equal on all ranks. Both sums are over real lengths, exact.

    Raises StopIteration on all ranks when no rank has any sample left, and GlobalBatchError on all
    ranks, naming rank and cause, when one of them fails.
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
    """`wrap_dataloader` under the name that later Megatron-LM uses."""
    return wrap_dataloader(data_iterator, config, num_microbatches, pg_collection=pg_collection)


def wrap_iterator_helper(
    config: TransformerConfig,
    data_iterator: object,
    num_microbatches: int,
    pg_collection: ProcessGroupCollection | None = None,
) -> WrappedDataLoader | tuple[Any, int, None, None]:
    """`wrap_dataloader` where packing is on; where it is off, the arguments as they came and None
    for both sums.
    """
    if getattr(config, "sequence_packing_scheduler", None) is None:
        return data_iterator, num_microbatches, None, None
    return wrap_dataloader(data_iterator, config, num_microbatches, pg_collection=pg_collection)
