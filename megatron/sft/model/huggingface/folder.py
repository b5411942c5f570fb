"""pure. Reads the headers of the safetensors files in a HuggingFace folder, and checks that their
tensors are those of a model.

Only headers are read, so that a wrong folder is refused before any memory is spent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from megatron.sft.model.huggingface.config_file import read_config
from megatron.sft.model.huggingface.families.registry import is_multimodal
from megatron.sft.model.huggingface.files import (
    INDEX,
    SINGLE,
    WeightFiles,
    indexed_files,
    some,
    weight_files,
)
from megatron.sft.model.huggingface.headers import Stored, read_header
from megatron.sft.model.huggingface.names import (
    is_no_weight,
    is_of_language_model,
    naming,
    wrapper_message,
)
from megatron.sft.model.huggingface.quantized.methods import Method, read_method
from megatron.sft.model.huggingface.quantized.pairs import FP8, join_pairs
from megatron.sft.model.huggingface.tensors import Tensors

DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Type of weights in safetensors -> its name in torch and in config.json."""
_BLOCK = 1 << 24
_PIECE = 1 << 12
_INCOMPLETE = "give the folder that its config.json belongs to, with all of its weights"


class Folder(NamedTuple):
    """The tensors of a HuggingFace folder, by their names in released files (see `names`)."""

    path: Path
    tensors: dict[str, Stored]
    method: Method | None = None
    """Quantization by its config.json."""


def open_folder(folder: str | Path) -> Folder:
    """Reads the headers of the files that transformers reads. Raises ValueError, naming the file,
    if one is incomplete or cannot be read, and if it is not clear which weights are meant.
    """
    path = Path(folder)
    config = read_config(path) if (path / "config.json").is_file() else {}
    files = weight_files(path, config)
    tensors = _open_files(files)
    if is_multimodal(config):
        _check_index(path, files.indexed - tensors.keys())
    if (path / SINGLE).is_file() and config.get("transformers_weights") is None:
        _refuse_other_weights(path, tensors)
    weights = {name: s for name, s in tensors.items() if not is_no_weight(name)}
    try:
        method = read_method(config, str(path / "config.json"))
    except ValueError:
        method = None  # config.json is refused where options are read from it
    joined = join_pairs(weights, method)
    return Folder(path, _renamed(path, joined, config), method)


def _open_files(files: WeightFiles) -> dict[str, Stored]:
    """Returns all tensors of the files, by their names there. transformers reads each file whole,
    so that a tensor may be in another one than the index says.
    """
    return {
        name: Stored(file, name, entry["dtype"], tuple(entry["shape"]), *entry["data_offsets"])
        for file in files.paths
        for name, entry in read_header(file).items()
    }


def _check_index(folder: Path, missing: Iterable[str]) -> None:
    """Raises ValueError if no file of a multimodal model has a tensor that the index names. Those
    of its language model are checked later, an export would lack those beside it.
    """
    lost = sorted(name for name in missing if not is_of_language_model(name))
    if lost:
        raise ValueError(
            f"{folder / INDEX} names {some(lost)}, which none of its files holds; copy index and "
            "files from one and the same save"
        )


def _refuse_other_weights(folder: Path, tensors: Mapping[str, Stored]) -> None:
    """Raises ValueError if shards with other weights are beside a single file. transformers'
    save_pretrained removes neither, and reads the single file, also if it is the older one; servers
    read the shards.
    """
    if not (folder / INDEX).is_file():
        return
    try:
        shards = _open_files(indexed_files(folder / INDEX))
    except ValueError:
        return  # an index whose shards are gone: nobody can mean them
    if fingerprint(Folder(folder, dict(tensors))) != fingerprint(Folder(folder, shards)):
        raise ValueError(
            f"{folder} holds two models: {SINGLE}, which transformers reads, and the files of "
            f"{INDEX}, which hold other weights; move the one that is not meant elsewhere"
        )


def _renamed(
    folder: Path, tensors: Mapping[str, Stored], config: Mapping[str, Any]
) -> dict[str, Stored]:
    """Returns the tensors by their names in released files. Raises ValueError if two of them are
    one by these names and differ.
    """
    rename, _, tied = naming(config, tensors)
    renamed: dict[str, Stored] = {}
    for name, stored in tensors.items():
        other = renamed.setdefault(rename(name), stored)
        if other is not stored and not _have_equal_bytes(stored, other):
            raise ValueError(
                f"{folder} holds {other.name} and {name}, two names of one tensor, with different "
                "values; remove one of the two"
            )
    if tied is not None and tied[0] in renamed and tied[1] not in renamed:
        # transformers ties the embedding to the head where only that one is there.
        renamed[tied[1]] = renamed.pop(tied[0])
    return renamed


def open_source(folder: str | Path) -> Folder | None:
    """Opens the folder that a model came from. An export copies tensors from it that are not
    trained.

    A text-only model has none to copy, so that its weights may have been removed since; then it
    returns None. Those of a multimodal model must still be there.
    """
    path = Path(folder)
    has_others = is_multimodal(read_config(path))
    return open_folder(path) if has_others or any(path.glob("*.safetensors")) else None


def check_folder(
    folder: Folder,
    weights: Tensors,
    config: str = "config.json",
    way_out: str = _INCOMPLETE,
) -> None:
    """Raises ValueError, naming tensors, unless the files have exactly the tensors of the model, in
    their shapes and in types that can be read.

    Args:
        config: file that describes the model, for messages.
        way_out: advice for a folder that lacks tensors.
    """
    expected = {part.name: part.stored_shape for weight in weights.all() for part in weight.parts}
    carried = carried_tensors(folder, weights).keys() - expected.keys()
    tensors = {name: found for name, found in folder.tensors.items() if name not in carried}
    _refuse_types(folder, tensors)
    missing = sorted(expected.keys() - tensors.keys())
    if missing:
        others = sorted(tensors.keys() - expected.keys() - set(weights.tied or ()))
        raise ValueError(_incomplete(folder, others, missing, config, way_out))
    leftover = sorted(tensors.keys() - expected.keys() - set(weights.tied or ()))
    if leftover:
        raise ValueError(
            f"{folder.path} holds {some(leftover)}, for which its {config} has no place; such a "
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


def _refuse_types(folder: Folder, tensors: Mapping[str, Stored]) -> None:
    """Raises ValueError for tensors whose type is not read, and where config.json and the files do
    not agree on quantization.
    """
    others = sorted(
        name for name, s in tensors.items() if s.dtype not in DTYPES and s.quantized is None
    )
    if others:
        kinds = ", ".join(sorted({tensors[name].dtype for name in others}))
        content = f"{folder.path} holds tensors of type {kinds} ({some(others)})"
        if kinds == FP8 and folder.method is None:
            raise ValueError(
                f"{content}, but its config.json has no quantization_config; copy it again from "
                "where the weights came"
            )
        if kinds == FP8:
            raise ValueError(
                f"{content} without their scales (weight_scale_inv or weight_scale); copy all of "
                "the release's files"
            )
        raise ValueError(
            f"{content}: it is quantized; give the folder of the model before quantization"
        )
    is_quantized = any(stored.quantized for stored in folder.tensors.values())
    # gpt-oss in other types is read, as transformers reads it on a CPU.
    if folder.method is not None and folder.method.name != "mxfp4" and not is_quantized:
        raise ValueError(
            f"{folder.path / 'config.json'} has a quantization_config of {folder.method.name}, but "
            "no tensor is quantized; remove it there"
        )


def _incomplete(
    folder: Folder, others: Sequence[str], missing: Sequence[str], config: str, way_out: str
) -> str:
    """Returns the message about missing tensors.

    others: tensors of the folder that the model does not have. They may be the missing ones, under
    names that a wrapper gave them.
    """
    wrapper = wrapper_message(others, missing)
    if wrapper:
        return f"{folder.path} {wrapper}"
    if all(name.endswith("lm_head.weight") for name in missing):
        way_out = (
            "give the folder of a model with its head, or, if the embeddings are the head, set "
            "tie_word_embeddings to true there, beside text_config if there is one"
        )
    instead = f", and holds {some(others, 1)} instead" if others else ""
    return f"{folder.path} lacks {some(missing)}, which its {config} asks for{instead}; {way_out}"


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
    return _have_equal_bytes(tensors[optional], tensors[name])


def _have_equal_bytes(one: Stored, other: Stored) -> bool:
    """Returns whether two tensors are of one type and shape, and have the same bytes; also of their
    scales.
    """
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    if one.quantized is not None and other.quantized is not None:
        scales = one.quantized.scales, other.quantized.scales
        if one.quantized.block != other.quantized.block or not _have_equal_bytes(*scales):
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
