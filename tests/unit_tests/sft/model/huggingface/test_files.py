"""The files of a folder that hold its weights."""

import json
from pathlib import Path

import pytest

from megatron.sft.model.huggingface.files import (
    ADAPTER_CONFIG,
    INDEX,
    SINGLE,
    no_config,
    refuse_adapter,
    weight_files,
)


def names(folder, config=None):
    return [
        path.relative_to(folder).as_posix() for path in weight_files(folder, config or {}).paths
    ]


def test_files_are_chosen_as_transformers_chooses_them(tmp_path):
    """Other weights are trained otherwise than served, or good ones refused."""
    for name in ("b.safetensors", "a.safetensors", "mine.safetensors", "pytorch_model.bin"):
        (tmp_path / name).touch()
    weight_map = {"x": "b.safetensors", "y": "a.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert names(tmp_path) == ["a.safetensors", "b.safetensors"]
    (tmp_path / SINGLE).touch()
    assert names(tmp_path) == [SINGLE]
    assert names(tmp_path, {"transformers_weights": "mine.safetensors"}) == ["mine.safetensors"]
    assert len(names(tmp_path, {"transformers_weights": INDEX})) == 2


@pytest.mark.parametrize(
    ("present", "words"),
    [
        ("model-00001-of-00002.safetensors", f"but not their {INDEX}"),
        ("consolidated.safetensors", "Mistral's own format"),
        ("model.fp16.safetensors", "a variant of the weights"),
        ("model.Q4_K_M.gguf", "GGUF"),
        ("zero_to_fp32.py", "DeepSpeed"),
        ("checkpoint-20/model.safetensors", "give .*checkpoint-20, which has"),
        ("shard-00000-model-00001-of-00001.safetensors", "distributed save"),
        ("notes.txt", "copy the weights there"),
    ],
)
def test_folders_of_other_kinds_are_named(tmp_path, present, words):
    """ "download again" beside somebody's own weights destroys them."""
    (tmp_path / present).parent.mkdir(exist_ok=True)
    (tmp_path / present).touch()
    with pytest.raises(ValueError, match=words):
        weight_files(tmp_path, {})


@pytest.mark.parametrize("named", ["../other.safetensors", "gone.safetensors", "a.bin", 3])
def test_a_file_named_by_config_must_be_there(tmp_path, named):
    """transformers raises, or would read another folder's weights."""
    (tmp_path / SINGLE).touch()
    with pytest.raises(ValueError, match="transformers_weights"):
        weight_files(tmp_path, {"transformers_weights": named})


def test_a_folder_without_config_is_answered_with_the_one_below(tmp_path):
    """Trainer's folders have their models in checkpoint-N, the hub's cache in snapshots/HASH."""
    for name in ("checkpoint-5", "checkpoint-10", "snapshots"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").touch()
    assert "checkpoint-10, which has" in no_config(tmp_path)
    assert "give its folder" in no_config(tmp_path / "checkpoint-5" / "config.json")
    (tmp_path / "snapshots" / "model.Q4_1.gguf").touch()
    for gguf in (tmp_path / "snapshots", tmp_path / "snapshots" / "model.Q4_1.gguf"):
        assert "has only model.Q4_1.gguf" in no_config(gguf)
    (tmp_path / ADAPTER_CONFIG).touch()
    assert "--lora-adapter" in no_config(tmp_path)
    assert "correct the path" in no_config(tmp_path / "gone")
    assert "$HOME" in no_config(Path("~/gone"))


def test_an_adapter_beside_weights_is_refused_unless_it_is_trained(tmp_path):
    """transformers adds it to them; trained alone, they are another model."""
    (tmp_path / ADAPTER_CONFIG).touch()
    refuse_adapter(tmp_path)
    (tmp_path / "config.json").touch()
    refuse_adapter(tmp_path, tmp_path / ".")
    with pytest.raises(ValueError, match="merge_and_unload"):
        refuse_adapter(tmp_path, tmp_path / "other")
