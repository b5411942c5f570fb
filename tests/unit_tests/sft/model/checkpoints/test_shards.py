"""Shards of a checkpoint against its table of contents, and the way back to a sound one."""

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import save
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from megatron.sft.model.checkpoints.checksums import (
    CHECKSUMS,
    file_names,
    sum_of,
    write_checksums,
)
from megatron.sft.model.checkpoints.folder import checkpoint_path
from megatron.sft.model.checkpoints.shards import other_sound_iteration, shard_faults
from tests.unit_tests.sft.model.checkpoints.small_checkpoints import flip

SHARD = "__0_0.distcp"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "checkpoint"
    save({"weights": torch.ones(3, 4), "object": "text"}, checkpoint_id=folder, no_dist=True)
    return folder


def link_to_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def link_to_a_copy(path: Path) -> None:
    shutil.move(path, path.parent / "moved")
    path.symlink_to("moved")


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (Path.unlink, ["is missing"]),
        (lambda path: path.write_bytes(b""), ["has 0 bytes, but must have"]),
        (lambda path: os.truncate(path, 99), ["has 99 bytes, but must have"]),
        (link_to_a_pipe, ["must be a file, but is none"]),
        (link_to_a_copy, []),
        (lambda path: None, []),
    ],
)
def test_shards_are_looked_at_before_they_are_read(
    tmp_path: Path, saved: Path, damage: Callable[[Path], None], told: list[str]
) -> None:
    """torch raises what is no Exception on all ranks, 70 lines on each. Links are fine to read."""
    checkpoint = shutil.copytree(saved, tmp_path / "checkpoint")
    damage(checkpoint / SHARD)
    faults = shard_faults(checkpoint)
    assert len(faults) == len(told)
    for fault, words in zip(faults, told):
        assert str(checkpoint / SHARD) in fault
        assert words in fault


@pytest.mark.parametrize("name", ["../other/__0_0.distcp", "/etc/hosts"])
def test_shards_stay_in_the_checkpoint(tmp_path: Path, name: str) -> None:
    """A stranger's table would read files of the user's as weights."""
    entries = {MetadataIndex("weights"): _StorageInfo(name, 0, 4)}
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata({}, storage_data=entries)))
    (fault,) = shard_faults(tmp_path)
    assert f"names the shard '{name}', which is no file of the checkpoint" in fault


INFO: Any = _StorageInfo
"""For values of other types than it asks for."""


@pytest.mark.parametrize("entry", [torch.float32, INFO("a", "b", 1), INFO([], 0, 1)])
def test_a_table_of_other_values_is_named(tmp_path: Path, entry: object) -> None:
    content = Metadata({}, storage_data={MetadataIndex("weights"): entry})
    (tmp_path / ".metadata").write_bytes(pickle.dumps(content))
    with pytest.raises(ValueError, match=rf"^{tmp_path}/.metadata must say where tensors are"):
        shard_faults(tmp_path)


def test_the_newest_sound_one_is_found(tmp_path: Path, saved: Path) -> None:
    """Whoever has a damaged checkpoint needs the one to go back to."""
    for iteration in (5, 10, 15, 20):
        path = shutil.copytree(saved, checkpoint_path(tmp_path, iteration))
        write_checksums(path, {name: sum_of(path / name) for name in file_names(path)})
    flip(checkpoint_path(tmp_path, 15) / SHARD)
    assert other_sound_iteration(tmp_path, damaged=20) == 10
    (checkpoint_path(tmp_path, 10) / CHECKSUMS).unlink()  # of an earlier version
    assert other_sound_iteration(tmp_path, damaged=20) == 10
    (checkpoint_path(tmp_path, 10) / SHARD).unlink()
    assert other_sound_iteration(tmp_path, damaged=20) == 5
    (checkpoint_path(tmp_path, 5) / CHECKSUMS).write_text("{")
    assert other_sound_iteration(tmp_path, damaged=20) is None
