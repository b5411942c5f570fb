"""mcore. Fields per path of a global batch's microbatches, and sums of them over ranks, for the
losses that compare answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron.sft.data.preference.encode import PLAIN, RANK
from megatron.sft.data.stream import POSITION, SOURCE
from megatron.sft.model.forward import Asked

PER_PATH = "extra_per_path"
"""Key of a microbatch's fields per path."""


def fields_or_none(
    microbatches: Sequence[Mapping[str, Any]],
) -> list[Mapping[str, Tensor] | None]:
    """Returns the fields per path of each microbatch; None for one without paths."""
    return [
        fields if (fields := one.get(PER_PATH)) is not None and RANK in fields else None
        for one in microbatches
    ]


def fields_per_path(microbatches: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Tensor]]:
    """Returns the fields per path of the microbatches that have paths."""
    return [fields for fields in fields_or_none(microbatches) if fields is not None]


def chosen_of_rows(extra: Mapping[str, Tensor]) -> Tensor:
    """Returns for each path the row of its record's chosen answer, int64 [n].

    Records at positions 7 7 3 3, ranks 1 0 0 1    ->    rows 1 1 2 2

    Paths of a chat to imitate have none: they stand for themselves.
    """
    position, rank = extra[POSITION], extra[RANK]
    same_record = position.unsqueeze(1) == position.unsqueeze(0)
    chosen = (same_record & (rank == 0).unsqueeze(0)).int().argmax(1)
    return torch.where(rank == PLAIN, torch.arange(len(rank), device=rank.device), chosen)


def sums_by_source(
    extra: Mapping[str, Tensor], losses: Tensor, counts: Tensor, asked: Asked
) -> Tensor:
    """Returns the sums of losses and counts by source, float64 [2, sources]."""
    both = torch.stack((losses, counts))
    return both.new_zeros(2, asked.num_sources).index_add(1, extra[SOURCE].long(), both)


def counted_once(log: Mapping[str, Any], cp_group: dist.ProcessGroup) -> dict[str, Any]:
    """Returns a log that one context-parallel rank counts. All of them have the whole sums, of
    which each takes the gradient.
    """
    is_counted = float(dist.get_rank(cp_group) == 0)
    return {
        name: tuple(part * is_counted for part in value)
        if isinstance(value, tuple)
        else value * is_counted
        for name, value in log.items()
    }


def is_last_stage() -> bool:
    """Returns whether this rank has losses."""
    return bool(parallel_state.is_pipeline_last_stage(ignore_virtual=True))


def summed_over_replicas(numbers: Tensor) -> Tensor:
    """Returns the sum over data-parallel ranks, whose context-parallel ranks have the same."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=False)
    is_gpu = dist.get_backend(group) == "nccl"
    moved = numbers.cuda() if is_gpu else numbers.clone()
    dist.all_reduce(moved, group=group)
    return moved.cpu()
