"""mcore. Writes a model as a HuggingFace folder, from any parallel layout: whole, or not at all.

Tensors are gathered to some of the ranks (see `gather`), which write files of their own. The header
of a file follows from names and shapes alone. So it is written first, and each tensor is written
and freed as it comes.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megatron.sft.agreement import gathered
from megatron.sft.model.huggingface.folder import (
    DTYPES,
    INDEX,
    SINGLE,
    Folder,
    carried_tensors,
)
from megatron.sft.model.huggingface.gather import Dtypes, ValuesOf, tensors_of, written_parts
from megatron.sft.model.huggingface.headers import Stored
from megatron.sft.model.huggingface.quantized.slices import OpenFiles
from megatron.sft.model.huggingface.read import Placed, placed_parameters
from megatron.sft.model.huggingface.tensors import Part, Tensors
from megatron.sft.peers import wait_for_all

MAX_BYTES_PER_FILE = 5 * 10**9
_BLOCK = 1 << 24
_NAMES = {getattr(torch, known): name for name, known in DTYPES.items()}


class _File(NamedTuple):
    """One safetensors file to be written."""

    parts: tuple[Part, ...]
    num_bytes: int


def check_target(folder: Path) -> None:
    """Raises ValueError if a folder to be written is not empty, or cannot be replaced."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists already; give another folder, or remove it")
    if folder.is_mount():
        raise ValueError(
            f"{folder} is where a disk is mounted, and cannot be replaced; give a folder in it"
        )


def target_of(folder: str | Path) -> Path:
    """Returns the folder to write, with symbolic links resolved: their target is replaced, and the
    links stay.
    """
    return Path(os.path.realpath(folder))


def unfinished_folder(target: Path) -> Path:
    """Returns the folder that `target` is written to until it is complete."""
    return target.with_name(target.name + ".unfinished")


def write_folder(
    folder: str | Path,
    chunks: Sequence[GPTModel],
    weights: Tensors,
    write_companions: Callable[[Path], str],
    most_bytes_per_file: int = MAX_BYTES_PER_FILE,
    values_of: ValuesOf = lambda placed: placed.parameter.detach(),
    source: Folder | None = None,
) -> None:
    """Writes the weights of a model, and on rank 0 all other files. Collective.

    Args:
        folder: must be missing or empty. It appears only once it is complete.
        write_companions: function that writes the other files, and returns the type of the weights.
        values_of: function from a parameter to the values to write.
        source: folder that training started from. Its tensors outside the model are copied.
    """
    with finished_folder(folder) as unfinished:
        dtype: list[str] = [write_companions(unfinished) if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(dtype)
        dtypes = _dtypes(getattr(torch, dtype[0]), source)
        own = written_parameters(chunks, weights)
        tensors = tensors_of(own, dtypes, values_of)
        carried = {} if source is None else carried_tensors(source, weights)
        files = _cut_into_files(written_parts(own), dtypes, most_bytes_per_file)
        _write_weights(unfinished, files, tensors, dtypes, carried)


@contextmanager
def finished_folder(folder: str | Path) -> Iterator[Path]:
    """Yields a new folder to write to, which replaces `folder` at the end; collective. It is named
    by an OSError of a write.
    """
    target = target_of(folder)
    unfinished = unfinished_folder(target)
    if dist.get_rank() == 0:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    wait_for_all()
    try:
        yield unfinished
    except OSError as error:
        if error.filename is None:  # that of a write, which a full disk fails
            error.filename = str(unfinished)
        if dist.get_world_size() == 1:  # else other ranks may be writing into it
            shutil.rmtree(unfinished, ignore_errors=True)
        raise
    wait_for_all()
    if dist.get_rank() == 0:
        if target.is_dir():
            target.rmdir()
        os.replace(unfinished, target)
    wait_for_all()


def written_parameters(chunks: Sequence[GPTModel], weights: Tensors) -> list[Placed]:
    """Returns the parameters that this rank writes: not those that a lower data-parallel rank has,
    not the second copy of tied embeddings, and none whose tensors are copied (a frozen tower's).
    """
    placed = [p for chunk in chunks for p in placed_parameters(chunk, weights)]
    return [
        p
        for p in placed
        if p.is_first_replica
        and not p.is_repeated
        and not weights.is_carried(p.weight.parts[0].name)
    ]


def _dtypes(default: torch.dtype, source: Folder | None) -> Dtypes:
    """Returns the types to write. Single float32 tensors in a folder of narrower ones keep their
    type (a router's bias).
    """
    if source is None or default == torch.float32:
        return Dtypes(default)
    wide = [name for name, found in source.tensors.items() if found.dtype == "F32"]
    if len(wide) * 2 > len(source.tensors):
        return Dtypes(default)
    return Dtypes(default, dict.fromkeys(wide, torch.float32))


def _write_weights(
    folder: Path,
    files: Sequence[_File],
    tensors: Iterator[Tensor],
    dtypes: Dtypes,
    carried: Mapping[str, Stored],
) -> None:
    """Writes this rank's files. Rank 0 also writes one with the tensors `carried`, and the index.

    Rank 0 with 2 files and rank 1 with 3 number them 1, 2 and 3, 4, 5, and a file of carried
    tensors is 6.
    """
    # Ranks number their files one after the other, so that each needs the numbers of all.
    all_files = gathered(files)
    num_before = sum(map(len, all_files[: dist.get_rank()]))
    num_files = sum(map(len, all_files)) + bool(carried)
    names = [_file_name(number, num_files) for number in range(num_files)]
    for file, name in zip(files, names[num_before:]):
        _write_file(folder / name, file, dtypes, tensors)
    # Run the generator to its end: ranks that only send their part do so in here.
    for _ in tensors:
        raise AssertionError("a tensor is in no file")
    if dist.get_rank() != 0:
        return
    in_order = [file for of_rank in all_files for file in of_rank]
    if carried:
        in_order.append(_write_carried(folder / names[-1], carried, dtypes.default))
    if num_files > 1:
        _write_index(folder, in_order, names)


def _write_carried(path: Path, carried: Mapping[str, Stored], dtype: torch.dtype) -> _File:
    """Copies tensors byte by byte from the folder that training started from into one file.

    dtype: type to write quantized tensors in, as the values that they stand for. The written
        config.json does not say that they are quantized.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, stored in carried.items():
        num_bytes = stored.end - stored.begin
        if stored.quantized is not None:
            num_bytes = torch.Size(stored.shape).numel() * dtype.itemsize
        begin, end = end, end + num_bytes
        header[name] = {
            "dtype": stored.dtype if stored.quantized is None else _NAMES[dtype],
            "shape": list(stored.shape),
            "data_offsets": [begin, end],
        }
    files = OpenFiles()
    with path.open("wb") as stream:
        stream.write(_header_bytes(header))
        for stored in carried.values():
            if stored.quantized is None:
                _copy_bytes(stored, stream)
            else:
                values = files.slice_of(stored, dtype)[:].to(dtype)
                stream.write(bytes_of(values.contiguous()))
    return _File(tuple(Part(name, stored.shape) for name, stored in carried.items()), end)


def _copy_bytes(stored: Stored, stream: BinaryIO) -> None:
    with stored.path.open("rb") as origin:
        origin.seek(stored.begin)
        left = stored.end - stored.begin
        while left:
            block = origin.read(min(left, _BLOCK))
            if not block:
                raise ValueError(f"{stored.path} became shorter while it was read")
            stream.write(block)
            left -= len(block)


def _cut_into_files(parts: Sequence[Part], dtypes: Dtypes, most_bytes: int) -> list[_File]:
    """Returns files of at most `most_bytes`. A larger tensor has a file of its own."""
    files: list[_File] = []
    for part in parts:
        size = _num_bytes(part, dtypes)
        if not files or files[-1].num_bytes + size > most_bytes:
            files.append(_File((), 0))
        files[-1] = _File((*files[-1].parts, part), files[-1].num_bytes + size)
    return files


def _num_bytes(part: Part, dtypes: Dtypes) -> int:
    return torch.Size(part.stored_shape).numel() * dtypes.of(part.name).itemsize


def _file_name(number: int, num_files: int) -> str:
    return SINGLE if num_files == 1 else f"model-{number + 1:05d}-of-{num_files:05d}.safetensors"


def _write_file(path: Path, file: _File, dtypes: Dtypes, tensors: Iterator[Tensor]) -> None:
    header, _ = header_of(file.parts, dtypes)
    with path.open("wb") as stream:
        stream.write(header)
        for _ in file.parts:
            stream.write(bytes_of(next(tensors)))


def header_of(parts: Sequence[Part], dtypes: Dtypes) -> tuple[bytes, list[int]]:
    """Returns the header of a safetensors file, and the offset of each tensor in the file, followed
    by the size of the file.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    ends = [0]
    for part in parts:
        ends.append(ends[-1] + _num_bytes(part, dtypes))
        header[part.name] = {
            "dtype": _NAMES[dtypes.of(part.name)],
            "shape": list(part.stored_shape),
            "data_offsets": ends[-2:],
        }
    begin = _header_bytes(header)
    return begin, [len(begin) + end for end in ends]


def _header_bytes(header: Mapping[str, object]) -> bytes:
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data begin at a multiple of 8 bytes
    return struct.pack("<Q", len(text)) + text


def bytes_of(tensor: Tensor) -> memoryview:
    """Returns the bytes of a tensor on the host, as in a safetensors file."""
    return tensor.view(torch.uint8).numpy().data


def _write_index(folder: Path, files: Sequence[_File], names: Sequence[str]) -> None:
    weight_map = {part.name: name for file, name in zip(files, names) for part in file.parts}
    index = {
        "metadata": {"total_size": sum(file.num_bytes for file in files)},
        "weight_map": dict(sorted(weight_map.items())),
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
