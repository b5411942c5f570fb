"""Changes to the files of sound HuggingFace folders, as people and tools make them, and what is
right for each. `tensor_mutations` has those of tensors.

A change gets the folder of a model that transformers has saved in several files, and its tensors by
their names there.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
Tensors = dict[str, Tensor]
EQUAL, REFUSED = "equal", "refused"
LENIENT = "read"
"""Read, though transformers cannot."""


class Model(NamedTuple):
    """A folder to change."""

    folder: Path
    kind: str
    """Its `model_type`."""
    tensors: Tensors
    is_tied: bool
    body: str
    """Prefix of its layers in files."""
    head: str
    """Name of its head in files, also where a tied folder lacks it."""

    @property
    def embedding(self) -> str:
        """Name of its embedding in files."""
        return f"{self.body}embed_tokens.weight"

    @property
    def is_nested(self) -> bool:
        """Whether a vision tower is beside the language model."""
        return self.kind in ("gemma3", "mistral3", "qwen3_5")

    @property
    def some_weight(self) -> str:
        """A weight of the last layer."""
        layers = [name for name in self.tensors if name.startswith(f"{self.body}layers.")]
        return max(name for name in layers if name.endswith("layernorm.weight"))

    def files(self) -> list[Path]:
        """Returns the files of weights."""
        return sorted(self.folder.glob("model-*.safetensors"))

    def write(self, tensors: Mapping[str, Tensor], name: str = SINGLE) -> None:
        """Writes one file of weights; instead of all others if it is `SINGLE`."""
        if name == SINGLE:
            for file in (*self.files(), self.folder / INDEX):
                file.unlink(missing_ok=True)
        held = {key: tensor.contiguous().clone() for key, tensor in tensors.items()}
        save_file(held, self.folder / name, {"format": "pt"})

    def rename(self, rename: Callable[[str], str]) -> None:
        """Writes all tensors with other names."""
        self.write({rename(name): tensor for name, tensor in self.tensors.items()})

    def edit_index(self, change: Callable[[dict[str, Any]], object]) -> None:
        """Changes the index."""
        held = json.loads((self.folder / INDEX).read_text())
        change(held)
        (self.folder / INDEX).write_text(json.dumps(held))

    def edit_config(self, **changes: Any) -> None:
        """Changes config.json."""
        path = self.folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    def others(self) -> Tensors:
        """Returns other weights of the same shapes."""
        return {name: tensor + 0.05 for name, tensor in self.tensors.items()}


Change = Callable[[Model], str]
"""Changes a folder and returns what is right: EQUAL, REFUSED or LENIENT; "" where it means nothing
for this model."""
CHANGES: dict[str, Change] = {}


def change(function: Change) -> Change:
    """Registers a change by the name of its function."""
    CHANGES[function.__name__] = function
    return function


@change
def as_saved(model: Model) -> str:
    return EQUAL


@change
def one_file(model: Model) -> str:
    model.write(model.tensors)
    return EQUAL


@change
def older_index_beside_one_file(model: Model) -> str:
    index = (model.folder / INDEX).read_text()
    model.write(model.tensors)
    (model.folder / INDEX).write_text(index)
    return EQUAL


@change
def older_file_beside_shards(model: Model) -> str:
    save_file(model.others(), model.folder / SINGLE, {"format": "pt"})
    return REFUSED


@change
def same_weights_twice(model: Model) -> str:
    save_file(model.tensors, model.folder / SINGLE, {"format": "pt"})
    return EQUAL


@change
def no_index(model: Model) -> str:
    (model.folder / INDEX).unlink()
    return REFUSED


@change
def a_shard_missing(model: Model) -> str:
    model.files()[1].unlink()
    return REFUSED


@change
def an_empty_shard(model: Model) -> str:
    model.files()[1].write_bytes(b"")
    return REFUSED


@change
def an_empty_file_beside_shards(model: Model) -> str:
    (model.folder / SINGLE).write_bytes(b"")
    return REFUSED


@change
def pointer_of_git_lfs(model: Model) -> str:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1000\n"
    model.files()[0].write_text(pointer)
    return REFUSED


@change
def a_shard_cut_off(model: Model) -> str:
    file = model.files()[0]
    file.write_bytes(file.read_bytes()[:-4])
    return REFUSED


@change
def a_shard_the_index_lacks(model: Model) -> str:
    model.write(model.others(), "model-00009-of-00009.safetensors")
    return EQUAL


@change
def index_names_the_wrong_shard(model: Model) -> str:
    def swap(index: dict[str, Any]) -> None:
        files = [*index["weight_map"].values()]
        name, file = next(
            (name, file) for name, file in index["weight_map"].items() if files.count(file) > 1
        )
        index["weight_map"][name] = next(other for other in files if other != file)

    model.edit_index(swap)
    return EQUAL


@change
def index_lacks_a_tensor(model: Model) -> str:
    model.edit_index(lambda index: index["weight_map"].pop(model.some_weight))
    return EQUAL


@change
def index_names_a_tensor_of_no_shard(model: Model) -> str:
    model.edit_index(lambda i: i["weight_map"].update(gone=model.files()[0].name))
    return REFUSED if model.is_nested else EQUAL


@change
def index_names_a_tied_head(model: Model) -> str:
    if not model.is_tied:
        return ""
    model.edit_index(lambda i: i["weight_map"].update({model.head: model.files()[0].name}))
    return EQUAL


@change
def index_without_metadata(model: Model) -> str:
    model.edit_index(lambda index: index.pop("metadata"))
    return LENIENT


@change
def index_of_nothing(model: Model) -> str:
    (model.folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": {}}))
    return REFUSED


@change
def index_that_is_no_json(model: Model) -> str:
    (model.folder / INDEX).write_text("{")
    return REFUSED


@change
def a_tensor_again_in_the_last_shard(model: Model) -> str:
    return _again(model, -1)


@change
def a_tensor_again_in_the_first_shard(model: Model) -> str:
    return _again(model, 0)


def _again(model: Model, number: int) -> str:
    file = model.files()[number]
    held = load_file(file)
    name = next(name for name in model.tensors if name not in held and "norm" in name)
    save_file(held | {name: model.tensors[name] + 0.5}, file, {"format": "pt"})
    return EQUAL


@change
def shards_in_a_folder_below(model: Model) -> str:
    (model.folder / "parts").mkdir()
    for file in model.files():
        file.rename(model.folder / "parts" / file.name)
    model.edit_index(
        lambda i: i.update(weight_map={n: f"parts/{f}" for n, f in i["weight_map"].items()})
    )
    return EQUAL


@change
def pickle_beside(model: Model) -> str:
    torch.save(model.others(), model.folder / "pytorch_model.bin")
    return EQUAL


@change
def pickle_alone(model: Model) -> str:
    model.write(model.tensors)
    torch.save(model.tensors, model.folder / "pytorch_model.bin")
    (model.folder / SINGLE).unlink()
    return REFUSED


@change
def index_of_pickles_beside(model: Model) -> str:
    (model.folder / "pytorch_model.bin.index.json").write_text('{"weight_map": {"a": "b.bin"}}')
    return EQUAL


@change
def consolidated_beside(model: Model) -> str:
    model.write({"layers.0.attention.wq.weight": torch.zeros(2)}, "consolidated.safetensors")
    (model.folder / "params.json").write_text("{}")
    return EQUAL


@change
def consolidated_alone(model: Model) -> str:
    model.write(model.tensors)
    (model.folder / SINGLE).rename(model.folder / "consolidated.safetensors")
    return REFUSED


@change
def original_folder_beside(model: Model) -> str:
    (model.folder / "original").mkdir()
    model.write(model.others(), "original/model.safetensors")
    (model.folder / "original" / "params.json").write_text("{}")
    return EQUAL


@change
def weights_in_a_folder_below(model: Model) -> str:
    model.write(model.tensors)
    (model.folder / "checkpoint-20").mkdir()
    (model.folder / SINGLE).rename(model.folder / "checkpoint-20" / SINGLE)
    return REFUSED


@change
def variant_alone(model: Model) -> str:
    model.write(model.tensors)
    (model.folder / SINGLE).rename(model.folder / "model.fp16.safetensors")
    return REFUSED


@change
def variant_beside(model: Model) -> str:
    model.write(model.others(), "model.fp16.safetensors")
    return EQUAL


@change
def snapshot_of_links(model: Model) -> str:
    blobs = model.folder.with_name("blobs")
    shutil.rmtree(blobs, ignore_errors=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(model.folder.iterdir())):
        file.rename(blobs / f"{number:064x}")
        file.symlink_to(Path("..") / "blobs" / f"{number:064x}")
    return EQUAL


@change
def checkpoint_of_the_trainer(model: Model) -> str:
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"):
        (model.folder / name).write_bytes(b"PK")
    (model.folder / "trainer_state.json").write_text("{}")
    return EQUAL


@change
def gguf_beside(model: Model) -> str:
    (model.folder / "model-q4.gguf").write_bytes(b"GGUF")
    return EQUAL


@change
def adapter_beside(model: Model) -> str:
    _write_adapter(model)
    return REFUSED


@change
def adapter_without_weights_beside(model: Model) -> str:
    _write_adapter(model)
    (model.folder / "adapter_model.safetensors").unlink()
    return REFUSED


@change
def adapter_as_pickle_beside(model: Model) -> str:
    _write_adapter(model)
    (model.folder / "adapter_model.safetensors").unlink()
    torch.save({}, model.folder / "adapter_model.bin")
    return REFUSED


def _write_adapter(model: Model) -> None:
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    text = json.dumps(config | {"base_model_name_or_path": "gone"})
    (model.folder / "adapter_config.json").write_text(text)
    model.write({"base_model.model.a": torch.ones(1)}, "adapter_model.safetensors")


@change
def file_named_by_config(model: Model) -> str:
    model.write(model.tensors)
    (model.folder / SINGLE).rename(model.folder / "mine.safetensors")
    model.write(model.others())
    model.edit_config(transformers_weights="mine.safetensors")
    return EQUAL


@change
def missing_file_named_by_config(model: Model) -> str:
    model.edit_config(transformers_weights="mine.safetensors")
    return REFUSED


@change
def distributed_save_beside(model: Model) -> str:
    model.write(model.tensors, "shard-00000-model-00001-of-00001.safetensors")
    return REFUSED


@change
def quantized_by_config(model: Model) -> str:
    model.edit_config(quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    return REFUSED


@change
def quantized_by_text_config(model: Model) -> str:
    if not model.is_nested:
        return ""
    text = json.loads((model.folder / "config.json").read_text())["text_config"]
    model.edit_config(text_config=text | {"quantization_config": {"quant_method": "fp8"}})
    return REFUSED


@change
def quantization_of_null(model: Model) -> str:
    model.edit_config(quantization_config=None)
    return EQUAL
