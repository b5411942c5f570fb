"""What a run will write, against the room that there is."""

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from megatron.sft.model.checkpoints import files as checkpoint_files
from megatron.sft.model.checkpoints.files import CheckpointError
from megatron.sft.model.huggingface.write import check_target
from megatron.sft.preflight import output_check
from megatron.sft.preflight.output_check import Planned, _num_saves, check_output, check_room
from tests.unit_tests.sft.command_line import parse

MEGABYTE = 10**6


def room(monkeypatch, megabytes, num_blocks=1):
    disk = SimpleNamespace(f_bfree=megabytes, f_frsize=MEGABYTE, f_blocks=num_blocks)
    monkeypatch.setattr(os, "statvfs", lambda folder: disk)


def test_what_cannot_fit_is_refused_and_what_may_not_is_noted(tmp_path, monkeypatch):
    """A disk that is full at the end loses the training; one that is refused though it would do, a
    night.
    """
    planned = [
        Planned("--save", tmp_path, 30 * MEGABYTE, 4),
        Planned("--save-hf", tmp_path, 10 * MEGABYTE),
    ]
    room(monkeypatch, 130)
    assert check_room(planned) == []
    room(monkeypatch, 40)
    assert [note.split(" there; ")[0] for note in check_room(planned)] == [
        f"note: --save {tmp_path} has 40.0 MB free, but the run will keep at least 120.0 MB",
        f"note: --save-hf {tmp_path} has 40.0 MB free, but the run will keep at least 130.0 MB",
    ]
    room(monkeypatch, 39)
    with pytest.raises(
        ValueError,
        match=r"--save-hf .* has 39.0 MB free, but the run writes at least 40.0 MB there",
    ):
        check_room(planned)
    room(monkeypatch, 0, num_blocks=0)  # such a file system does not tell
    assert check_room(planned) == []


@pytest.mark.parametrize(
    ("interval", "done", "expected"), [(None, 0, 1), (None, 4, 1), (4, 0, 3), (4, 8, 1), (4, 10, 0)]
)
def test_checkpoints_that_are_still_to_come(tmp_path, interval, done, expected):
    """A run of which all is saved needs no room."""
    if done:
        (tmp_path / f"iter_{done:07d}").mkdir()
        (tmp_path / "latest_checkpointed_iteration.txt").write_text(str(done))
    saved = f"--save {tmp_path} --load {tmp_path}" + f" --save-interval {interval}" * (
        interval is not None
    )
    assert _num_saves(parse(saved)) == expected  # of 10 steps


def test_a_mounted_disk_is_not_replaced(tmp_path, monkeypatch):
    """A finished model could not take its place."""
    check_target(tmp_path)
    monkeypatch.setattr("pathlib.PosixPath.is_mount", lambda self: True)
    with pytest.raises(
        ValueError, match="is where a disk is mounted, and cannot be replaced; give a folder in it"
    ):
        check_target(tmp_path)


HOLD = """import sys; from megatron.sft.model.checkpoints.lock import FolderLock
lock = FolderLock(sys.argv[1], "--run-dir"); print("held", flush=True); sys.stdin.read()"""


@pytest.mark.parametrize("flags", ["", "--save {0}/checkpoints", "--save {0}"])
def test_a_folder_that_another_run_writes_to_is_refused(tmp_path, monkeypatch, flags):
    """Lines of two runs would stand in one metrics.jsonl, and a report speak of neither."""
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    for module in (output_check, checkpoint_files):
        monkeypatch.setattr(module, "gathered", lambda value: [value])
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    config = parse(f"--run-dir {run_dir} {flags.format(run_dir)}")
    companions: Any = SimpleNamespace(config=config, are_saved=lambda: False)
    command = [sys.executable, "-c", HOLD, str(run_dir)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        done, flag = ("saved", "--save") if flags == "--save {0}" else ("written", "--run-dir")
        with pytest.raises(
            CheckpointError,
            match=f"{run_dir} is being {done} to by process {holder.pid} of .*; end that run, or "
            f"pass another {flag}",
        ):
            check_output(companions, run_dir)
        holder.kill()
    monkeypatch.setattr(output_check, "check_room", lambda _: [])
    monkeypatch.setattr(output_check, "_planned", lambda _: [])
    locks = check_output(companions, run_dir)
    assert [lock is not None for lock in locks] == [bool(flags), flags != "--save {0}"]
    locks.release()
