"""pure. Chooses the files of a HuggingFace folder that hold its weights, in transformers' order of
precedence, and names what a folder without such files is.

    file named by `transformers_weights` of config.json
    model.safetensors               an index beside it may be of older shards: it is not read
    model.safetensors.index.json    all tensors of all files that it names
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megatron.packing.folder_gate import is_below
from megatron.packing.quoting import shown
from megatron.packing.user_files import read_json
from megatron.sft.model.huggingface.headers import MAX_HEADER_BYTES

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
"""File that makes a folder one of a PEFT adapter. Beside weights transformers adds the adapter."""
_MAX_NAME = 256
_SAVE_AGAIN = (
    "load it with transformers' AutoModelForCausalLM.from_pretrained and write it with "
    "save_pretrained(OTHER)"
)
_OTHER_FILES: tuple[tuple[str, str, str], ...] = (
    (
        "pytorch_model*.bin",
        "holds its weights as pickles (.bin), which can run any code",
        "convert them: transformers' "
        "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(OTHER) writes safetensors",
    ),
    (
        "model-*-of-*.safetensors",
        f"holds files of weights, but not their {INDEX}",
        "copy it from where they came",
    ),
    (
        "consolidated*.safetensors",
        "holds weights in Mistral's own format (consolidated), which transformers does not read",
        "add model.safetensors, or the model-*.safetensors and their index, of the same model",
    ),
    (
        "model.*.safetensors",
        "holds a variant of the weights, which transformers reads only under its name",
        f"make a link {SINGLE} to the one that is meant",
    ),
    ("*.gguf", "holds its weights as GGUF", f"{_SAVE_AGAIN} (gguf_file=NAME)"),
    (
        "zero_to_fp32.py",
        "is a checkpoint of DeepSpeed",
        "its zero_to_fp32.py writes the weights (--safe_serialization)",
    ),
    (
        "pytorch_model_fsdp_0",
        "is a checkpoint of FSDP",
        "accelerate merge-weights writes the weights",
    ),
)
"""Pattern of other files -> what such a folder is, and the way out."""


class WeightFiles(NamedTuple):
    """The files that hold the weights of a folder."""

    paths: tuple[Path, ...]
    """In order of their names: of a tensor that is in two of them the last one counts."""
    indexed: frozenset[str] = frozenset()
    """Names of tensors by the index; empty without one."""


def weight_files(folder: Path, config: Mapping[str, Any]) -> WeightFiles:
    """Returns the files that transformers reads. Raises ValueError, with the way out, if there are
    none or some of them are missing.

    config: content of config.json, which may name the file.
    """
    for path in folder.glob("shard-*-model-*-of-*.safetensors"):
        raise ValueError(
            f"{folder} holds a distributed save of transformers ({path.name}), which is read "
            f"instead of other files there; {_SAVE_AGAIN}"
        )
    named = config.get("transformers_weights")
    if named is not None:
        if not isinstance(named, str) or Path(named).name != named or ".safetensors" not in named:
            raise ValueError(
                f"{folder / 'config.json'} has transformers_weights {shown(named)}, but it must "
                "be a safetensors file of this folder, or its index; correct it"
            )
        return indexed_files(folder / named) if named.endswith(".json") else _single(folder / named)
    if (folder / SINGLE).is_file():
        return _single(folder / SINGLE)
    if (folder / INDEX).is_file():
        return indexed_files(folder / INDEX)
    raise ValueError(_no_weights(folder))


def _single(path: Path) -> WeightFiles:
    if not path.is_file():
        raise ValueError(
            f"{path} is missing, which transformers_weights of config.json names; correct it"
        )
    return WeightFiles((path,))


def indexed_files(index: Path) -> WeightFiles:
    """Returns the files that an index names; ValueError if some are missing."""
    weight_map = _weight_map(index)
    paths = tuple(index.parent / name for name in sorted(set(weight_map.values())))
    missing = [path.name for path in paths if not path.is_file()]
    if not paths:
        raise ValueError(f"{index} names no file; copy it again from where it came")
    if missing:
        raise ValueError(
            f"{index} names {some(missing)}, which {'is' if len(missing) == 1 else 'are'} not "
            "beside it; copy them there from where it came, or, if the weights were saved again "
            f"since, give the folder of that save, with its {SINGLE} or index"
        )
    return WeightFiles(paths, frozenset(weight_map))


def _weight_map(path: Path) -> dict[str, str]:
    try:
        weight_map = read_json(path, MAX_HEADER_BYTES)["weight_map"]
        if not all(is_below(file) and len(file) < _MAX_NAME for file in weight_map.values()):
            raise ValueError("weight_map must name files of this folder")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} must hold a weight_map of tensors to files: {error}; copy it again from where "
            "it came"
        ) from None
    return weight_map


def _no_weights(folder: Path) -> str:
    for pattern, content, way_out in _OTHER_FILES:
        if any(folder.glob(pattern)):
            return f"{folder} {content}; {way_out}"
    hint = folder_below(folder, (SINGLE, INDEX)) or "copy the weights there, too"
    return f"{folder} must hold {SINGLE} or {INDEX}, but has neither; {hint}"


def no_config(folder: Path) -> str:
    """Returns what is wrong with a folder without config.json, and the way out."""
    gguf = [folder] if folder.suffix == ".gguf" else sorted(folder.glob("*.gguf"))
    if gguf:
        return (
            f"{folder} must be the folder of a HuggingFace model, but has only {gguf[0].name}; "
            "give the folder that it was made from, or let transformers convert it, model and "
            "tokenizer: from_pretrained(FOLDER, gguf_file=NAME).save_pretrained(OTHER)"
        )
    if folder.is_file():
        return f"{folder} must be the folder of a HuggingFace model, but is a file; give its folder"
    if (folder / ADAPTER_CONFIG).is_file():
        return (
            f"{folder} is a PEFT adapter, not a model: it has {ADAPTER_CONFIG} and no config.json; "
            "give its base model here, and the adapter as --lora-adapter with --lora"
        )
    if not folder.exists():
        way_out = (
            "correct the path, or give owner and name of a model on the hub to "
            f"`hf download OWNER/{folder.name} --local-dir {folder}`"
        )
        if folder.parts[:1] == ("~",):
            way_out = "the shell leaves ~ as it is behind = or within quotes; write $HOME instead"
        return f"{folder}: no such folder of a HuggingFace model; {way_out}"
    hint = folder_below(folder, ("config.json",)) or "download it first"
    return f"{folder} must be the folder of a HuggingFace model, but has no config.json; {hint}"


def folder_below(folder: Path, names: Iterable[str]) -> str:
    """Returns advice to give a folder below that has one of these files, or "".

    The newest checkpoint of transformers' Trainer is the one with the highest number, and the cache
    of the hub has the folder of a model below `snapshots`.
    """
    below = [
        path.parent
        for name in names
        for pattern in ("*", "snapshots/*")
        for path in folder.glob(f"{pattern}/{name}")
    ]
    if not below:
        return ""

    def order(path: Path) -> tuple[int, str]:
        return (int((re.findall(r"-(\d+)$", path.name) or ["-1"])[0]), path.name)

    return f"give {max(below, key=order)}, which has"


def refuse_adapter(folder: str | Path, adapter: str | Path | None = None) -> None:
    """Raises ValueError for a folder with weights and an adapter, which transformers adds to them,
    unless that one is trained further.

    adapter: folder of --lora-adapter.
    """
    path = Path(folder)
    if not (path / ADAPTER_CONFIG).is_file() or not (path / "config.json").is_file():
        return
    if adapter is not None and Path(adapter).resolve() == path.resolve():
        return
    raise ValueError(
        f"{folder} holds weights and an adapter ({ADAPTER_CONFIG}), which transformers adds to "
        f"them; train it further with --lora --lora-adapter {folder}, merge it with peft "
        "(merge_and_unload), or move the adapter's files elsewhere to train the weights alone"
    )


def some(names: Iterable[str], most: int = 4) -> str:
    """Returns the first names, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
