"""mcore. Checkpoints of parameters whose sections are cut over tensor parallel one by one, such as
a joined projection.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from torch import Tensor

Offsets = tuple[tuple[int, int, int], ...]


def by_section(
    whole: ShardedTensor, sections: dict[str, int], place: tuple[int, int], offsets: Offsets
) -> ShardedTensorFactory:
    """Returns rows of a sharded tensor as one tensor per section, cut over tensor parallel each.

    place: rank and size of tensor parallel.
    """
    axis = len(offsets)

    @torch.no_grad()
    def build(key: str, rows: Tensor, replica_id: Any, flattened_range: slice | None) -> list[Any]:
        parts = zip(sections, rows.split(tuple(sections.values())), strict=True)
        return [
            ShardedTensor.from_rank_offsets(
                f"{key}.{name}",
                part,
                *offsets,
                (axis, *place),
                replica_id=replica_id,
                prepend_axis_num=axis,
            )
            for name, part in parts
        ]

    @torch.no_grad()
    def merge(parts: list[Tensor]) -> Tensor:
        return torch.cat(parts)

    return ShardedTensorFactory(whole.key, whole.data, build, merge, whole.replica_id)
