"""collective. The data ranks, and the two kinds of process group that carry a global batch.

One rank of each data-parallel replica loads data: its *data rank*, tensor-, context- and
pipeline-parallel rank 0. It is a rank of the world, not a data-parallel rank, although there are as
many. The data ranks make up one group, and each replica is another. Both are gloo groups of their
own: all that travels is on the host, and a thread that prepares batches must not share groups with
the model.

    2 replicas of 4 ranks (tensor parallel 2, pipeline 2), ranks 0 1 4 5 and 2 3 6 7:
    data ranks 0 and 2    ->    group of data ranks [0, 2], replicas [0, 1, 4, 5] and [2, 3, 6, 7]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron.packing.device import CPU, Device

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class DataGroups:
    """The groups of this rank that carry global batches."""

    data_ranks_group: dist.ProcessGroup | None
    """All data ranks, in the order of data-parallel ranks; None on other ranks."""
    replica: dist.ProcessGroup
    """The ranks of this data-parallel replica."""
    data_rank: int
    """Global rank of this replica's data rank."""
    first_stage: tuple[int, ...] = ()
    """Global ranks of this replica's first pipeline stage, ascending; the data rank is among them.
    """


def is_data_rank(groups: Any) -> bool:
    """Returns whether this rank loads data for its replica.

    Args:
        groups: megatron-core's `tp`, `cp` and `pp`.
    """
    return groups.tp.rank() == groups.cp.rank() == groups.pp.rank() == 0


def data_groups(groups: Any) -> DataGroups:
    """Returns the groups beside megatron-core's `tp`, `cp`, `pp`, `dp` and `mp`.

    They are made by the first call, which is collective over the world. Their collectives have
    torch's own timeout for gloo.
    """
    return _make_groups(
        groups.cp,
        groups.dp,
        groups.mp,
        loads=is_data_rank(groups),
        is_first_stage=groups.pp.rank() == 0,
    )


@lru_cache(maxsize=8)
def _make_groups(
    cp: dist.ProcessGroup,
    dp: dist.ProcessGroup,
    mp: dist.ProcessGroup,
    *,
    loads: bool,
    is_first_stage: bool,
) -> DataGroups:
    # mp holds a replica's tensor and pipeline ranks of one context rank; cp joins them over context
    # ranks. So two gathers list the replica's members, each with whether it loads data.
    stages = _gather_all((dist.get_rank(), (loads, is_first_stage)), mp)
    members = dict(member for shard in _gather_all(stages, cp) for member in shard)
    (data_rank,) = (rank for rank, (its_loads, _) in members.items() if its_loads)
    data_ranks = tuple(dist.get_process_group_ranks(dp)) if loads else ()
    if list(data_ranks) != sorted(data_ranks):
        raise ValueError("the data-parallel group must list its ranks in ascending order")
    replica = tuple(sorted(members))
    # Ranks that load no data name the empty group: all ranks of the world take part in this.
    mine = _new_groups(_gather_all((data_ranks, replica), dist.group.WORLD))
    return DataGroups(
        data_ranks_group=mine[0, data_ranks] if loads else None,
        replica=mine[1, replica],
        data_rank=data_rank,
        first_stage=tuple(sorted(rank for rank, (_, first) in members.items() if first)),
    )


def _new_groups(
    everyone: Sequence[tuple[tuple[int, ...], tuple[int, ...]]],
) -> dict[tuple[int, tuple[int, ...]], dist.ProcessGroup]:
    """Makes the groups of data ranks (kind 0) and of replicas (kind 1) that the ranks of the world
    name, and returns this rank's by kind and members.
    """
    mine = {}
    for kind in (0, 1):  # `new_group` is collective: all ranks make all groups in one order
        for ranks in sorted({each[kind] for each in everyone} - {()}):
            group = dist.new_group(ranks, backend="gloo")
            if dist.get_rank() in ranks:
                mine[kind, ranks] = group
    return mine


def _gather_all(value: T, group: dist.ProcessGroup | None) -> list[T]:
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Returns where tensors for this group's collectives must live."""
    # A group of several backends, or of the default ones, has a name of its own. Only gloo alone
    # stays on the CPU.
    is_on_host = dist.get_backend(group) in ("gloo", "cpu:gloo")
    return (CPU if is_on_host else Device.here()).place
