"""mcore. Samples that are delayed to a later step, in a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from megatron.packing.scheduling.options import SchedulerOptions
from megatron.packing.step.delay import DelayQueue
from megatron.sft.options.packing import PackingConfig


def restored_queue(
    packing: PackingConfig,
    scheduling: SchedulerOptions,
    delayed: Sequence[dict[str, Any]],
    rank: int,
    num_ranks: int,
) -> DelayQueue | None:
    """Returns the queue of delayed samples of data-parallel rank `rank`, filled with its part of
    those in the loaded checkpoint (`delayed`). Returns None if the run delays nothing and the
    checkpoint has nothing delayed.

    Raises ValueError on every rank if there are delayed samples and packing is off: nothing would
    ever train them.
    """
    if delayed and not packing.sequence_packing:
        raise ValueError(
            "the checkpoint holds sequences that wait for a later step; pass --sequence-packing"
        )
    if not scheduling.outlier_delay_steps and not delayed:
        return None
    queue = DelayQueue(scheduling.outlier_delay_steps)
    if delayed:
        queue.load_state_dict(delayed, rank, num_ranks)
    return queue


def gather_delayed(queue: DelayQueue | None) -> list[dict[str, Any]]:
    """Returns the delayed samples of all data-parallel ranks, for `Progress.waiting`; [] if there
    are none. Collective if there is a queue.

    Only data ranks have the right answer. Rank 0, whose `Progress` is saved, is one of them.
    """
    if queue is None:
        return []
    group = parallel_state.get_data_parallel_group()
    states: list[Any] = [None] * group.size()
    dist.all_gather_object(states, queue.state_dict(), group=group)
    return states if any(len(state["steps"]) for state in states) else []
