"""What is wrong on one rank, or on disk, ends all ranks with one message, and leaves no process behind."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from megatron.sft.distributed import AgreedError, check_agreement, gathered
from megatron.sft.model.checkpoint_files import check_folder, check_sound, sums_of_own, written_or_refused
from megatron.sft.model.checkpoint_folder import TRACKER, checkpoint_path, write_checksums
from tests.functional_tests.ranks import run_ranks
from tests.functional_tests.test_run import MODEL, Run, chats, options, steps_of, wait_for_step

__all__ = ["chats"]  # a fixture


def started_with(learning_rates: list[float]) -> str:
    try:
        check_agreement({"--lr": learning_rates[dist.get_rank()], "torch": "2.13.0"})
    except AgreedError as error:
        return str(error)
    return ""


def test_ranks_started_apart_are_refused() -> None:
    """Replicas with another learning rate train apart without a word; other sizes hang."""
    assert run_ranks(started_with, 3, [1e-3, 1e-3, 1e-3]) == [""] * 3
    told = "ranks must be started alike: --lr is 0.01 on rank 2, but 0.001 on rank 0"
    assert run_ranks(started_with, 3, [1e-3, 1e-3, 1e-2]) == [told] * 3


def folder_seen(folders: list[Path]) -> str:
    try:
        lock = check_folder(folders[dist.get_rank()])
    except AgreedError as error:
        return str(error)
    assert (lock is not None) == (dist.get_rank() == 0)
    return ""


def test_a_folder_to_save_to_is_the_same_for_all(tmp_path: Path) -> None:
    """A checkpoint of which each machine has a part on a disk of its own is none, and nobody would know before it is
    needed.
    """
    for name in ("shared", "own"):
        (tmp_path / name).mkdir()
    assert run_ranks(folder_seen, 2, [tmp_path / "shared"] * 2) == ["", ""]
    found = run_ranks(folder_seen, 2, [tmp_path / "shared", tmp_path / "own"])
    assert (
        found == [f"--save {tmp_path}/shared is another folder on rank 1 than on rank 0; pass one that all share"] * 2
    )
    assert [path.name for path in (tmp_path / "shared").iterdir()] == [".lock"]


def checked(folder: Path, damaged: str) -> list[str]:
    """Save two checkpoints as all ranks do, damage a file of the newer one; what loading it says."""
    for iteration in (5, 10):
        path = checkpoint_path(folder, iteration)
        with written_or_refused(path):
            path.mkdir(exist_ok=True)
            (path / f"__{dist.get_rank()}_0.distcp").write_bytes(b"tensors" * 1000)
        sums = gathered(sums_of_own(path))
        if dist.get_rank() == 0:
            write_checksums(path, {name: found for of_rank in sums for name, found in of_rank.items()})
    dist.barrier()
    check_sound(folder, 10)
    dist.barrier()
    if dist.get_rank() == 0:
        (checkpoint_path(folder, 10) / damaged).write_bytes(b"tensorz" * 1000)
    dist.barrier()
    with pytest.raises(AgreedError) as failure:
        check_sound(folder, 10)
    with pytest.raises(AgreedError) as unwritten, written_or_refused(checkpoint_path(folder, 15)):
        fill_disk(on_rank=1)
    return [str(failure.value), str(unwritten.value)]


def fill_disk(on_rank: int) -> None:
    if dist.get_rank() == on_rank:
        raise OSError(28, "No space left on device")


def test_a_damaged_checkpoint_is_named_with_the_one_to_go_back_to(tmp_path: Path) -> None:
    """A flipped bit in a shard that one rank reads would train on other weights, or hang the others."""
    (damaged, unwritten), *others = run_ranks(checked, 3, tmp_path, "__2_0.distcp")
    assert others == [[damaged, unwritten]] * 2
    assert f"{checkpoint_path(tmp_path, 10)}/__2_0.distcp is damaged" in damaged
    assert f"write 5 into {tmp_path / TRACKER} to continue" in damaged
    assert "iter_0000015 could not be saved: rank 1: OSError: [Errno 28] No space left on device" in unwritten


def test_nobody_outlives_a_killed_launcher(chats: Path, tmp_path: Path) -> None:  # the fixture
    """Ranks that train on for nobody hold their GPUs, and the pipe that a script waits at."""
    run = Run(2, [*MODEL, *options(chats, tmp_path, train_iters=100_000)])
    wait_for_step(run, tmp_path, 3)
    ranks = psutil.Process(run.process.pid).children(recursive=True)
    run.process.send_signal(signal.SIGKILL)
    run.finish()  # returns once nobody holds its output
    _, alive = psutil.wait_procs(ranks, timeout=30)
    assert not alive
    assert (tmp_path / "checkpoints" / TRACKER).read_text() == str(max(steps_of(tmp_path)))
