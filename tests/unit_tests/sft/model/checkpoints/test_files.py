"""What a save that fails says."""

import pickle
import re
import resource
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from megatron.sft.model.checkpoints.files import (
    CheckpointError,
    read_or_refused,
    written_or_refused,
)


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


FAILURES: Any = {1: (EOFError(), None), 0: (KeyError("x"), None)}
"""By rank, with stacks."""


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("raised", "kind", "told"),
    [
        (
            CheckpointException("read", FAILURES),
            CheckpointError,
            "KeyError: 'x'",
        ),
        (EOFError(), ValueError, "EOFError"),
        (RuntimeError("a\nb " * 999), ValueError, "RuntimeError: a b a"),
        (
            pickle.UnpicklingError("Weights only load failed. Do this or that"),
            ValueError,
            "UnpicklingError: some bytes are not those that were saved",
        ),
    ],
)
def test_what_libraries_cannot_read_is_one_line_with_the_way_back(tmp_path, raised, kind, told):
    """torch's exception is no Exception: a traceback of 70 lines on each rank."""
    place = re.escape(f"{tmp_path}/iter_0000005 cannot be read: {told}")
    with (
        pytest.raises(
            kind, match=rf"^{place}.*; no other checkpoint beside it is sound$"
        ) as failure,
        read_or_refused(tmp_path, 5),
    ):
        raise raised
    assert len(str(failure.value)) < 700


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    "raised", [KeyboardInterrupt(), SystemExit(2), ValueError("worded"), RuntimeError("gloo: lost")]
)
def test_what_is_no_fault_of_the_files_passes(tmp_path, raised):
    """A lost rank, or Ctrl-C, would be told as a damaged checkpoint."""
    with pytest.raises(type(raised)) as failure, read_or_refused(tmp_path, 5):
        raise raised
    assert failure.value is raised
