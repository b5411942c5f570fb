"""A rank's part of each weight and of its gradient, and full tensors from the parts of all
ranks."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.utils import unwrap_model
from torch import Tensor


@dataclass(frozen=True)
class Place:
    """Where a rank's parameter stands in the full tensor: `dim` None for all of it; `sections` for
    relative sizes of parts that are each cut on their own, as (1, 1) for gates and values.
    """

    dim: int | None
    index: int
    count: int
    sections: tuple[int, ...] = (1,)


@dataclass(frozen=True)
class Piece:
    """What a rank has of a parameter or its gradient: all of it, or the shard that its distributed
    optimizer steps.
    """

    place: Place
    shape: tuple[int, ...]
    """Of the parameter on this rank."""
    values: Tensor
    """Its elements from number `start` on, flat."""
    start: int
    sharers: tuple[int, ...]
    """Ranks whose pieces make up the parameter, this one included."""


def pieces_of(
    model: Sequence[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    tensor_of: Callable[[torch.nn.Parameter], Tensor],
) -> Iterator[tuple[str, Piece]]:
    """This rank's piece of `tensor_of` each of its parameters that are trained: of `gradient_of`,
    as the optimizer will take it; of `torch.detach`, as it has stepped it.
    """
    for chunk in model:
        for name, parameter, place in places_of([unwrap_model(chunk)]):
            if not parameter.requires_grad:
                continue
            start, end, sharers = _shard(parameter, chunk, optimizer)
            values = tensor_of(parameter).flatten()[start:end].detach().clone()
            yield name, Piece(place, tuple(parameter.shape), values, start, sharers)


def _shard(
    parameter: torch.nn.Parameter, chunk: DistributedDataParallel, optimizer: MegatronOptimizer
) -> tuple[int, int, tuple[int, ...]]:
    """The first element of a parameter that this rank's optimizer steps, the end of them, and the
    ranks that share it.

    The distributed optimizer leaves the gradient of the other elements unreduced, or reduced in
    part.
    """
    if not chunk.ddp_config.use_distributed_optimizer:
        return 0, parameter.numel(), (dist.get_rank(),)
    (buffer,) = (
        b for b in chunk.buffers + chunk.expert_parallel_buffers if parameter in b.param_index_map
    )
    sharers = tuple(dist.get_process_group_ranks(buffer.data_parallel_group))
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if parameter in part.model_param_gbuf_map:
            elements = part._get_model_param_range_map(parameter)["param"]
            return elements.start, elements.end, sharers
    return 0, 0, sharers


def gradient_of(parameter: torch.nn.Parameter) -> Tensor:
    """Zeros where nothing has depended on the parameter."""
    gradient = getattr(parameter, "main_grad", None)
    if gradient is None:
        gradient = parameter.grad
    return torch.zeros_like(parameter) if gradient is None else gradient


def places_of(chunks: Sequence[Any]) -> Iterator[tuple[str, Any, Place]]:
    """Each parameter of this rank with its global name and its place in the full tensor."""
    for chunk in chunks:
        layers = chunk.decoder.layers
        for local_name, parameter in chunk.named_parameters():
            name = local_name
            if match := re.match(r"decoder\.layers\.(\d+)(.*)", name):
                name = f"decoder.layers.{layers[int(match[1])].layer_number - 1}{match[2]}"
            if match := re.match(r"(.*local_experts)\.(\d+)(.*)", name):
                name = f"{match[1]}.{_first_expert(chunk) + int(match[2])}{match[3]}"
            if name == "output_layer.weight" and chunk.share_embeddings_and_output_weights:
                name = "embedding.word_embeddings.weight"
            is_cut = (
                getattr(parameter, "tensor_model_parallel", False) and "local_experts" not in name
            )
            count = parallel_state.get_tensor_model_parallel_world_size() if is_cut else 1
            sections = _sections(chunk, local_name, name) if is_cut else (1,)
            dim = parameter.partition_dim if is_cut else None
            index = parallel_state.get_tensor_model_parallel_rank() if is_cut else 0
            yield name, parameter, Place(dim, index, count, sections)


def _sections(chunk: Any, local_name: str, name: str) -> tuple[int, ...]:
    """Of the parameter's rows: gates and values, or what a gated delta net projects to."""
    if "linear_fc1.adapter" in name:  # beside gates, values, or both
        return (1,) * chunk.get_submodule(local_name.rsplit(".", 1)[0]).num_modules
    if chunk.config.gated_linear_unit and "linear_fc1" in name:
        return (1, 1)
    if re.search(r"self_attention\.(in_proj|conv1d)\.", name):
        net = chunk.get_submodule(re.split(r"\.(?:in_proj|conv1d)\.", local_name)[0])
        sizes = tuple(net.sections.values())
        return sizes if "in_proj" in name else sizes[:3]
    return (1,)


def _first_expert(chunk: Any) -> int:
    size, rank = (
        parallel_state.get_expert_model_parallel_world_size(),
        parallel_state.get_expert_model_parallel_rank(),
    )
    return rank * ((chunk.config.num_moe_experts or 0) // size)


def cut(whole: Tensor, place: Place) -> Tensor:
    """What of the full tensor stands at `place`."""
    if place.dim is None:
        return whole
    parts = _split(whole, place)
    return torch.cat([part.chunk(place.count, place.dim)[place.index] for part in parts], place.dim)


def _split(tensor: Tensor, place: Place) -> tuple[Tensor, ...]:
    assert place.dim is not None
    unit = tensor.shape[place.dim] // sum(place.sections)
    return tensor.split([unit * size for size in place.sections], place.dim)


def _join(parts: dict[Place, Tensor]) -> Tensor:
    first = next(iter(parts))
    in_order = [parts[replace(first, index=index)] for index in range(first.count)]
    if first.dim is None:
        return in_order[0]
    by_rank = [_split(tensor, first) for tensor in in_order]
    return torch.cat([part for section in zip(*by_rank) for part in section], first.dim)


def whole_of(name: str, pieces: Sequence[Piece]) -> tuple[Tensor, Tensor]:
    """The full tensor of `name`, and how far replicas of each element are from it. Shards must hold
    each element exactly once.
    """
    replicas: dict[tuple[Place, tuple[int, ...]], list[Piece]] = {}
    for piece in pieces:
        replicas.setdefault((piece.place, piece.sharers), []).append(piece)
    found: dict[Place, Tensor] = {}
    apart: dict[Place, Tensor] = {}
    for (place, _), shards in replicas.items():
        tensor = _of_shards(name, shards)
        distance = (found.setdefault(place, tensor) - tensor).abs()
        apart[place] = torch.maximum(apart.get(place, distance), distance)
    return _join(found), _join(apart)


def _of_shards(name: str, shards: Sequence[Piece]) -> Tensor:
    """One replica from its shards."""
    in_order = sorted(
        (shard for shard in shards if shard.values.numel()), key=lambda shard: shard.start
    )
    end = 0
    for shard in in_order:
        assert shard.start == end, (
            f"the shards of {name} hold element {min(shard.start, end)} not once"
        )
        end += shard.values.numel()
    (shape,) = {shard.shape for shard in shards}
    assert end == math.prod(shape), (
        f"the shards of {name} end after {end} elements of {math.prod(shape)}"
    )
    return torch.cat([shard.values for shard in in_order]).view(shape)
