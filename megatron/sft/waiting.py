"""mcore. The sequences that wait between steps (see `packing.delay`), as a run makes their queue and saves it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from megatron.packing.step.delay_queue import DelayQueue
from megatron.sft.options.packing import PackingConfig


def build_queue(
    packing: PackingConfig, waiting: Sequence[dict[str, Any]], rank: int, num_ranks: int
) -> DelayQueue | None:
    """Where outliers wait on data-parallel rank `rank`, with its part of those `waiting` in a loaded checkpoint; None
    if none can wait and none do.

    ValueError on every rank where some wait and packing is off: nothing would give them back.
    """
    if waiting and not packing.sequence_packing:
        raise ValueError("the checkpoint holds sequences that wait for a later step; pass --sequence-packing")
    if not packing.outlier_delay_steps and not waiting:
        return None
    queue = DelayQueue(packing.outlier_delay_steps)
    if waiting:
        queue.load_state_dict(waiting, rank, num_ranks)
    return queue


def gather_waiting(queue: DelayQueue | None) -> list[dict[str, Any]]:
    """What waits on all data-parallel ranks, for `Progress`; empty if none does. Collective, with a queue.

    Right on ranks that own data, as rank 0 does, whose `Progress` is saved. All that waits goes to each of them.
    """
    if queue is None:
        return []
    group = parallel_state.get_data_parallel_group()
    states: list[Any] = [None] * group.size()
    dist.all_gather_object(states, queue.state_dict(), group=group)
    return states if any(len(state["rows"]) for state in states) else []
