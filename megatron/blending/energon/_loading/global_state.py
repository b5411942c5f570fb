"""collective. The states of all ranks are gathered on one, or sent from one, over
torch.distributed: as energon does.

Everything else of a loader knows no other rank; torch.distributed is not imported for this, but
found.
"""

import sys
from collections.abc import Sequence
from typing import Any

from megatron.blending.energon._loading.state import State
from megatron.blending.streams.worker_config import WorkerConfig


def gather_states(state: State, config: WorkerConfig, global_dst_rank: int) -> list[State] | None:
    """Returns the states of all ranks, in order, on the process of that number among all; None
    elsewhere.
    """
    if config.num_ranks == 1:
        return [state]
    distributed = _distributed(config, "save_state_global gathers")
    gathered: Any = [None] * config.num_ranks if distributed.get_rank() == global_dst_rank else None
    distributed.gather_object(state, gathered, global_dst_rank, group=config.data_parallel_group)
    return gathered


def send_states(
    states: Sequence[State] | None, config: WorkerConfig, src_rank: int | None
) -> Sequence[State]:
    """Returns the states that rank `src_rank` of the data-parallel group has; one's own where that
    is None.
    """
    if src_rank is None or config.num_ranks == 1:
        if not isinstance(states, (list, tuple)):
            raise ValueError(
                "restore_state_global takes the list that save_state_global gave, on each rank"
            )
        return states
    distributed = _distributed(config, "restore_state_global sends")
    group = config.data_parallel_group
    source = src_rank if group is None else distributed.get_global_rank(group, src_rank)
    sent = [states]
    distributed.broadcast_object_list(sent, source, group=group)
    if not isinstance(sent[0], (list, tuple)):
        raise ValueError(
            f"restore_state_global: rank {src_rank} has no states; pass it what save_state_global "
            "gave"
        )
    return sent[0]


def _distributed(config: WorkerConfig, what: str) -> Any:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_initialized():
        raise ValueError(
            f"{what} states of {config.num_ranks} ranks over torch.distributed, which is not "
            "initialised; use state_dict on each rank, and load_state_dict with a list of all"
        )
    return distributed
