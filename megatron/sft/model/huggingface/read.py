"""mcore. Fills a model with the weights of a HuggingFace folder. Each rank reads only its part.

Data-parallel ranks have the same part: only the first of them reads, and the others receive it when
megatron-core broadcasts the initial weights. Host memory: the model, and one block of one tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import Tensor
from tqdm import tqdm

from megatron.sft.model.huggingface.folder import Folder
from megatron.sft.model.huggingface.quantized.slices import DequantizedSlice, OpenFiles
from megatron.sft.model.huggingface.tensors import Copy, Part, Tensors, Weight, copies
from megatron.sft.model.huggingface.weights import Weights


class PretrainedAdapter(NamedTuple):
    """The folder of a PEFT adapter, checked by `check_folder`, and the table of its weights."""

    folder: Folder
    weights: Tensors


class Pretrained(NamedTuple):
    """A HuggingFace folder, checked by `check_folder`, and the table of its weights."""

    folder: Folder
    weights: Weights
    adapter: PretrainedAdapter | None = None
    """Adapter that --lora-adapter starts from."""


class MegatronCheckpoint(NamedTuple):
    """A checkpoint in megatron-core's format to start training from (see `checkpoints.weights`)."""

    path: Path


class Placed(NamedTuple):
    """A parameter of this rank, and its place in the weight of the whole model."""

    name: str
    """Name in the chunk's `named_parameters`."""
    parameter: Tensor
    """A parameter, or a buffer that is in the table of weights."""
    weight: Weight
    copies: tuple[Copy, ...]
    """Blocks of the HuggingFace tensors that this rank has, and their rows in the parameter."""
    is_repeated: bool
    """True for the last stage's copy of tied embeddings."""
    is_first_replica: bool
    """True if this is the first of the data-parallel ranks with this part."""


def placed_parameters(gpt: GPTModel, weights: Tensors) -> Iterator[Placed]:
    """Yields the parameters of a chunk that are in the table `weights`. Raises RuntimeError for one
    that should be, and has no row.
    """
    tensor_parallel = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
    for local_name, parameter in _parameters_and_buffers(gpt, weights):
        if not weights.concerns(local_name):
            continue
        name = global_name(local_name, gpt)
        is_repeated = name == "output_layer.weight" and gpt.share_embeddings_and_output_weights
        try:
            weight = weights.of_parameter(
                "embedding.word_embeddings.weight" if is_repeated else name
            )
        except KeyError:
            raise RuntimeError(
                f"{name} has no place in a HuggingFace model of its family"
            ) from None
        # Experts are spread over ranks whole, and never split by tensor parallel.
        rank, size = (0, 1) if weight.is_expert else tensor_parallel
        if not isinstance(parameter, torch.nn.Parameter) or getattr(parameter, "allreduce", True):
            replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        else:
            replica = parallel_state.get_expert_data_parallel_rank()
        held = tuple(copies(weight, rank, size, len(parameter)))
        yield Placed(local_name, parameter, weight, held, is_repeated, replica == 0)


def _parameters_and_buffers(gpt: GPTModel, weights: Tensors) -> Iterator[tuple[str, Tensor]]:
    """Yields parameters and the buffers that HuggingFace has as tensors (a router's bias). The
    order is that of modules, so that those of a layer come together.
    """
    seen: set[int] = set()
    for prefix, module in gpt.named_modules():
        for name, parameter in module.named_parameters(prefix, recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield name, parameter
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if _has_place(name, gpt, weights):
                yield name, buffer


def _has_place(name: str, gpt: GPTModel, weights: Tensors) -> bool:
    try:
        weights.of_parameter(global_name(name, gpt))
    except KeyError:
        return False
    return True


def global_name(name: str, gpt: GPTModel) -> str:
    """Returns the name of a parameter or module with layers and experts numbered over the whole
    model.

    On the second of two pipeline stages of a model of 32 layers: `decoder.layers.0.mlp ->
    decoder.layers.16.mlp`.
    """
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"]:
        parts[2] = str(gpt.decoder.layers[int(parts[2])].layer_number - 1)
    if "experts" in parts:
        at = parts.index("experts") + 1
        size = (
            gpt.config.num_moe_experts or 0
        ) // parallel_state.get_expert_model_parallel_world_size()
        first = parallel_state.get_expert_model_parallel_rank() * size
        # Expert-parallel rank 1 of 2, with 8 experts, has experts 4 to 7: its local 0 is 4.
        if parts[at] == "local_experts":
            parts[at + 1] = str(first + int(parts[at + 1]))
        else:  # Transformer Engine's grouped experts: linear_fc1.weight3
            parts[-1] = f"weight{first + int(parts[-1].removeprefix('weight'))}"
    return ".".join(parts)


def weights_bar(what: str, num_weights: int) -> tqdm[Any]:
    """Returns a progress bar on stderr for rank 0's part of the weights. It appears only after
    three seconds.
    """
    is_shown = dist.get_rank() == 0
    return tqdm(
        total=num_weights,
        desc=what,
        unit=" weights",
        unit_scale=True,
        delay=3.0,
        disable=not is_shown,
    )


def read_weights(chunks: Sequence[GPTModel], weights: Tensors, folder: Folder) -> None:
    """Fills this rank's chunks. Data-parallel ranks other than the first leave their parameters to
    the broadcast, which the caller must run afterwards.

    `folder` must have passed `check_folder`. Padding rows of the vocabulary become zero.
    """
    all_placed = [placed for chunk in chunks for placed in placed_parameters(chunk, weights)]
    todo = [
        (placed, copy)
        for placed in all_placed
        # Every rank reads buffers, as the broadcast over data parallel skips them.
        if placed.is_first_replica or not isinstance(placed.parameter, torch.nn.Parameter)
        for copy in placed.copies
    ]
    files = OpenFiles()
    total = sum(placed.parameter.numel() // len(placed.copies) for placed, _ in todo)
    with torch.no_grad(), weights_bar(f"reading {folder.path}", total) as bar:
        for placed in all_placed:
            if placed.weight.sharding == "vocabulary":
                placed.parameter.zero_()
        for placed, copy in todo:
            part = placed.weight.parts[copy.part]
            held = files.slice_of(folder.tensors[part.name], placed.parameter.dtype)
            num_rows = copy.rows.stop - copy.rows.start
            _fill(placed.parameter[copy.row : copy.row + num_rows], held, part, copy)
            bar.update(placed.parameter.numel() // len(placed.copies))


def _fill(target: Tensor, held: Any, part: Part, copy: Copy) -> None:
    """Reads the block `copy` of a tensor in a safetensors file into rows of a parameter. Only its
    rows are read if they are adjacent in the tensor, otherwise the whole matrix.
    """
    view = part.view
    if view.expert is not None or view.run or view.is_transposed:
        matrix = held[:] if view.expert is None else _of_expert(held, part)
        target.copy_(block_of(matrix, part, copy))
        return
    rows = view.rows(copy.rows)
    if isinstance(held, DequantizedSlice) and target.device.type == "cpu":
        assert isinstance(rows, slice)
        held.fill(target, rows, copy.columns)  # without a copy between
    else:
        target.copy_(held[rows] if len(part.shape) == 1 else held[rows, copy.columns])


def _of_expert(held: Any, part: Part) -> Tensor:
    """Returns the matrix of a part's expert from a stack."""
    number, stack = part.view.expert, part.view.stack
    assert number is not None
    if stack == "matrices":
        found: Tensor = held[number : number + 1][0]
    elif stack == "rows":
        num_rows = part.matrix_shape[0]
        found = held[number * num_rows : (number + 1) * num_rows]
    else:
        found = held[:][:, number :: part.stored[1] // part.shape[1]]
    return found


def block_of(matrix: Tensor, part: Part, copy: Copy) -> Tensor:
    """Returns the rows that `copy` names of the matrix that a part is in; a view where they stand
    together.
    """
    if part.view.is_transposed:
        matrix = matrix.t()
    rows = matrix[part.view.rows(copy.rows)]
    return rows if rows.dim() == 1 else rows[:, copy.columns]
