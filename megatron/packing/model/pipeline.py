"""mcore. The hook on megatron-core's forward-backward functions: they run packed global batches, in training and in
evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_model_config

from megatron.packing.step.delay import DelayQueue
from megatron.packing.step.global_batch import GROUPS, GlobalBatch, schedule_global_batch
from megatron.packing.step.groups import device_of


class PackedLosses(list):
    """What the forward-backward function returned, one entry per microbatch, and the `batch` that it ran."""

    def __init__(self, losses: list[Any], batch: GlobalBatch) -> None:
        super().__init__(losses)
        self.batch = batch


def packed(
    forward_backward_func: Callable[..., list[Any]], queue: DelayQueue | None = None
) -> Callable[..., PackedLosses]:
    """`forward_backward_func` (from megatron-core's `get_forward_backward_func`), fed by the packing scheduler.

    Takes the same arguments. `data_iterator` gives samples (see `data_schedule.wrap_dataloader`) and
    `num_microbatches` says how often each drawing rank calls `next`; how many microbatches then run is the scheduler's
    decision. The model's config must pass `check_config`. With a `queue`, outliers wait for company in training (see
    `delay`); with `forward_only` it is left alone.
    """

    @wraps(forward_backward_func)
    def run(
        *,
        data_iterator: Any,
        model: Any,
        num_microbatches: int,
        pg_collection: ProcessGroupCollection | None = None,
        forward_only: bool = False,
        **arguments: Any,
    ) -> PackedLosses:
        config = get_model_config(model[0] if isinstance(model, list) else model)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(GROUPS)
        check_config(config, device_of(groups.pp))
        queue_used = None if forward_only else queue
        batch = schedule_global_batch(data_iterator, config, num_microbatches, groups, queue=queue_used)
        losses = forward_backward_func(
            data_iterator=batch.iterators(config.virtual_pipeline_model_parallel_size),
            model=model,
            num_microbatches=batch.stats.num_microbatches,
            pg_collection=pg_collection,
            forward_only=forward_only,
            **arguments,
        )
        return PackedLosses(losses, batch)

    return run


def check_config(config: TransformerConfig, device: torch.device) -> None:
    """Raise ValueError for a config under which packs would be weighted wrongly, mixed up, or hang on `device`."""
    pipeline = config.pipeline_model_parallel_size > 1
    interleaved = pipeline and config.virtual_pipeline_model_parallel_size is not None
    demands = [
        (config.calculate_per_token_loss, "calculate_per_token_loss=True: tokens would be weighted by their pack"),
        (
            not getattr(config, "hybrid_context_parallel", False),
            "hybrid_context_parallel=False: it schedules the same batch a second time and can zero gradients",
        ),
        (not pipeline or config.variable_seq_lengths, "variable_seq_lengths=True: packs differ in length"),
        (
            not interleaved or (config.overlap_p2p_comm and not config.batch_p2p_comm),
            "overlap_p2p_comm=True and batch_p2p_comm=False: otherwise interleaved stages mix up tensors or hang",
        ),
        (
            not interleaved or device.type == "cuda" or not config.deallocate_pipeline_outputs,
            "deallocate_pipeline_outputs=False on CPU: gloo would send memory that is freed meanwhile",
        ),
    ]
    require(demands)


def require(demands: Sequence[tuple[Any, str]]) -> None:
    """Raise ValueError for the first that does not hold: `[(config.bf16, "bf16=True: why")]`."""
    for holds, demand in demands:
        if not holds:
            raise ValueError(f"sequence packing needs TransformerConfig {demand}")
