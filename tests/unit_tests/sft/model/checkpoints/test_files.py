"""What a save that fails says."""

import resource

import pytest
import torch

from megatron.sft.model.checkpoints.files import CheckpointError, written_or_refused


@pytest.fixture
def no_file_over_200_kb():
    """As on a full disk, writes fail from some byte on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("one_rank", "no_file_over_200_kb")
def test_what_the_disk_refuses_is_told_in_its_words(tmp_path):
    """torch says "unexpected pos 704 vs 598", of which nobody knows that the disk is full."""
    unfinished = tmp_path / "iter_0000005.unfinished"
    unfinished.mkdir()
    refused = f"{tmp_path}/iter_0000005 could not be saved: {{}}OSError: [Errno 27] File too large"
    with (
        pytest.raises(OSError, match=r"\[Errno 27\]") as failure,
        written_or_refused(unfinished, is_collective=True),
    ):
        torch.save(torch.zeros(100_000), unfinished / "common.pt")
    assert str(failure.value) == refused.format("")
    assert [path.name for path in unfinished.iterdir()] == ["common.pt"]
    with pytest.raises(CheckpointError) as shared, written_or_refused(unfinished):
        torch.save(torch.zeros(100_000), unfinished / "__0_0.distcp")
    assert str(shared.value) == refused.format("rank 0: ") + "; what was saved before is intact"


@pytest.mark.usefixtures("one_rank")
def test_other_failures_keep_their_words(tmp_path):
    """A mistake of ours would be blamed on the disk."""
    with (
        pytest.raises(CheckpointError, match=r"rank 0: RuntimeError: no such tensor; what"),
        written_or_refused(tmp_path),
    ):
        raise RuntimeError("no such tensor")
    tmp_path.mkdir()
    with (
        pytest.raises(RuntimeError, match=r"^ours$"),
        written_or_refused(tmp_path, is_collective=True),
    ):
        raise RuntimeError("ours")
