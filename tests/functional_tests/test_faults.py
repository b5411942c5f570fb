"""What is wrong on one rank, or on disk, ends all ranks with one message, and leaves no process
behind.
"""

from __future__ import annotations

import os
import pickle
import re
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from megatron.packing.versions import package_version
from megatron.sft import distributed
from megatron.sft.__main__ import main
from megatron.sft.agreement import AgreedError, check_agreement
from megatron.sft.arguments.parse import parse_config
from megatron.sft.environment import silence_warnings
from megatron.sft.fit.fake.described_gpu import DescribedGPU
from megatron.sft.model.checkpoints import save
from megatron.sft.model.checkpoints.checksums import CHECKSUMS, file_names, sum_of, write_checksums
from megatron.sft.model.checkpoints.files import (
    check_folder,
    check_sound,
    found_faults,
    written_or_refused,
)
from megatron.sft.model.checkpoints.folder import TRACKER, checkpoint_path
from megatron.sft.model.huggingface import write
from tests.functional_tests.fault_injection import Fault
from tests.functional_tests.faults import OPTIONS, write_chats
from tests.functional_tests.forked_runs import train_forked
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
    told = (
        "ranks must be started alike, with the same options, versions and files: --lr is 0.01 on "
        "rank 2, but 0.001 on rank 0"
    )
    assert run_ranks(started_with, 3, [1e-3, 1e-3, 1e-2]) == [told] * 3


def started_with_kernels(installed: list[dict[str, str]]) -> str:
    """The error of ranks with these modules; a module's version is its package's."""
    modules = installed[dist.get_rank()]
    found: Any = distributed
    packages = {found._KERNELS[module]: modules[module] for module in modules}
    found.find_spec = modules.get
    found.package_version = lambda name: packages.get(name) or package_version(name)
    options = [*OPTIONS, "--mock-data", "--save", "checkpoints"]
    try:
        check_agreement(found._options_and_versions(parse_config(options, 2)))
    except AgreedError as error:
        return str(error)
    return ""


def test_other_kernels_are_refused() -> None:
    """Transformer Engine on one node alone gives its ranks other parameters, and NCCL compares
    neither sizes nor order.
    """
    flash = {"flash_attn": "4.0.1"}
    assert run_ranks(started_with_kernels, 2, [flash, flash]) == ["", ""]
    told = (
        "ranks must be started alike, with the same options, versions and files: "
        "transformer-engine is not installed on rank 1, but 2.9 on rank 0; "
        "flash-attn-4 is 4.0.2 on rank 1, but 4.0.1 on rank 0"
    )
    installed = [flash | {"transformer_engine": "2.9"}, {"flash_attn": "4.0.2"}]
    assert run_ranks(started_with_kernels, 2, installed) == [told] * 2
    # Of flash-attn 2 the module is there, and the package of that name is not.
    distant = [flash, {"flash_attn": ""}]
    (message, _) = run_ranks(started_with_kernels, 2, distant)
    assert "flash-attn-4 is unknown on rank 1, but 4.0.1 on rank 0" in message


def warnings_of(faults: list[str | None]) -> list[str]:
    """What this rank shows at its start on GPUs."""
    rank = dist.get_rank()
    silence_warnings(rank)
    found: Any = distributed
    device = DescribedGPU(name="H100" if rank == 2 else "H200", triton_fault=faults[rank])
    shown: list[str] = []
    found.warnings.showwarning = lambda message, *_, **__: shown.append(str(message))
    distributed._warn_of_other_ranks(device)
    return shown


def test_rank_0_warns_of_slower_ranks() -> None:
    """One node without a C compiler slows all others down; its own warnings are not shown."""
    shown = "the slowest rank sets the speed: "
    assert run_ranks(warnings_of, 3, [None, "no gcc", None]) == [
        [
            f"{shown}GPU is H100 on rank 2, but H200 on rank 0",
            f"{shown}fault of Triton is no gcc on rank 1, but None on rank 0",
        ],
        [],
        [],
    ]
    assert run_ranks(warnings_of, 2, ["no gcc", "no gcc"]) == [[], []]


def folder_seen(folders: list[Path]) -> str:
    try:
        lock = check_folder("--save", folders[dist.get_rank()])
    except AgreedError as error:
        return str(error)
    assert (lock is not None) == (dist.get_rank() == 0)
    return ""


def test_a_folder_to_save_to_is_the_same_for_all(tmp_path: Path) -> None:
    """A checkpoint of which each machine has a part on a disk of its own is none, and nobody would
    know before it is needed.
    """
    for name in ("shared", "own"):
        (tmp_path / name).mkdir()
    assert run_ranks(folder_seen, 2, [tmp_path / "shared"] * 2) == ["", ""]
    found = run_ranks(folder_seen, 2, [tmp_path / "shared", tmp_path / "own"])
    assert (
        found
        == [
            f"--save {tmp_path}/shared is another folder on rank 1 than on rank 0; pass one that "
            "all share"
        ]
        * 2
    )
    assert [path.name for path in (tmp_path / "shared").iterdir()] == [".lock"]


def checked(folder: Path, damaged: str) -> list[str]:
    """Save two checkpoints as all ranks do, damage a file of the newer one; what loading it
    says."""
    for iteration in (5, 10):
        path = checkpoint_path(folder, iteration)
        with written_or_refused(path):
            path.mkdir(exist_ok=True)
            (path / f"__{dist.get_rank()}_0.distcp").write_bytes(b"tensors" * 1000)
        dist.barrier()
        if dist.get_rank() == 0:
            shards = {MetadataIndex(name): _StorageInfo(name, 0, 7000) for name in file_names(path)}
            (path / ".metadata").write_bytes(pickle.dumps(Metadata({}, storage_data=shards)))
            write_checksums(path, {name: sum_of(path / name) for name in file_names(path)})
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
    dist.barrier()
    if dist.get_rank() == 0:  # as an earlier version or Megatron-LM saved it, cut off since
        (checkpoint_path(folder, 10) / CHECKSUMS).unlink()
        (checkpoint_path(folder, 10) / damaged).write_bytes(b"")
    dist.barrier()
    with pytest.raises(AgreedError) as cut:
        check_sound(folder, 10)
    return [str(failure.value), str(unwritten.value), str(cut.value)]


def faults_of_own_copy(folders: list[Path]) -> list[str]:
    """Damage each file of each rank's own copy in turn; what loading it says."""
    os.chdir(folders[dist.get_rank()])
    path = checkpoint_path("checkpoints", 10)
    found = []
    for copy in folders:
        for name in ("__0_0.distcp", "__1_0.distcp", "common.pt"):
            dist.barrier()
            if dist.get_rank() == 0:
                sound = (copy / path / name).read_bytes()
                (copy / path / name).write_bytes(b"T" + sound[1:])
            dist.barrier()
            found.append(" ".join(found_faults(path).faults))
            dist.barrier()
            if dist.get_rank() == 0:
                (copy / path / name).write_bytes(sound)
    return found


def test_each_copy_of_a_checkpoint_is_checked(tmp_path: Path) -> None:
    """Half of the files would pass where machines have copies of their own, if each rank read a
    part of its copy.
    """
    folders = [tmp_path / "node0", tmp_path / "node1"]
    for folder in folders:
        path = checkpoint_path(folder / "checkpoints", 10)
        path.mkdir(parents=True)
        for name in ("__0_0.distcp", "__1_0.distcp", "common.pt"):
            (path / name).write_bytes(b"tensors" * 1000)
        write_checksums(path, {name: sum_of(path / name) for name in file_names(path)})
    found, other = run_ranks(faults_of_own_copy, 2, folders)
    assert found == other
    told = "is damaged: its checksum is not that of what was saved"
    assert found == [
        f"checkpoints/iter_0000010/{name} {told} (the copy of rank {rank})"
        for rank in (0, 1)
        for name in ("__0_0.distcp", "__1_0.distcp", "common.pt")
    ]


def fill_disk(on_rank: int) -> None:
    if dist.get_rank() == on_rank:
        raise OSError(28, "No space left on device")


def test_a_damaged_checkpoint_is_named_with_the_one_to_go_back_to(tmp_path: Path) -> None:
    """A flipped bit in a shard that one rank reads would train on other weights, or hang the
    others.
    """
    (damaged, unwritten, cut), *others = run_ranks(checked, 3, tmp_path, "__2_0.distcp")
    assert others == [[damaged, unwritten, cut]] * 2
    assert "__2_0.distcp has 0 bytes, but must have 7,000; write 5 into " in cut
    assert f"{checkpoint_path(tmp_path, 10)}/__2_0.distcp is damaged" in damaged
    assert f"write 5 into {tmp_path / TRACKER} to continue" in damaged
    assert (
        "could not be saved: rank 1: the disk is full (OSError: [Errno 28] No space left on device)"
        in unwritten
    )


@pytest.mark.parametrize("stage", ["start", "metrics", "save", "tracker", "shard", "evaluate"])
def test_a_full_disk_is_one_line_in_a_single_process(tmp_path: Path, stage: str) -> None:
    """A traceback of a hundred lines hides which disk was full."""
    write_chats(tmp_path / "chats.jsonl", 40)
    arguments = [
        *OPTIONS,
        "--data-path",
        str(tmp_path / "chats.jsonl"),
        "--save",
        str(tmp_path / "save"),
    ]

    def train_on_a_full_disk() -> None:
        Fault("disk full", stage).inject()
        main()

    status, output = train_forked(1, [*arguments, "--num-workers", "0"], train_on_a_full_disk)
    assert status == 2
    assert "Traceback" not in output
    (line,) = re.findall(r"error: (.*)", output)
    assert "[Errno 28] No space left on device" in line


def test_a_full_disk_under_the_model_says_how_to_write_it_again(tmp_path: Path) -> None:
    """The line was "No space left on device": of which disk, and whether the model was lost, nobody
    could tell.
    """
    write_chats(tmp_path / "chats.jsonl", 40)
    saved, model = tmp_path / "save", tmp_path / "model"
    arguments = [
        *(*OPTIONS, "--train-iters", "2", "--num-workers", "0"),
        *("--data-path", str(tmp_path / "chats.jsonl"), "--save", str(saved)),
        *("--save-hf", str(model)),
    ]

    def train_on_a_full_disk() -> None:
        def write_weights(folder: Path, *_: object) -> None:
            (folder / "half").touch()
            raise OSError(28, "No space left on device")  # without a name, as a write fails

        write._write_weights = write_weights  # type: ignore[assignment]
        main()

    status, output = train_forked(1, arguments, train_on_a_full_disk)
    assert status == 2, output
    assert output.splitlines()[-1].endswith(
        f"error: --save-hf {model} could not be written: the disk is full (No space left on device)"
        f" ({model}.unfinished); make room there, and start again with --load {saved}: all steps "
        "are saved"
    )
    assert not list(tmp_path.glob("model*"))
    status, output = train_forked(1, [*arguments, "--load", str(saved)])
    assert status == 0, output
    assert (model / "model.safetensors").is_file()


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


@pytest.mark.parametrize(
    ("way", "module", "name"),
    [
        ("", save, "write_parts"),
        ("--async-save", save, "write_parts"),
        ("--use-distributed-optimizer", save, "write_parts"),
        ("", write, "_write_file"),
    ],
)
def test_a_rank_that_writes_for_long_is_waited_for(
    tmp_path: Path, way: str, module: Any, name: str
) -> None:
    """One rank writes the optimizer's state or the model of all replicas. In a collective the
    others gave up on it after the time that is meant for exchanging gradients, at a run's end.
    """
    write_chats(tmp_path / "chats.jsonl", 40)
    saved, model = tmp_path / "save", tmp_path / "model"
    arguments = [
        *(*OPTIONS, "--train-iters", "2", "--num-workers", "0", *way.split()),
        *("--data-path", str(tmp_path / "chats.jsonl"), "--distributed-timeout-minutes", "0.05"),
        *("--save", str(saved), "--save-hf", str(model)),
    ]
    write_it = getattr(module, name)

    def write_late(*arguments: Any) -> Any:
        if os.environ["RANK"] == "0":
            time.sleep(4.5)
        return write_it(*arguments)

    def train_with_a_slow_disk() -> None:
        setattr(module, name, write_late)
        main()

    status, output = train_forked(2, arguments, train_with_a_slow_disk)
    assert status == 0, output
    assert (saved / TRACKER).read_text() == "2"
    assert (model / "model.safetensors").is_file()
