"""Files of a checkpoint and their checksums, made in one go."""

import io
import resource
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.checkpoint.planner import WriteItemType

from megatron.sft.model.checkpoints.checksums import BLOCK, sum_of
from megatron.sft.model.checkpoints.write import write_parts


@pytest.fixture
def no_file_over_200_kb():
    """As on a full disk, writes fail from some byte on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def item(kind, index):
    return SimpleNamespace(type=kind, index=index)


def parts_of(folder, *tensors):
    of_bytes = [(item(WriteItemType.BYTE_IO, "state"), io.BytesIO(b"some bytes"))]
    of_tensors = [(item(WriteItemType.TENSOR, n), tensor) for n, tensor in enumerate(tensors)]
    return [
        (str(folder / "__0_0.distcp"), "__0_0.distcp", (of_bytes, of_tensors)),
        (str(folder / "__0_1.distcp"), "__0_1.distcp", ([], of_tensors)),
    ]


def test_checksums_are_those_of_the_files(tmp_path, monkeypatch):
    """A wrong one would make a sound checkpoint unloadable; one that is made by reading the file
    again costs a checkpoint a fifth more.
    """
    tensors = torch.arange(100_000.0), torch.zeros(0), torch.eye(3, dtype=torch.bfloat16)
    opened = []
    open_file = open

    def noted_open(path, mode):
        opened.append(mode)
        return open_file(path, mode)

    monkeypatch.setattr("builtins.open", noted_open)
    results, sums = write_parts(parts_of(tmp_path, *tensors))
    monkeypatch.undo()
    assert opened == ["wb", "wb"]
    assert sums == {name: sum_of(tmp_path / name) for name in ("__0_0.distcp", "__0_1.distcp")}
    assert sums["__0_0.distcp"].num_bytes > sums["__0_1.distcp"].num_bytes > 400_000 > BLOCK
    content = (tmp_path / "__0_0.distcp").read_bytes()
    assert [found.index for found in results[0]] == ["state", 0, 1, 2]
    places = [found.storage_data for found in results[0]]
    found = [content[place.offset : place.offset + place.length] for place in places]
    assert found[0] == b"some bytes"
    for tensor, part in zip(tensors, found[1:]):
        assert torch.equal(torch.load(io.BytesIO(part)), tensor)


@pytest.mark.usefixtures("no_file_over_200_kb")
def test_what_the_disk_refuses_is_told_in_its_words(tmp_path):
    """torch says "unexpected pos 704 vs 598", of which nobody knows that the disk is full."""
    with pytest.raises(OSError, match=r"\[Errno 27\] File too large"):
        write_parts(parts_of(tmp_path, torch.zeros(100_000)))
