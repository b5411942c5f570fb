"""mcore. Shares the tensors of a checkpoint out over data-parallel replicas: each writes a part of
its own, and reads of a sharded optimizer's state its own alone.

A part is a range of a parameter's flat values. Distributed checkpoints are made of blocks with an
offset in the whole tensor, so that a range is cut into rectangles: at most three of a matrix.

    parameter [4, 3], range 2 to 10        . . a
                                           b b b
                                           b b b
                                           c . .

megatron-core gathers a sharded optimizer's state on one rank of each data-parallel group, bucket by
bucket over gloo, and that rank writes all of it. What is written here has the same keys and whole
shapes, and any reader of such checkpoints reads it in any layout.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, nested_values
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from megatron.sft.model.checkpoints.read import with_own_storage
from megatron.sft.options.optimizer import ADAM_STATE

Entry: TypeAlias = ShardedTensor | ShardedTensorFactory
"""A tensor of a state, or one that checkpoints hold in pieces (gate and up projection)."""
Rectangle = tuple[tuple[int, int], ...]
"""First index and end of each axis."""

_KINDS = ("param", *ADAM_STATE)
_OWN = "own_tensors"


def install() -> None:
    """Lets megatron-core's sharded optimizer save and load the ranges that a rank updates, in
    checkpoints of the kind `fully_reshardable`. Idempotent.
    """
    DistributedOptimizer.sharded_param_state_fully_reshardable = _own_state  # type: ignore[method-assign]
    DistributedOptimizer.load_parameter_state_from_fully_reshardable = _take_own_state  # type: ignore[method-assign]


def share_out(state: dict[str, Any]) -> None:
    """Replaces each replicated tensor of a state to be saved by this replica's share of it, in
    rectangles. The replicas' shares of all tensors together are equally large.
    """
    entries = [entry for entry in nested_values(state) if _is_replicated(entry)]
    sizes = dict.fromkeys(map(_num_replicas, entries), 0)
    for entry in entries:
        sizes[_num_replicas(entry)] += entry.data.nbytes
    position = dict.fromkeys(sizes, 0)

    def share(entry: Any) -> Any:
        if not _is_replicated(entry):
            return entry
        replicas, replica = _num_replicas(entry), entry.replica_id[-1]
        # Of all bytes, in order, replica 1 of 4 has the second quarter: here elements start to stop
        # of this tensor, if any.
        start, stop = (
            min(
                max(sizes[replicas] * cut // replicas - position[replicas], 0)
                // entry.data.itemsize,
                entry.data.numel(),
            )
            for cut in (replica, replica + 1)
        )
        position[replicas] += entry.data.nbytes
        values = entry.data.detach().reshape(-1)[start:stop]
        shares = [] if _is_copy(entry) else list(_rectangles_of(entry, entry.key, values, start))
        return shares or LocalNonpersistentObject(None)  # which isn't saved

    dict_list_map_inplace(share, state)
    for shares in nested_values(state):
        # Of a tensor that is part of a larger storage megatron-core would make a copy, and torch
        # would write that storage.
        if isinstance(shares, ShardedTensor) and shares.data.device.type == "cpu":
            shares.data = with_own_storage(shares.data.detach().contiguous())


def read_pieces_in_place(state: dict[str, Any]) -> None:
    """Makes tensors that checkpoints hold in pieces (gate and up projection) be loaded without a
    copy: pieces that are views of the tensor have filled it once they are read.

    megatron-core joins the pieces in new memory, and all new tensors of a state exist at once.
    """

    def merged(factory: ShardedTensorFactory, pieces: Any) -> Any:
        whole = factory.data.detach()
        found = list(nested_values(pieces))
        memory = whole.untyped_storage().data_ptr()  # 0 of a tensor that stands for others (fp8)
        are_views = memory and {piece.untyped_storage().data_ptr() for piece in found} == {memory}
        if are_views and sum(piece.numel() for piece in found) == whole.numel():
            return whole
        return factory.merge_fn(pieces)

    def in_place(entry: Any) -> Any:
        if not isinstance(entry, ShardedTensorFactory):
            return entry
        return replace(entry, merge_fn=functools.partial(merged, entry))

    dict_list_map_inplace(in_place, state)


def _is_replicated(entry: object) -> bool:
    # What megatron-core replicates has the ids (pipeline, tensor, data parallel).
    return isinstance(entry, Entry) and isinstance(entry.replica_id, tuple)


def _is_copy(entry: Entry) -> bool:
    """Returns True for the copies that no checkpoint holds: tied embeddings of the last stage, and
    norms on all tensor-parallel ranks but the first.
    """
    assert isinstance(entry.replica_id, tuple)
    return any(entry.replica_id[:-1])


def _num_replicas(entry: Entry) -> int:
    if ".experts." in entry.key:
        return parallel_state.get_expert_data_parallel_world_size()
    return parallel_state.get_data_parallel_world_size(with_context_parallel=True)


def _own_state(
    self: Any,
    model_sharded_state_dict: dict[str, Any],
    is_loading: bool = False,
    metadata: dict[str, Any] | None = None,
) -> dict[Any, Any]:
    """Returns the ranges of all parameters that this rank updates, as they are in memory: to be
    written, or to be read into.
    """
    entries = {
        id(entry.data): entry
        for entry in nested_values(model_sharded_state_dict)
        if isinstance(entry, Entry)
    }
    state: dict[Any, Any] = {}
    own: list[tuple[Tensor, dict[str, Tensor]]] = []
    for parameter, start in _own_ranges(self):
        entry = entries[id(parameter)]
        if _is_copy(entry) and not is_loading:
            continue
        found = self._get_main_param_and_optimizer_states(parameter)
        tensors = {kind: found[kind] for kind in _KINDS}  # `step` is in the parameter groups
        if self.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:
            # These are new tensors in float32: on the device all of them would be too many.
            tensors = {kind: values.cpu() for kind, values in tensors.items()}
        own.append((parameter, tensors))
        state[len(own)] = {
            kind: list(
                _rectangles_of(entry, f"optimizer.state.{kind}.{entry.key}", values.detach(), start)
            )
            for kind, values in tensors.items()
        }
    state[_OWN] = LocalNonpersistentObject(tuple(own))
    return state


def _take_own_state(self: Any, state_dict: dict[Any, Any]) -> None:
    """Gives the optimizer the tensors that were read. Most are its own, which are full already."""
    for parameter, tensors in state_dict[_OWN]:
        self._set_main_param_and_optimizer_states(parameter, tensors)
    if isinstance(self.optimizer, HybridDeviceOptimizer):
        self.optimizer._sync_hdo_state_to_sub_optimizers()


def _own_ranges(part: Any) -> Iterator[tuple[Tensor, int]]:
    """Yields each parameter that this rank updates a part of, and where that part starts."""
    for ranges in part.gbuf_ranges:
        for buckets in ranges.values():
            for bucket in buckets:
                for parameter, places in bucket["param_map"].items():
                    yield parameter, places["param"].start


def _rectangles_of(entry: Entry, key: str, values: Tensor, start: int) -> Iterator[ShardedTensor]:
    """Yields a range of a parameter's flat values as blocks of the whole tensor.

    Args:
        key: name of the whole tensor, or, of one in pieces, the beginning of their names.
        values: the range [n], from element `start` of the parameter on.
    """
    layout = torch.empty(entry.data.shape, dtype=values.dtype, device="meta")
    if isinstance(entry, ShardedTensorFactory):
        pieces = list(nested_values(replace(entry, key=key, data=layout).build()))
    else:
        pieces = [replace(entry, key=key, data=layout, dtype=layout.dtype)]
    for piece in pieces:
        # Strides and offset tell where in the parameter a piece has its values.
        sizes, strides = piece.data.shape, piece.data.stride()
        first = piece.data.storage_offset()
        num_further = piece.prepend_axis_num  # axes of the whole tensor alone: layers, experts
        before, offset = piece.global_offset[:num_further], piece.global_offset[num_further:]
        for box in rectangles(sizes, strides, start - first, start - first + values.numel()):
            shape = (1,) * num_further + tuple(end - begin for begin, end in box)
            at = first + sum(begin * stride for (begin, _), stride in zip(box, strides))
            yield ShardedTensor(
                piece.key,
                values.as_strided(
                    shape, (1,) * num_further + strides, values.storage_offset() + at - start
                ),
                values.dtype,
                shape,
                piece.global_shape,
                (*before, *(place + begin for place, (begin, _) in zip(offset, box))),
                axis_fragmentations=None,
                allow_shape_mismatch=piece.allow_shape_mismatch,
            )


def rectangles(
    sizes: Sequence[int], strides: Sequence[int], start: int, stop: int
) -> Iterator[Rectangle]:
    """Yields the rectangles of a tensor with these strides whose values lie at start to stop in
    memory, counted from its first value. No axis may reach into the next value of another.

    A contiguous matrix has at most three: `[4, 3]`, 2 to 10 -> `((0, 1), (2, 3))`, `((1, 3),
    (0, 3))`, `((3, 4), (0, 1))`.
    """
    if start >= stop or 0 in sizes:
        return
    longer = (axis for axis, size in enumerate(sizes) if size > 1)  # others have any stride
    axes = sorted(longer, key=lambda axis: -strides[axis])
    whole = [(0, size) for size in sizes]
    for box in _boxes(axes, sizes, strides, start, stop):
        yield tuple(box.get(axis, whole[axis]) for axis in range(len(sizes)))


def _boxes(
    axes: Sequence[int], sizes: Sequence[int], strides: Sequence[int], start: int, stop: int
) -> Iterator[dict[int, tuple[int, int]]]:
    """Yields rectangles by axis; an axis that is missing is whole. `axes`: by stride, largest
    first.
    """
    length = 1 + sum((sizes[axis] - 1) * strides[axis] for axis in axes)
    if start <= 0 and stop >= length:
        yield {}
        return
    if not axes or start >= length or stop <= 0:
        return
    axis, *inner = axes
    stride = strides[axis]
    row = length - (sizes[axis] - 1) * stride
    first = max(-(-start // stride), 0)
    end = min((stop - row) // stride + 1, sizes[axis])
    for partial in sorted({max(start // stride, 0), min((stop - 1) // stride, sizes[axis] - 1)}):
        if not first <= partial < end:
            begin = partial * stride
            for box in _boxes(inner, sizes, strides, start - begin, stop - begin):
                yield {axis: (partial, partial + 1), **box}
    if first < end:
        yield {axis: (first, end)}
