"""Blocks of tensors, read straight to their place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, LoadPlan, save
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron.sft.model.checkpoints import read
from megatron.sft.model.checkpoints.read import CheckpointReader

NUMBERS = torch.arange(840.0)
STATE = {
    "plain": NUMBERS.reshape(7, 10, 12),
    "transposed": NUMBERS.reshape(30, 28).t(),
    "part": NUMBERS.reshape(30, 28)[3:9, 5:20],
    "half": NUMBERS[:24].reshape(4, 6).to(torch.bfloat16),
    "vector": NUMBERS[:9],
    "number": torch.tensor(5.0),
    "empty": torch.zeros(0, 3),
    "float8": NUMBERS[:8].to(torch.float8_e4m3fn),  # which torch saves in a newer form
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "checkpoint"
    save(dict(STATE), checkpoint_id=folder, no_dist=True)
    return folder


class Into(DefaultLoadPlanner):
    """Puts what is read into one tensor."""

    def __init__(self, target: torch.Tensor) -> None:
        super().__init__()
        self._target = target

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self._target


def read_block(
    reader: FileSystemReader, name: str, block: tuple[slice, ...], target: torch.Tensor
) -> torch.Tensor:
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    stored = metadata.state_dict_metadata[name]
    assert isinstance(stored, TensorStorageMetadata)
    offsets = torch.Size([one.start for one in block])
    items = create_read_items_for_chunk_list(
        name, stored, [ChunkStorageMetadata(offsets, target.shape)]
    )
    reader.read_data(LoadPlan(items), Into(target)).wait()
    return target


BLOCKS: dict[str, list[tuple[slice, ...]]] = {
    "plain": [(slice(0, 7), slice(0, 10), slice(0, 12)), (slice(2, 5), slice(3, 9), slice(1, 12))],
    "transposed": [(slice(0, 28), slice(0, 30)), (slice(4, 21), slice(7, 8))],
    "part": [(slice(0, 6), slice(0, 15)), (slice(1, 3), slice(2, 3))],
    "half": [(slice(0, 4), slice(0, 6)), (slice(3, 4), slice(2, 6))],
    "vector": [(slice(0, 9),), (slice(4, 6),)],
    "number": [()],
    "float8": [(slice(0, 8),), (slice(2, 5),)],
}


@pytest.mark.parametrize("buffer_bytes", [1, 64, 1 << 24])
@pytest.mark.parametrize("name", BLOCKS)
def test_what_is_read_is_what_was_saved(
    saved: Path, monkeypatch: pytest.MonkeyPatch, name: str, buffer_bytes: int
) -> None:
    """Into memory that is one piece or not, of the same type or not."""
    monkeypatch.setattr(read, "_MAX_BUFFER_BYTES", buffer_bytes)
    for block in BLOCKS[name]:
        expected = STATE[name][block]
        for dtype in (expected.dtype, torch.float64):
            for target in (
                torch.empty(expected.shape, dtype=dtype),
                torch.empty(*expected.shape[::-1], 2, dtype=dtype)[..., 1].permute(
                    tuple(range(expected.dim()))[::-1]
                ),
            ):
                found = read_block(CheckpointReader(str(saved)), name, block, target)
                assert torch.equal(found.double(), expected.double())


def test_only_what_is_wanted_is_read(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch reads all of a stored tensor, which may be larger than the host's memory."""
    sizes = []
    empty = torch.empty

    def noted(*size: int, **options: object) -> torch.Tensor:
        sizes.extend([size] if size != (0,) else [])
        return empty(*size, **options)  # type: ignore[call-overload,no-any-return]

    target = torch.zeros(1, 2, 12)
    columns = torch.zeros(1, 2, 11)
    monkeypatch.setattr(read.torch, "load", None)
    monkeypatch.setattr(read, "_MAX_BUFFER_BYTES", 64)
    monkeypatch.setattr(read.torch, "empty", noted)
    reader = CheckpointReader(str(saved))
    read_block(reader, "plain", (slice(2, 3), slice(3, 5), slice(0, 12)), target)
    assert sizes == [(840,)]  # without memory
    read_block(reader, "plain", (slice(2, 3), slice(3, 5), slice(1, 12)), columns[..., :1])
    assert sizes[1:] == [(840,), (13,)]
    read_block(reader, "plain", (slice(2, 3), slice(3, 5), slice(1, 12)), columns)
    assert sizes[3:] == [(840,)]
    assert torch.equal(target[0], STATE["plain"][2, 3:5])
    assert torch.equal(columns[0], STATE["plain"][2, 3:5, 1:])


def test_a_file_that_ends_early_is_named(saved: Path, tmp_path: Path) -> None:
    """The rest of the tensor would be what was in memory before."""
    (shard,) = saved.glob("*.distcp")
    copy = tmp_path / "checkpoint"
    copy.mkdir()
    for path in (*saved.glob(".metadata"), shard):
        (copy / path.name).write_bytes(path.read_bytes())
    tensor = torch.empty(840, device="meta")
    with (copy / shard.name).open("rb") as file:
        os.truncate(file.name, 1000)
        with pytest.raises(ValueError, match=f"{shard.name} ends within a tensor"):
            read._read_into(torch.empty(840), tensor, file, 0)


def test_the_reader_is_megatron_cores() -> None:
    """Its loads would else take three times the time."""
    from megatron.core.dist_checkpointing.strategies import torch as strategy

    read.install()
    assert isinstance(
        strategy._get_filesystem_reader("folder", cache_metadata=True), CheckpointReader
    )
