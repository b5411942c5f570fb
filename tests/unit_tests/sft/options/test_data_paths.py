"""Folders and patterns as --data-path."""

from pathlib import Path

import pytest

from megatron.sft.options.data import DataConfig
from megatron.sft.options.data_paths import expanded, notes_on_held_out


@pytest.fixture
def folder(tmp_path):
    for name in ("b.jsonl", "a.csv", "deep/c.parquet", "notes.txt", ".hidden.jsonl", "b.jsonl.idx"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


def names(folder, paths):
    return [path.removeprefix(f"{folder}/") for path in paths]


def test_files_of_folders_and_patterns_are_sorted(folder):
    """Another order on another machine would train on other samples."""
    config = DataConfig(data_path=(str(folder), f"{folder}/*.jsonl"))
    assert names(folder, config.paths) == ["a.csv", "b.jsonl", "deep/c.parquet", "b.jsonl"]
    assert not config.is_blend
    deep = DataConfig(data_path=("x.jsonl",), valid_data_path=(f"{folder}/**/*.parquet",))
    assert names(folder, deep.valid_paths) == ["deep/c.parquet"]


def test_runs_checkpoints_and_models_in_a_folder_are_no_data(folder):
    """A folder of data to which a run saves would not train again: checksums.json holds no
    records. Other data beside tensors is not left out without a word.
    """
    for name in (
        "run/options.json",
        "run/metrics.jsonl",
        "saved/iter_0000002/__0_0.distcp",
        "saved/iter_0000002/checksums.json",
        "saved/iter_0000002/huggingface/config.json",
        "iter_0000003.unfinished/__0_0.distcp",
        "iter_0000003.unfinished/metadata.json",
        "out/model.safetensors",
        "out/config.json",
        "gpt2/pytorch_model.bin",
        "gpt2/config.json",
        "gpt2/tokenizer.json",
        "shards/pytorch_model-00001-of-00002.bin",
        "shards/config.json",
        "lora/adapter_model.bin",
        "lora/adapter_config.json",
        "pointers/model.safetensors.index.json",
        "pointers/config.json",
        "features/a.safetensors",
        "features/d.jsonl",
        "tokens/a.bin",
        "tokens/config.json",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    assert names(folder, expanded(str(folder), "--data-path")) == [
        "a.csv",
        "b.jsonl",
        "deep/c.parquet",
        "features/d.jsonl",
        "tokens/a.bin",
        "tokens/config.json",
    ]


def test_files_that_are_held_out_by_name(tmp_path):
    """A data set of the Hub holds its test and validation data beside the rest: trained, they make
    each later score too good.
    """
    held_out = ["data/test-00000-of-00001.parquet", "data/validation-00000-of-00002.parquet"]
    held_out += ["dev.jsonl", "eval/a.jsonl", "x_val.csv"]
    trained = [
        "contest.jsonl",
        "data/train-00000-of-00001.parquet",
        "device-1.jsonl",
        "train/eval.csv",
    ]
    for name in (*held_out, *trained):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert names(tmp_path, expanded(str(tmp_path), "--data-path")) == sorted(trained)
    (note,) = notes_on_held_out([str(tmp_path)], "--data-path")
    assert note.startswith(f"--data-path {tmp_path}: 5 of 9 files are named as data to validate or")
    pattern = f"{tmp_path}/data/*"
    assert len(expanded(pattern, "--data-path")) == 3, "a pattern names its files"
    (tmp_path / "eval" / "test.jsonl").touch()
    (tmp_path / "eval" / "a.jsonl").unlink()
    assert len(expanded(str(tmp_path / "eval"), "--data-path")) == 1, "all of a folder are trained"
    (note,) = notes_on_held_out([pattern, str(tmp_path / "eval"), "a.jsonl"], "--data-path")
    assert ": 2 of 3 files are named as data to validate or test with, and are trained: " in note


def test_prepared_folders_urls_and_single_files_stay(folder):
    """A WebDataset is read by its index, and a URL may have any character."""
    (folder / "shard.tar").touch()
    for path in (str(folder), "s3://bucket/a[1].jsonl", "no-such.jsonl", str(folder / "b.jsonl")):
        assert expanded(path, "--data-path") == (path,)


def test_a_weight_is_of_one_file(folder):
    """Whether each file or all together have the weight, nobody could tell."""
    config = DataConfig(data_path=("5", f"{folder}/*.csv", "3", str(folder / "b.jsonl")))
    assert names(folder, config.paths) == ["a.csv", "b.jsonl"]
    with pytest.raises(ValueError, match=r"stands for 3 files .*give each file its weight"):
        DataConfig(data_path=("5", str(folder), "3", "b.jsonl"))


@pytest.mark.parametrize("path", ["*.jsonl", ""])
def test_nothing_to_read_is_refused(tmp_path, path):
    """A run without data would end after an hour in the queue."""
    place = tmp_path / path
    with pytest.raises(
        ValueError, match=r"--data-path .*: (has no file|matches no file) that ends"
    ):
        DataConfig(data_path=(str(place),))


@pytest.mark.parametrize("name", ["c.jsonl.gz", "c.JSONL", "data.arrow", "c.parquet.zst"])
def test_a_shard_that_cannot_be_read_is_not_left_out(folder, name):
    """Three quarters of the records were left out without a word."""
    (folder / name).touch()
    for path in (str(folder), f"{folder}/*"):
        with pytest.raises(
            ValueError, match=rf"{name} would be left out, as no \{Path(name).suffix}"
        ):
            expanded(path, "--data-path")


def test_copies_in_hidden_folders_and_what_datasets_adds_are_no_data(folder):
    """Records were trained twice: those of Jupyter's checkpoints, too."""
    for name in (".ipynb_checkpoints/b-checkpoint.jsonl", "dataset_infos.json", "state.json"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    found = expanded(str(folder), "--data-path")
    assert names(folder, found) == ["a.csv", "b.jsonl", "deep/c.parquet"]
    assert expanded(f"{folder}/.ipynb_checkpoints", "--data-path")
