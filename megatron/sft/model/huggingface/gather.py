"""mcore. Gathers whole HuggingFace tensors from the parts that ranks have, one at a time.

Tensor-parallel ranks send their part of a parameter to the first of them. Expert-parallel ranks do
so only if the experts of a layer are one stacked tensor. Nothing travels between pipeline stages.
Host memory: the model and one tensor, two if it is split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron.sft.model.huggingface.read import Placed, weights_bar
from megatron.sft.model.huggingface.tensors import Copy, Part, Stack, copies

ValuesOf = Callable[[Placed], Tensor]


class Dtypes(NamedTuple):
    """Types of the tensors in the written files."""

    default: torch.dtype
    kept: Mapping[str, torch.dtype] = {}
    """Tensor -> its own type, where it differs (a router's bias in float32)."""

    def of(self, name: str) -> torch.dtype:
        """Returns the type of a tensor."""
        return self.kept.get(name, self.default)


class _Group(NamedTuple):
    """Parameters of this rank that share tensors: the experts of a stack, or a single parameter."""

    placed: tuple[Placed, ...]
    parts: tuple[Part, ...]
    """One part of each tensor."""

    @property
    def is_stacked(self) -> bool:
        """Returns whether other expert-parallel ranks have other experts of the same tensors."""
        return any(part.view.expert is not None for part in self.parts)

    @property
    def is_written_here(self) -> bool:
        """Returns whether this rank writes the tensors."""
        if self.is_stacked:
            return parallel_state.get_expert_model_parallel_rank() == 0
        is_expert = self.placed[0].weight.is_expert
        return is_expert or parallel_state.get_tensor_model_parallel_rank() == 0


def _groups(placed: Sequence[Placed]) -> list[_Group]:
    """Returns the parameters in groups, ordered by the first parameter of each."""
    group_of: dict[str, int] = {}
    groups: list[_Group] = []
    for one in placed:
        names = [part.name for part in one.weight.parts]
        known = next((group_of[name] for name in names if name in group_of), None)
        if known is None:
            known = len(groups)
            groups.append(_Group((), ()))
        old = groups[known]
        new = {part.name: part for part in one.weight.parts if part.name not in group_of}
        group_of |= dict.fromkeys(new, known)
        groups[known] = _Group((*old.placed, one), (*old.parts, *new.values()))
    return groups


def written_parts(placed: Sequence[Placed]) -> list[Part]:
    """Returns the tensors that `tensors_of` yields on this rank."""
    return [part for group in _groups(placed) if group.is_written_here for part in group.parts]


def tensors_of(placed: Sequence[Placed], dtypes: Dtypes, values_of: ValuesOf) -> Iterator[Tensor]:
    """Yields the tensors that this rank writes, in order. Collective over tensor-parallel ranks,
    and over expert-parallel ranks if experts are stacked.
    """
    with weights_bar("writing", sum(one.parameter.numel() for one in placed)) as bar:
        for group in _groups(placed):
            yield from (
                _stack(group, dtypes, values_of)
                if group.is_stacked
                else _whole(group, dtypes, values_of)
            )
            bar.update(sum(one.parameter.numel() for one in group.placed))


def _whole(group: _Group, dtypes: Dtypes, values_of: ValuesOf) -> Iterator[Tensor]:
    """Yields the tensors of a group on the rank that writes them. The others send their part, and
    yield nothing.
    """
    tensors: dict[str, Tensor] = {}
    if group.is_written_here:
        tensors = {
            part.name: torch.empty(part.stored_shape, dtype=dtypes.of(part.name))
            for part in group.parts
        }
    for one in group.placed:
        pieces = _pieces(one, values_of(one))
        for rank, piece in enumerate(pieces):
            for copy in copies(one.weight, rank, len(pieces), len(piece)):
                part = one.weight.parts[copy.part]
                _put(tensors[part.name], part, copy, piece)
    yield from tensors.values()


def _pieces(placed: Placed, mine: Tensor) -> list[Tensor]:
    """Returns the part of each tensor-parallel rank on the rank that writes; [] on the others."""
    weight, group = placed.weight, parallel_state.get_tensor_model_parallel_group()
    if weight.is_expert or weight.sharding == "whole" or group.size() == 1:
        is_written = weight.is_expert or group.rank() == 0
        return [mine] if is_written else []
    pieces = [torch.empty_like(mine) for _ in range(group.size())] if group.rank() == 0 else []
    # Every rank of the group comes here in the same order, since groups are made of the same table
    # on all of them.
    dist.gather(mine.contiguous(), pieces or None, group=group, group_dst=0)
    return pieces


def _stack(group: _Group, dtypes: Dtypes, values_of: ValuesOf) -> Iterator[Tensor]:
    """Yields stacked tensors of experts. Each expert-parallel rank has consecutive experts."""
    numbers = [part.view.expert for one in group.placed for part in one.weight.parts]
    # Expert-parallel rank 1 of 2, with 8 experts, holds experts 4 to 7: first is 4.
    first = min(number for number in numbers if number is not None)
    num_here = len(set(numbers))
    mine = {
        part.name: torch.empty((num_here, *part.matrix_shape), dtype=dtypes.of(part.name))
        for part in group.parts
    }
    for one in group.placed:
        values = values_of(one)
        for copy in copies(one.weight, 0, 1, len(values)):
            part = one.weight.parts[copy.part]
            assert part.view.expert is not None
            _put(mine[part.name][part.view.expert - first], part, copy, values)
    experts = parallel_state.get_expert_model_parallel_group()
    device = group.placed[0].parameter.device
    stacks = {part.name: part.view.stack for part in group.parts}
    for name, held in mine.items():
        if experts.size() == 1:
            yield _stacked(held, stacks[name])
            continue
        sent = held.to(device)  # the backend of a GPU's groups takes no tensors of the host
        if experts.rank() != 0:
            dist.gather(sent, group=experts, group_dst=0)
            continue
        whole = sent.new_empty((experts.size() * num_here, *sent.shape[1:]))
        dist.gather(sent, list(whole.split(num_here)), group=experts, group_dst=0)
        yield _stacked(whole.cpu(), stacks[name])


def _stacked(matrices: Tensor, stack: Stack) -> Tensor:
    """Returns the matrices [experts, n, m] stacked as in the file."""
    if stack == "rows":
        return matrices.flatten(0, 1)
    return matrices.permute(1, 2, 0).flatten(1) if stack == "columns" else matrices


def _put(tensor: Tensor, part: Part, copy: Copy, piece: Tensor) -> None:
    """Copies a block of a rank's parameter to its place in the tensor of a part."""
    if part.view.is_transposed:
        tensor = tensor.t()
    num_rows = copy.rows.stop - copy.rows.start
    block = piece[copy.row : copy.row + num_rows].to(tensor)
    rows = part.view.rows(copy.rows)
    tensor[rows if tensor.dim() == 1 else (rows, copy.columns)] = block
