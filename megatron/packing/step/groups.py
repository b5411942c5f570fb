"""collective. Who draws, and the two kinds of process group that carry a global batch.

Of each data-parallel replica one rank draws: tensor-, context- and pipeline-parallel rank 0. The
drawing ranks are one group, each replica is another. Both are gloo groups of their own, as all that
travels is on the host, and as a road in the background must not share groups with the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class DataGroups:
    """The groups of this rank."""

    drawing: dist.ProcessGroup | None
    """All drawing ranks, by data-parallel rank; None on ranks that do not draw."""
    replica: dist.ProcessGroup
    """The ranks of this data-parallel replica."""
    drawing_rank: int
    """Global rank of the one of this replica that draws."""


def is_drawing_rank(groups: Any) -> bool:
    """Return whether this rank draws for its replica; `groups` has megatron-core's `tp`, `cp` and
    `pp`.
    """
    return groups.tp.rank() == groups.cp.rank() == groups.pp.rank() == 0


def road_groups(groups: Any) -> DataGroups:
    """Return the groups that go with megatron-core's `tp`, `cp`, `pp`, `dp` and `mp`; made at the
    first call.

    The first call is collective over the world. Their collectives have torch's own timeout for
    gloo.
    """
    return _made(groups.tp, groups.cp, groups.pp, groups.dp, groups.mp)


@lru_cache(maxsize=8)
def _made(
    tp: dist.ProcessGroup,
    cp: dist.ProcessGroup,
    pp: dist.ProcessGroup,
    dp: dist.ProcessGroup,
    mp: dist.ProcessGroup,
) -> DataGroups:
    draws = tp.rank() == cp.rank() == pp.rank() == 0
    stages = _all_gathered((dist.get_rank(), draws), mp)
    members = dict(member for shard in _all_gathered(stages, cp) for member in shard)
    (drawing_rank,) = (rank for rank, its_draws in members.items() if its_draws)
    drawing_ranks = tuple(dist.get_process_group_ranks(dp)) if draws else ()
    if list(drawing_ranks) != sorted(drawing_ranks):
        raise ValueError("the data-parallel group must list its ranks in ascending order")
    everyone = _all_gathered((drawing_ranks, tuple(sorted(members))), dist.group.WORLD)
    mine: dict[tuple[int, tuple[int, ...]], dist.ProcessGroup] = {}
    for kind in (0, 1):  # all ranks take part in making each group, in one order
        for ranks in sorted({each[kind] for each in everyone} - {()}):
            group = dist.new_group(ranks, backend="gloo")
            if dist.get_rank() in ranks:
                mine[kind, ranks] = group
    drawing = mine[0, drawing_ranks] if draws else None
    return DataGroups(
        drawing=drawing, replica=mine[1, tuple(sorted(members))], drawing_rank=drawing_rank
    )


def _all_gathered(value: T, group: dist.ProcessGroup | None) -> list[T]:
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Return where tensors for this group's collectives must live."""
    # A group of several backends, or of the default ones, has a name of its own; only gloo alone
    # stays on the CPU.
    if not torch.cuda.is_available() or dist.get_backend(group) in ("gloo", "cpu:gloo"):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
