"""mcore. Write a model as a HuggingFace folder, from any parallel layout: whole, or not at all.

Tensor-parallel ranks gather one parameter at a time to their first rank; nothing travels between
pipeline stages, nor between ranks with different experts: each writes files of its own. A file's
header is known before its first tensor, so tensors are written as they come. Host memory: one
parameter beyond the model, twice where it is cut.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megatron.sft.distributed import gathered
from megatron.sft.model.huggingface.folder import DTYPES, INDEX, SINGLE
from megatron.sft.model.huggingface.read import Placed, placed_parameters, weights_bar
from megatron.sft.model.huggingface.tensors import Part, Tensors, copies

MAX_BYTES_PER_FILE = 5 * 10**9


class _File(NamedTuple):
    """One safetensors file to be written."""

    parts: tuple[Part, ...]
    num_bytes: int


def check_target(folder: Path) -> None:
    """Raise ValueError where the folder that is to be written is no empty one, or cannot be
    replaced.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists already; give another folder, or remove it")
    if folder.is_mount():
        raise ValueError(
            f"{folder} is where a disk is mounted, and cannot be replaced; give a folder in it"
        )


def target_of(folder: str | Path) -> Path:
    """Returns the folder that is written: links are followed, so that what they name is replaced
    and not they.
    """
    return Path(os.path.realpath(folder))


def unfinished_folder(target: Path) -> Path:
    """Returns where a folder is written until it is whole."""
    return target.with_name(target.name + ".unfinished")


def write_folder(
    folder: str | Path,
    chunks: Sequence[GPTModel],
    weights: Tensors,
    write_companions: Callable[[Path], str],
    most_bytes_per_file: int = MAX_BYTES_PER_FILE,
    values_of: Callable[[Placed], Tensor] = lambda placed: placed.parameter.detach(),
) -> None:
    """Write weights, and on rank 0 what `write_companions` adds: all other files, whose answer is
    the weights' dtype.

    Collective. The folder, which must not exist or be empty, takes its place only once it is whole.
    `values_of` tells what is written of a parameter.
    """
    with finished_folder(folder) as unfinished:
        dtype: list[str] = [write_companions(unfinished) if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(dtype)
        placed = written_parameters(chunks, weights)
        tensors = tensors_of(placed, getattr(torch, dtype[0]), values_of)
        _write_weights(unfinished, placed, tensors, getattr(torch, dtype[0]), most_bytes_per_file)


@contextmanager
def finished_folder(folder: str | Path) -> Iterator[Path]:
    """A new folder to write to, which takes the place of `folder` at the end; collective."""
    target = target_of(folder)
    unfinished = unfinished_folder(target)
    if dist.get_rank() == 0:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    dist.barrier()
    yield unfinished
    dist.barrier()
    if dist.get_rank() == 0:
        if target.is_dir():
            target.rmdir()
        os.replace(unfinished, target)
    dist.barrier()


def written_parameters(chunks: Sequence[GPTModel], weights: Tensors) -> list[Placed]:
    """Those of this rank that no lower one of the same tensors has."""
    placed = [p for chunk in chunks for p in placed_parameters(chunk, weights)]
    return [p for p in placed if p.is_first_replica and not p.is_repeated]


def written_parts(placed: Sequence[Placed]) -> list[Part]:
    """The tensors that `tensors_of` yields on this rank."""
    tensor_rank = parallel_state.get_tensor_model_parallel_rank()
    return [
        part for p in placed if p.weight.is_expert or tensor_rank == 0 for part in p.weight.parts
    ]


def _write_weights(
    folder: Path,
    placed: Sequence[Placed],
    tensors: Iterator[Tensor],
    dtype: torch.dtype,
    most_bytes: int,
) -> None:
    files = _cut_into_files(written_parts(placed), dtype, most_bytes)
    all_files = gathered(files)
    num_before, num_files = sum(map(len, all_files[: dist.get_rank()])), sum(map(len, all_files))
    names = [_file_name(number, num_files) for number in range(num_files)]
    for file, name in zip(files, names[num_before:]):
        _write_file(folder / name, file, dtype, tensors)
    for _ in tensors:  # ranks that only send
        raise AssertionError("a tensor is in no file")
    if dist.get_rank() == 0 and num_files > 1:
        in_order = [file for of_rank in all_files for file in of_rank]
        _write_index(folder, in_order, names)


def _cut_into_files(parts: Sequence[Part], dtype: torch.dtype, most_bytes: int) -> list[_File]:
    files: list[_File] = []
    for part in parts:
        size = _num_bytes(part, dtype)
        if not files or files[-1].num_bytes + size > most_bytes:
            files.append(_File((), 0))
        files[-1] = _File((*files[-1].parts, part), files[-1].num_bytes + size)
    return files


def _num_bytes(part: Part, dtype: torch.dtype) -> int:
    return torch.Size(part.shape).numel() * dtype.itemsize


def _file_name(number: int, num_files: int) -> str:
    return SINGLE if num_files == 1 else f"model-{number + 1:05d}-of-{num_files:05d}.safetensors"


def tensors_of(
    placed: Sequence[Placed], dtype: torch.dtype, values_of: Callable[[Placed], Tensor]
) -> Iterator[Tensor]:
    """The tensors that this rank writes, in order; collective over tensor parallel."""
    with weights_bar("writing", sum(one.parameter.numel() for one in placed)) as bar:
        for one in placed:
            yield from _whole(one, values_of(one), dtype)
            bar.update(one.parameter.numel())


def _whole(placed: Placed, mine: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
    """The HuggingFace tensors of a weight, on the rank that writes it; none on ranks that send
    their part to it.
    """
    weight = placed.weight
    group = parallel_state.get_tensor_model_parallel_group()
    if weight.is_expert or weight.layout == "whole" or group.size() == 1:
        if not written_parts([placed]):
            return
        pieces = [mine]
    else:
        pieces = [torch.empty_like(mine) for _ in range(group.size())] if group.rank() == 0 else []
        dist.gather(mine.contiguous(), pieces or None, group=group, group_dst=0)
        if not pieces:
            return
    tensors = [torch.empty(part.shape, dtype=dtype) for part in weight.parts]
    for rank, piece in enumerate(pieces):
        for copy in copies(weight, rank, len(pieces), len(mine)):
            target = tensors[copy.part][copy.rows]
            if target.dim() == 2:
                target = target[:, copy.columns]
            target.copy_(piece[copy.row : copy.row + len(target)])
    yield from tensors


def _write_file(path: Path, file: _File, dtype: torch.dtype, tensors: Iterator[Tensor]) -> None:
    header, _ = header_of(file.parts, dtype)
    with path.open("wb") as stream:
        stream.write(header)
        for _ in file.parts:
            stream.write(bytes_of(next(tensors)))


def header_of(parts: Sequence[Part], dtype: torch.dtype) -> tuple[bytes, list[int]]:
    """What a safetensors file of these tensors begins with, and where each of them begins, and the
    file ends.
    """
    name_of_dtype = next(
        name for name, known in DTYPES.items() if known == str(dtype).removeprefix("torch.")
    )
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    ends = [0]
    for part in parts:
        ends.append(ends[-1] + _num_bytes(part, dtype))
        header[part.name] = {
            "dtype": name_of_dtype,
            "shape": list(part.shape),
            "data_offsets": ends[-2:],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data begin at a multiple of 8
    begin = struct.pack("<Q", len(text)) + text
    return begin, [len(begin) + end for end in ends]


def bytes_of(tensor: Tensor) -> memoryview:
    """A tensor on the host as a safetensors file has it."""
    return tensor.view(torch.uint8).numpy().data


def _write_index(folder: Path, files: Sequence[_File], names: Sequence[str]) -> None:
    weight_map = {part.name: name for file, name in zip(files, names) for part in file.parts}
    index = {
        "metadata": {"total_size": sum(file.num_bytes for file in files)},
        "weight_map": dict(sorted(weight_map.items())),
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
