"""pure. Reads the headers of the safetensors files in a HuggingFace folder, and checks that their
tensors are those of a model.

Only headers are read, so that a wrong folder is refused before any memory is spent.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from megatron.packing.user_files import parse_json, read_json, shown
from megatron.sft.model.huggingface.config_file import read_config
from megatron.sft.model.huggingface.tensors import Tensors

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Type of weights in safetensors -> its name in torch and in config.json."""
MXFP4 = "MXFP4"
"""Type of a tensor that files have as two, `NAME_blocks` and `NAME_scales`: see `mxfp4`."""
_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}
"""Bytes per number of each type."""
_NO_WEIGHT = ".rotary_emb.inv_freq"
"""Suffix of tensors in old files that are not weights; they are ignored."""
_BLOCK = 1 << 24
_PIECE = 1 << 12
_LARGEST_HEADER = 100_000_000
_LONGEST_NAME = 256


class Stored(NamedTuple):
    """One tensor in a file."""

    path: Path
    name: str
    """Name in the file, which may lack the prefix `model.`."""
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    """Its bytes in the file: [begin, end)."""
    scales: tuple[Path, str] | None = None
    """File and name of the scales, for MXFP4."""


class Folder(NamedTuple):
    """The tensors of a HuggingFace folder, by their names in transformers."""

    path: Path
    tensors: dict[str, Stored]


def open_folder(folder: str | Path) -> Folder:
    """Reads the headers of all files. Raises ValueError, naming the file, if one is incomplete or
    cannot be read.
    """
    path = Path(folder)
    tensors = {}
    for file, names in _files(path).items():
        held = read_header(file)
        missing = [name for name in names if name not in held]
        if missing:
            raise ValueError(
                f"{file} lacks {_some(missing)}, which {INDEX} says it holds; download it again"
            )
        for name, entry in held.items():
            tensors[name] = Stored(
                file, name, entry["dtype"], tuple(entry["shape"]), *entry["data_offsets"]
            )
    if not any(name.startswith(("model.", "language_model.")) for name in tensors):
        # Saved from the model class without a head (LlamaModel): names lack the prefix "model.".
        tensors = {
            name if name.startswith("lm_head.") else f"model.{name}": found
            for name, found in tensors.items()
        }
    return Folder(
        path,
        {name: found for name, found in _joined(tensors).items() if not name.endswith(_NO_WEIGHT)},
    )


def open_source(folder: str | Path) -> Folder | None:
    """Opens the folder that a model came from. An export copies tensors from it that are not
    trained.

    A text-only model has none to copy, so that its weights may have been removed since; then it
    returns None. Those of a multimodal model must still be there.
    """
    path = Path(folder)
    is_multimodal = "text_config" in read_config(path)
    return open_folder(path) if is_multimodal or any(path.glob("*.safetensors")) else None


def _joined(tensors: dict[str, Stored]) -> dict[str, Stored]:
    """Returns the tensors with each pair of MXFP4 blocks and scales as one.

    Blocks of [experts, rows, groups, 16] bytes have two values per byte, 32 values per group. The
    matrices are stored transposed, so that their shape is [experts, 32 * groups, rows].
    """
    joined = dict(tensors)
    for name, blocks in tensors.items():
        whole = name.removesuffix("_blocks")
        scales = tensors.get(f"{whole}_scales")
        if whole == name or scales is None or blocks.dtype != "U8" or len(blocks.shape) != 4:
            continue
        experts, rows, groups, _ = blocks.shape
        shape, source = (experts, groups * 32, rows), (scales.path, scales.name)
        joined[whole] = blocks._replace(dtype=MXFP4, shape=shape, scales=source)
        del joined[name], joined[f"{whole}_scales"]
    return joined


def _files(folder: Path) -> dict[Path, list[str]]:
    """Returns each file with the names of its tensors by the index; a single file has no index, and
    no names here.
    """
    if (folder / INDEX).is_file():
        weight_map = _weight_map(folder / INDEX)
        files: dict[Path, list[str]] = {}
        for name, file in weight_map.items():
            files.setdefault(folder / file, []).append(name)
        missing = sorted(str(file) for file in files if not file.is_file())
        if missing or not files:
            raise ValueError(
                f"{folder / INDEX} names {_some(missing) or 'no file'}, which must be there; "
                "download again"
            )
        return files
    if (folder / SINGLE).is_file():
        return {folder / SINGLE: []}
    if any(folder.glob("pytorch_model*.bin")):
        raise ValueError(
            f"{folder} holds its weights as pickles (.bin), which can run any code; convert them: "
            "transformers' "
            "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(OTHER) writes safetensors"
        )
    raise ValueError(
        f"{folder} must hold {SINGLE} or {INDEX}, but has neither; download the weights too"
    )


def _weight_map(path: Path) -> dict[str, str]:
    try:
        weight_map = read_json(path, _LARGEST_HEADER)["weight_map"]
        if not all(
            Path(file).name == file and len(file) < _LONGEST_NAME for file in weight_map.values()
        ):
            raise ValueError("weight_map must name files of this folder")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} must hold a weight_map of tensors to files: {error}; download it again"
        ) from None
    return weight_map


def read_header(file: Path) -> dict[str, Any]:
    """Returns dtype, shape and data_offsets of each tensor in a safetensors file, by name. Offsets
    count from the first byte of the file. Raises ValueError if the file is damaged or cut off.

    A file is: 8 bytes with the size of the header, the header in JSON, the tensors without gaps.
    """
    with file.open("rb") as stream:
        length = stream.read(8)
        (size,) = struct.unpack("<Q", length) if len(length) == 8 else (0,)
        text = stream.read(min(size, _LARGEST_HEADER))
    try:
        header: Any = parse_json(text.decode()) if 0 < size == len(text) else None
        metadata = header.pop("__metadata__", None) or {}
        if not all(isinstance(text, str) for text in metadata.values()) or not all(
            _is_entry(**entry) for entry in header.values()
        ):
            raise TypeError
    except (ValueError, TypeError, AttributeError):
        raise ValueError(
            f"{file} must be a safetensors file, but has no header; download it again"
        ) from None
    end = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        # Sorted by offset, each tensor must begin where the last one ends, and have the bytes of
        # its shape. A file that was cut off or overwritten fails this.
        begin, until = entry["data_offsets"]
        of_type = _BYTES.get(entry["dtype"])
        if begin != end or (of_type and until - begin != of_type * math.prod(entry["shape"])):
            raise ValueError(
                f"{file} must hold one tensor after the other, each of the size that its shape "
                f"says, but {shown(name)} is not so; download it again"
            )
        end = until
    if file.stat().st_size != 8 + size + end:
        raise ValueError(
            f"{file} must have {8 + size + end} bytes, but has {file.stat().st_size}; download it "
            "again"
        )
    for entry in header.values():
        entry["data_offsets"] = [8 + size + offset for offset in entry["data_offsets"]]
    return header


def _is_entry(dtype: object, shape: list[Any], data_offsets: list[Any]) -> bool:
    begin, end = data_offsets
    return (
        isinstance(dtype, str)
        and type(begin) is type(end) is int
        and 0 <= begin <= end
        and all(type(size) is int and size >= 0 for size in shape)
    )


def check_folder(
    folder: Folder,
    weights: Tensors,
    config: str = "config.json",
    way_out: str = "download it again",
) -> None:
    """Raises ValueError, naming tensors, unless the files have exactly the tensors of the model, in
    their shapes and in types that can be read.

    Args:
        config: file that describes the model, for messages.
        way_out: advice for a folder that lacks tensors.
    """
    expected = {part.name: part.stored_shape for weight in weights.all() for part in weight.parts}
    carried = carried_tensors(folder, weights)
    tensors = {name: found for name, found in folder.tensors.items() if name not in carried}
    other_types = sorted(
        name for name, found in tensors.items() if found.dtype not in {*DTYPES, MXFP4}
    )
    if other_types:
        kinds = ", ".join(sorted({tensors[name].dtype for name in other_types}))
        raise ValueError(
            f"{folder.path} holds tensors of type {kinds} ({_some(other_types)}): it is quantized; "
            "give the folder of the model before quantization"
        )
    missing = sorted(expected.keys() - tensors.keys())
    if missing:
        raise ValueError(
            f"{folder.path} lacks {_some(missing)}, which its {config} asks for; {way_out}"
        )
    leftover = sorted(tensors.keys() - expected.keys() - set(weights.tied or ()))
    if leftover:
        raise ValueError(
            f"{folder.path} holds {_some(leftover)}, for which its {config} has no place; such a "
            "model is not supported"
        )
    for name, shape in expected.items():
        if tensors[name].shape != shape:
            raise ValueError(
                f"{folder.path} holds {name} of shape {list(tensors[name].shape)}, but its "
                f"{config} says {list(shape)}; one of the two is of another model"
            )
    if weights.tied is not None and not _are_equal(tensors, *weights.tied):
        raise ValueError(
            f"{folder.path} holds {weights.tied[0]} and {weights.tied[1]} that differ, but "
            "config.json of the model has tie_word_embeddings; set that to false there, as "
            "transformers takes it"
        )


def carried_tensors(folder: Folder, weights: Tensors) -> dict[str, Stored]:
    """Returns the tensors that are not part of the trained model; an export copies them."""
    return {name: found for name, found in folder.tensors.items() if weights.is_carried(name)}


def fingerprint(folder: Folder) -> str:
    """Returns a hash by which models of the same architecture differ: of each tensor's name, type,
    shape, and 4 kB from its middle.

    It does not depend on how the tensors are spread over files.
    """
    digest = hashlib.sha256()
    with ExitStack() as stack:
        files = {
            path: stack.enter_context(path.open("rb"))
            for path in {one.path for one in folder.tensors.values()}
        }
        for name, stored in sorted(folder.tensors.items()):
            file = files[stored.path]
            file.seek(max(stored.begin, (stored.begin + stored.end - _PIECE) // 2))
            digest.update(f"{name} {stored.dtype} {stored.shape} ".encode())
            digest.update(file.read(min(_PIECE, stored.end - stored.begin)))
    return digest.hexdigest()


def _are_equal(tensors: dict[str, Stored], optional: str, name: str) -> bool:
    """Returns whether two tensors have the same bytes; True if the first one is missing."""
    if optional not in tensors:
        return True
    one, other = tensors[optional], tensors[name]
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    with one.path.open("rb") as first, other.path.open("rb") as second:
        first.seek(one.begin)
        second.seek(other.begin)
        left = one.end - one.begin
        while left > 0:
            size = min(left, _BLOCK)
            if first.read(size) != second.read(size):
                return False
            left -= size
    return True


def _some(names: Sequence[str] | Iterable[str], most: int = 4) -> str:
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
