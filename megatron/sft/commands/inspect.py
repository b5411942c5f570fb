"""pure. `megatron-sft inspect PATH`: describes data, a blend, a model folder, an adapter or
checkpoints.

Only headers and indices are read, no weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.blending.loading.sources import split_names
from megatron.blending.metadatasets.metadataset import load_metadataset
from megatron.blending.metadatasets.tree import (
    Blend,
    Epochized,
    Node,
    SourceEntry,
    flattened,
    source_entries,
)
from megatron.packing.flag_help import Command
from megatron.packing.flags import FlagError, parse_flags
from megatron.packing.quoting import shortened
from megatron.packing.user_files import read_json
from megatron.sft.arguments.defaults import positions_of
from megatron.sft.arguments.pretrained import check_training
from megatron.sft.data.chats import open_unjoined
from megatron.sft.data.hf_tokenizer import build_hugging_face, note_on_rows
from megatron.sft.environment import exit_with_message, outlive_output
from megatron.sft.model.checkpoints.checksums import CHECKSUMS, read_checksums
from megatron.sft.model.checkpoints.folder import (
    best_iteration,
    checkpoint_path,
    iterations,
    latest_iteration,
)
from megatron.sft.model.huggingface.config_file import read_config
from megatron.sft.model.huggingface.files import (
    ADAPTER_CONFIG,
    folder_below,
    no_config,
    refuse_adapter,
)
from megatron.sft.model.huggingface.folder import open_folder
from megatron.sft.model.huggingface.quantized.pairs import describe
from megatron.sft.model.huggingface.refusals import check_weights
from megatron.sft.model.huggingface.score_config import check_scores, is_reward_model
from megatron.sft.model.huggingface.served_files import read_object
from megatron.sft.model.lora.peft_folder import WEIGHTS as ADAPTER_WEIGHTS
from megatron.sft.model.lora.peft_folder import notes_on_adapter, options_of_adapter
from megatron.sft.options.data_paths import expanded
from megatron.sft.options.hub_names import check_hub_name

_SPLITS = ("train", "val", "test")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
"""Files that hold a tokenizer's vocabulary."""
_COMPANIONS = "huggingface"
"""Folder in a checkpoint with the model's config.json and tokenizer."""


@dataclass(frozen=True, kw_only=True)
class InspectOptions:
    """Path to describe."""

    path: str | None = field(default=None, metadata={"positional": True})
    """Data file, prepared WebDataset folder, metadataset (.yaml), HuggingFace model, PEFT adapter,
    or folder of checkpoints.
    """

    def __post_init__(self) -> None:
        if self.path is None:
            raise ValueError("a path is needed: data, a model or checkpoints; see --help")


def main(arguments: Sequence[str], program: str) -> None:
    """Prints the description; one line and status 2 for a path that is none of these."""
    outlive_output()
    about = "Describe data, a blend, a model folder, an adapter or checkpoints."
    try:
        (options,) = parse_flags(
            (InspectOptions,), arguments, Command(program=program, about=about, usage="PATH")
        )
        for line in lines_of(options.path):
            print(shortened(line))
    except (FlagError, ValueError, OSError) as failure:
        exit_with_message(program, failure)


def lines_of(path: str) -> Iterator[str]:
    """Yields the lines of the description. Raises ValueError if `path` cannot be read."""
    check_hub_name(path)
    folder = Path(path)
    is_adapter, is_model = ((folder / file).is_file() for file in (ADAPTER_CONFIG, "config.json"))
    if is_adapter or is_model:
        if is_model:
            yield from _model(folder)
        if is_adapter:
            yield from _adapter(folder)
    elif folder.is_dir() and iterations(folder):
        yield from _checkpoints(folder)
    elif folder.is_dir() and (folder / CHECKSUMS).is_file():
        yield from _checkpoint(folder)
    else:
        try:
            yield from _data(path)
        except ValueError:
            if folder.suffix == ".gguf" or any(folder.glob("*.gguf")):
                raise ValueError(no_config(folder)) from None
            below = folder_below(folder, ("config.json", ADAPTER_CONFIG))
            if not below:
                raise
            raise ValueError(f"{path}: no model, and no data; {below}") from None


def _model(folder: Path) -> Iterator[str]:
    config = read_config(folder)
    yield f"HuggingFace model {folder}: {_kind(config)}"
    yield from _shape(folder)
    held = open_folder(folder)
    tensors = held.tensors.values()
    numbers = sum(math.prod(each.shape) for each in tensors)
    files = {each.path for each in tensors}
    kinds = ", ".join(sorted({describe(each) for each in tensors}))
    yield (
        f"  weights    {numbers:,} numbers in {len(held.tensors):,} tensors ({kinds}), "
        f"{size(sum(file.stat().st_size for file in files))} in {count(len(files), 'file')}"
    )
    tokenizer = next((name for name in _TOKENIZERS if (folder / name).is_file()), "none")
    yield f"  tokenizer  {tokenizer}; chat template: {_template(folder)}"
    line, is_readable = _tokens(folder) if tokenizer != "none" else ("", False)
    if line:
        yield f"             {line}"
    try:
        refuse_adapter(folder)
        check_training({"pretrained_checkpoint": str(folder)})
        check_weights(folder, config, held)
        if is_reward_model(config):
            check_scores(config, None, folder)
    except ValueError as failure:
        yield f"  trains     no: {failure}"
    else:
        of_another = "" if is_readable else " --tokenizer-model FOLDER"
        loss = " --loss reward" * is_reward_model(config)
        yield f"  trains     yes: --pretrained-checkpoint {folder}{of_another}{loss}"


def _kind(config: Mapping[str, Any]) -> str:
    return f"{config.get('model_type')}{', a reward model' * is_reward_model(config)}"


def _tokens(folder: Path) -> tuple[str, bool]:
    """Returns a line on the tokens as a run reads them, and False if a run refuses them. The line
    is empty if transformers is not installed.
    """
    try:
        tokenizer = build_hugging_face(str(folder))
    except ValueError as failure:
        is_missing = isinstance(failure.__cause__, ImportError)
        return "" if is_missing else str(failure), is_missing
    inner = read_config(folder).get("text_config")
    num_rows = (inner if isinstance(inner, dict) else read_config(folder)).get("vocab_size")
    return f"{tokenizer.note}{note_on_rows(tokenizer, num_rows)}", True


def _shape(folder: Path) -> Iterator[str]:
    config = read_config(folder)
    inner = config.get("text_config")
    text = inner if isinstance(inner, dict) else config
    names = {
        "layers": "num_hidden_layers",
        "hidden": "hidden_size",
        "heads": "num_attention_heads",
        "key/value heads": "num_key_value_heads",
        "vocabulary": "vocab_size",
        "experts": "num_local_experts" if "num_local_experts" in text else "num_experts",
    }
    parts = [f"{title} {text[name]}" for title, name in names.items() if text.get(name) is not None]
    positions = positions_of(str(folder))
    yield f"  shape      {', '.join([*parts, f'positions {positions}'])}"


def _template(folder: Path) -> str:
    for name in ("chat_template.jinja", "chat_template.json"):
        if (folder / name).is_file():
            return name
    path = folder / "tokenizer_config.json"
    has_own = path.is_file() and "chat_template" in read_json(path, any_integer=True)
    return "in tokenizer_config.json" if has_own else "none"


def _adapter(folder: Path) -> Iterator[str]:
    config = read_object(folder / ADAPTER_CONFIG)
    yield f"PEFT adapter {folder}: {config.get('peft_type')}"
    targets = config.get("target_modules")
    if isinstance(targets, list):  # "model.layers.0.mlp.up_proj" -> "up_proj"
        targets = " ".join(sorted({str(name).rpartition(".")[2] for name in targets}))
    yield f"  rank {config.get('r')}, alpha {config.get('lora_alpha')}, on {targets}"
    yield f"  base model {config.get('base_model_name_or_path')}"
    weights = folder / ADAPTER_WEIGHTS
    yield f"  weights    {size(weights.stat().st_size) if weights.is_file() else 'none'}"
    try:
        options_of_adapter(folder)
    except ValueError as failure:
        yield f"  trains     no: {failure}"
    else:
        loss = " --loss reward" * (config.get("task_type") == "SEQ_CLS")
        yield f"  continue with --lora --lora-adapter {folder}{loss}"
        yield from (f"  {note}" for note in notes_on_adapter(folder))


def _checkpoints(folder: Path) -> Iterator[str]:
    steps, latest, best = iterations(folder), latest_iteration(folder), best_iteration(folder)
    yield f"checkpoints {folder}: {count(len(steps), 'checkpoint')}"
    for step in steps:
        marks = ["newest"] * (step == latest) + ["best"] * (step == best)
        path = checkpoint_path(folder, step)
        yield f"  step {step:,}  {size(_bytes_below(path))}  {', '.join(marks)}".rstrip()
    if latest is not None:
        yield from _checkpoint(checkpoint_path(folder, latest))
    yield f"  continue with --load {folder}"


def _checkpoint(path: Path) -> Iterator[str]:
    files = read_checksums(path)
    listed = "no checksums" if files is None else f"{count(len(files), 'file')} with checksums"
    yield f"checkpoint {path}: {size(_bytes_below(path))}, {listed}"
    companions = path / _COMPANIONS
    if (companions / "config.json").is_file():
        yield f"  model      {_kind(read_config(companions))}"
        yield from _shape(companions)
        yield f"  write it as a HuggingFace folder: megatron-sft export {path} FOLDER"
    else:
        yield "  model      no HuggingFace family, or adapters beside a base model"


def _data(path: str) -> Iterator[str]:
    files = expanded(path, "data in")
    if len(files) > 1:
        yield from _files(path, files)
        return
    (path,) = files
    own_splits = split_names(path)
    for split in [name for name in _SPLITS if name == "train" or name in own_splits]:
        node = load_metadataset(path, split)
        yield from _sources(path, split, node)
        yield from _tree(node, "  ")


def _files(path: str, files: Sequence[str]) -> Iterator[str]:
    """Yields lines about several files, those of a folder or of a pattern."""
    entries = [entry for file in files for entry in source_entries(load_metadataset(file, "train"))]
    records = [len(open_unjoined(entry).source) for entry in entries]
    total = sum(records)
    yield f"{path}: {count(len(files), 'file')}, {total:,} records, read one after the other"
    width = max(map(len, files))
    for file, number in zip(files, records):
        held = size(_bytes_below(Path(file)))
        yield f"  {number / total:7.1%}  {file:{width}}  {number:>12,} records  {held}"


def _sources(path: str, split: str, node: Node) -> Iterator[str]:
    kind, shares = flattened(node)
    total = sum(share for _, share in shares)
    sizes = [len(open_unjoined(entry).source) for entry, _ in shares]
    how: dict[type, str] = {
        Blend: ", blended by weight",
        Epochized: ", each repeated as often as it says",
    }
    how_read = how.get(kind, "") if len(shares) > 1 else ""
    yield f"{path}, split {split}: {count(len(shares), 'source')}, {sum(sizes):,} records{how_read}"
    width = max(len(_path_of(entry)) for entry, _ in shares)
    for (entry, share), records in zip(shares, sizes):
        part = f"{float(share):7.2f} x" if kind is Epochized else f"{float(share / total):7.1%}"
        place = Path(_path_of(entry))
        held = size(_bytes_below(place)) if place.exists() else "elsewhere"
        yield f"  {part}  {_path_of(entry):{width}}  {records:>12,} records  {held}"


def _tree(node: Node, indent: str) -> Iterator[str]:
    """Yields the groups of a nested blend; nothing for a flat one, whose weights are shown."""
    if not isinstance(node, (Blend, Epochized)) or not any(
        isinstance(child, (Blend, Epochized)) for child, _ in node.children
    ):
        return
    for child, weight in node.children:
        named = ", ".join(Path(_path_of(entry)).name for entry in source_entries(child))
        yield f"{indent}weight {float(weight):g}: {named}"
        yield from _tree(child, indent + "  ")


def _path_of(entry: object) -> str:
    if isinstance(entry, SourceEntry):
        return entry.path
    return " + ".join(leg.entry.path for leg in entry.legs)  # type: ignore[attr-defined]  # a Join


def _bytes_below(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def count(number: int, noun: str) -> str:
    """`1, "file" -> "1 file"`; `2, "file" -> "2 files"`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def size(num_bytes: int) -> str:
    """`2500000 -> "2.5 MB"`."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes} bytes"
