"""Refuses in tests what gloo answers wrongly in silence (findings/gloo-*.sh), so that no code of
ours, or of megatron-core on our way through it, relies on such an answer.

    guard_collectives()    # in each rank, after init_process_group

- A tensor whose elements do not lie one after the other: gloo takes its neighbors in memory.
- MAX or MIN of a tensor with a NaN: it reaches the result from one rank and not from another.
- What `reduce` leaves on the other ranks: part of it is the sum. It is NaN afterwards, or -12345.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

_COLLECTIVES = (
    *("all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "gather"),
    *("reduce_scatter", "reduce_scatter_tensor", "scatter", "all_to_all", "all_to_all_single"),
    *("_all_gather_base", "_reduce_scatter_base"),
)
LEFT_OVER = -12345
"""What a tensor of integers holds on ranks that `reduce` did not choose."""


def guard_collectives() -> None:
    """Wraps the collectives of torch.distributed in this process."""
    for name in _COLLECTIVES:
        original = getattr(distributed_c10d, name)
        guarded = _guarded(name, original)
        # Most call torch.distributed.all_reduce; torch's own code has the names of its module.
        setattr(distributed_c10d, name, guarded)
        setattr(dist, name, guarded)


def _guarded(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def call(*arguments: Any, **options: Any) -> Any:
        bound = signature.bind(*arguments, **options).arguments
        operation = bound.get("op", dist.ReduceOp.SUM)
        for tensor in _tensors(bound.values()):
            assert tensor.is_contiguous(), f"{name} of a tensor with strides {tensor.stride()}"
            if operation in (dist.ReduceOp.MAX, dist.ReduceOp.MIN) and tensor.is_floating_point():
                assert not tensor.isnan().any(), f"{name} with {operation} of a NaN"
        if name == "reduce" and dist.get_rank() != _destination(bound):
            tensor = bound["tensor"]
            bound["tensor"] = tensor.detach().clone()
            tensor.fill_(torch.nan if tensor.is_floating_point() else LEFT_OVER)
        return original(**bound)

    return call


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _destination(bound: dict[str, Any]) -> int:
    group_rank = bound.get("group_dst")
    if group_rank is None:
        return int(bound["dst"])
    group: Any = bound.get("group") or dist.group.WORLD
    return dist.get_global_rank(group, group_rank)
