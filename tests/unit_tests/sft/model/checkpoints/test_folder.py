"""What lies in a folder of checkpoints, and who may write to it."""

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys

import pytest

from megatron.sft.model.checkpoints.checksums import (
    CHECKSUMS,
    faults_in,
    file_names,
    read_checksums,
    sum_of,
    write_checksums,
)
from megatron.sft.model.checkpoints.folder import (
    BEST,
    TRACKER,
    check_load,
    checkpoint_path,
    iterations,
    latest_iteration,
    other_sound_iteration,
    remove_old,
    track,
    unfinished_path,
)
from megatron.sft.model.checkpoints.lock import LOCK, FolderLock


def test_no_folder_and_no_tracker_is_none(tmp_path):
    """The first start of a job with --load must train, and not fail."""
    assert latest_iteration(tmp_path / "missing") is None
    assert latest_iteration(tmp_path) is None
    unfinished_path(checkpoint_path(tmp_path, 5)).mkdir()  # what a run killed while saving leaves
    assert latest_iteration(tmp_path) is None


def test_checkpoints_without_a_tracker_are_refused(tmp_path):
    """Training again would overwrite them."""
    checkpoint_path(tmp_path, 5).mkdir()
    checkpoint_path(tmp_path, 30).mkdir()
    with pytest.raises(
        ValueError, match=f"{TRACKER} is missing, .* up to iter_0000030 .* such as 30"
    ):
        latest_iteration(tmp_path)


@pytest.mark.parametrize("text", ["5", "5\n", " 0000005 \n"])
def test_tracker_names_the_newest(tmp_path, text):
    """Megatron's own tracker ends without a newline, an editor's with one."""
    for iteration in (5, 10):
        checkpoint_path(tmp_path, iteration).mkdir()
    (tmp_path / TRACKER).write_text(text)
    assert latest_iteration(tmp_path) == 5
    assert latest_iteration(str(tmp_path)) == 5


@pytest.mark.parametrize(
    "text", ["", "release", "-5", "5.0", "five", "5 10", "²", "\N{ARABIC-INDIC DIGIT FIVE}"]
)
def test_garbage_is_refused_by_name(tmp_path, text):
    """Training again instead would overwrite the checkpoints of weeks."""
    checkpoint_path(tmp_path, 5).mkdir()
    (tmp_path / TRACKER).write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="correct it") as failure:
        latest_iteration(tmp_path)
    assert str(tmp_path / TRACKER) in str(failure.value)
    assert repr(text) in str(failure.value)


def test_tracker_of_a_missing_checkpoint_is_refused(tmp_path):
    """A checkpoint that was deleted must not be taken for a run that has not begun."""
    (tmp_path / TRACKER).write_text("7")
    with pytest.raises(ValueError, match="'7'"):
        latest_iteration(tmp_path)
    checkpoint_path(tmp_path, 7).write_text("a file, not a folder")
    with pytest.raises(ValueError, match="'7'"):
        latest_iteration(tmp_path)


def test_names_are_megatrons(tmp_path):
    """Tools that find Megatron's checkpoints by name would not find these."""
    assert checkpoint_path(tmp_path, 100) == tmp_path / "iter_0000100"
    assert checkpoint_path(tmp_path, 12345678) == tmp_path / "iter_12345678"
    assert TRACKER == "latest_checkpointed_iteration.txt"


@pytest.mark.parametrize(
    ("made", "load", "hint"),
    [
        ((), "checkpoint", "there is no such folder"),
        (("runs",), "runs", "only --load equal to --save may be new"),
        (("runs/iter_0000005",), "runs/iter_0000005", r"it is one checkpoint: pass --load .*runs$"),
        (("model", "model/config.json"), "model", "pass --pretrained-checkpoint"),
    ],
)
def test_a_load_that_holds_no_checkpoint_is_refused(tmp_path, made, load, hint):
    """A typing error would train from nothing, and say so in a line that scrolls away."""
    for name in made:
        (tmp_path / name).mkdir(parents=True)
    with pytest.raises(ValueError, match=f"--load .*{load} holds no checkpoint; .*{hint}"):
        check_load(tmp_path / load, tmp_path / "save")
    check_load(tmp_path / "save", f"{tmp_path}/./save")  # a job's first start
    check_load(tmp_path / "save", f"{tmp_path}/./save", 5)


def test_a_step_without_a_checkpoint_is_refused(tmp_path):
    """The newest one in its place would be another model."""
    for iteration in (2, 4):
        checkpoint_path(tmp_path, iteration).mkdir()
    track(tmp_path, TRACKER, 4)
    check_load(tmp_path, None, 2)
    with pytest.raises(ValueError, match=r"--ckpt-step 3 must be one of --load .*: 2, 4$"):
        check_load(tmp_path, None, 3)


def checkpoint(folder, iteration):
    """Write one of three files, and their checksums; return its path."""
    path = checkpoint_path(folder, iteration)
    (path / "huggingface").mkdir(parents=True)
    for name in ("__0_0.distcp", ".metadata", "huggingface/config.json"):
        (path / name).write_bytes(name.encode() * 1000)
    write_checksums(path, {name: sum_of(path / name) for name in file_names(path)})
    return path


def faults(path):
    sums = read_checksums(path)
    assert sums is not None
    return faults_in(path, sorted({*sums, *file_names(path)}), sums)


def flip(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (flip, "is damaged"),
        (lambda file: os.truncate(file, 99), "has 99 bytes, but "),
        (lambda file: file.unlink(), "is missing"),
    ],
)
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "huggingface/config.json"])
def test_damage_is_named(tmp_path, name, damage, told):
    """Three of ten flipped bits load without a word, as other weights."""
    path = checkpoint(tmp_path, 5)
    assert faults(path) == []
    damage(path / name)
    (fault,) = faults(path)
    assert str(path / name) in fault
    assert told in fault


def test_a_foreign_file_is_named(tmp_path):
    """A shard of another checkpoint beside the others may be read instead of one of them."""
    path = checkpoint(tmp_path, 5)
    (path / "__1_0.distcp").write_text("of another run")
    assert faults(path) == [f"{path}/__1_0.distcp was not saved with this checkpoint"]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"crc32": 5}', '{"crc32": {"a": 5}}', '{"crc32": {"a": [1]}}', "\xff"]
)
def test_damaged_checksums_are_an_error(tmp_path, text):
    """Read as none, they would let everything pass."""
    path = checkpoint(tmp_path, 5)
    (path / CHECKSUMS).write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=CHECKSUMS):
        read_checksums(path)
    (path / CHECKSUMS).unlink()
    assert read_checksums(path) is None  # of a version that wrote none


def test_the_newest_sound_one_is_found(tmp_path):
    """Whoever has a damaged checkpoint needs the one to go back to."""
    for iteration in (5, 10, 15, 20):
        checkpoint(tmp_path, iteration)
    flip(checkpoint_path(tmp_path, 15) / ".metadata")
    assert other_sound_iteration(tmp_path, damaged=20) == 10
    for iteration in (5, 10):
        (checkpoint_path(tmp_path, iteration) / CHECKSUMS).write_text("{")
    assert other_sound_iteration(tmp_path, damaged=20) is None


@pytest.mark.parametrize(
    ("keep", "best", "left"),
    [(1, None, [20]), (2, None, [15, 20]), (2, 5, [5, 15, 20]), (9, None, [5, 10, 15, 20])],
)
def test_old_ones_are_removed(tmp_path, keep, best, left):
    """A disk that fills up ends a run; the best one is what the run was for."""
    for iteration in (5, 10, 15, 20):
        checkpoint(tmp_path, iteration)
    track(tmp_path, TRACKER, 20)
    if best is not None:
        track(tmp_path, BEST, best)
    remove_old(tmp_path, keep)
    assert iterations(tmp_path) == left


HOLD = """
import sys
from megatron.sft.model.checkpoints.lock import FolderLock
try:
    lock = FolderLock(sys.argv[1])
except ValueError as error:
    sys.exit(str(error))
print("held", flush=True)
sys.stdin.read()
"""


def test_what_is_newer_than_the_tracker_stays(tmp_path):
    """Somebody who went back to an earlier step may want the later ones yet."""
    for iteration in (5, 10, 15, 20):
        checkpoint(tmp_path, iteration)
    track(tmp_path, TRACKER, 10)
    remove_old(tmp_path, 1)
    assert iterations(tmp_path) == [10, 15, 20]


def test_one_run_saves_to_a_folder(tmp_path):
    """Two would overwrite each other's checkpoints; a dead one must not keep others out."""
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(
            ValueError, match=f"being saved to by process {holder.pid} of .*; end that run"
        ):
            FolderLock(tmp_path)
        (unfinished_path(checkpoint_path(tmp_path, 5)) / "some").mkdir(parents=True)
        holder.kill()
    lock = FolderLock(tmp_path)
    assert not unfinished_path(checkpoint_path(tmp_path, 5)).exists()  # of the dead run
    refused = subprocess.run(
        command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    assert f"process {os.getpid()} of" in refused.stderr
    lock.release()
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)


def test_checksums_are_json(tmp_path):
    """Other tools may want to read them."""
    path = checkpoint(tmp_path, 5)
    found = json.loads((path / CHECKSUMS).read_text())["crc32"]
    assert found["__0_0.distcp"] == [12_000, sum_of(path / "__0_0.distcp").crc]


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks(tmp_path, monkeypatch, capsys, number):
    """Users of such a file system were told that another process saves there, and could not train
    at all.
    """

    def refuse(*arguments):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "lockf", refuse)
    FolderLock(tmp_path).release()
    assert f"note: {tmp_path} has no file locks ({os.strerror(number)})" in capsys.readouterr().out


@pytest.mark.parametrize("number", [errno.ENOTEMPTY, errno.ESTALE, errno.EIO, errno.ENOENT])
def test_old_checkpoints_that_cannot_be_removed(tmp_path, monkeypatch, number):
    """NFS keeps a file that somebody reads, and a colleague tidies up: neither is a reason to end
    training.
    """
    for iteration in (1, 2, 3):
        checkpoint_path(tmp_path, iteration).mkdir()
    track(tmp_path, TRACKER, 3)
    remove = shutil.rmtree

    def refuse(path):
        if path.name.endswith("1"):
            raise OSError(number, os.strerror(number), str(path))
        remove(path)

    monkeypatch.setattr(shutil, "rmtree", refuse)
    notes = remove_old(tmp_path, 1)
    assert iterations(tmp_path) == [1, 3]
    expected = [
        f"{checkpoint_path(tmp_path, 1)} could not be removed ({os.strerror(number)}); remove it "
        "by hand"
    ]
    assert notes == ([] if number == errno.ENOENT else expected)


def test_a_folder_that_was_removed_is_held_again(tmp_path):
    """A run whose folder was removed makes it again, where another run could then save, too."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    lock = FolderLock(folder)
    before = (folder / LOCK).stat().st_ino
    lock.renew()
    assert (folder / LOCK).stat().st_ino == before
    shutil.rmtree(folder)
    lock.renew()
    code = "import sys; from megatron.sft.model.checkpoints.lock import FolderLock as L;"
    code += "L(sys.argv[1])"
    other = [sys.executable, "-c", code, str(folder)]
    done = subprocess.run(other, capture_output=True, text=True)
    assert f"{folder} is being saved to by process {os.getpid()} of " in done.stderr
    lock.release()
    assert subprocess.run(other).returncode == 0


def test_a_tracker_that_is_a_folder(tmp_path):
    """As a copy that went wrong leaves it; it ended in Python's words."""
    (tmp_path / TRACKER).mkdir()
    with pytest.raises(ValueError, match=r"must be a file with the iteration of a checkpoint"):
        latest_iteration(tmp_path)


@pytest.mark.parametrize(
    "forged",
    [
        {},
        {"../common.pt": [1, 2]},
        {"/etc/passwd": [1, 2]},
        {"common.pt": None},
        {"common.pt": [1.5, 2]},
        {"common.pt": [1, 2, 3]},
        {"common.pt": [True, 2]},
        [],
    ],
)
def test_forged_checksums_are_refused(tmp_path, forged):
    """Of none at all the checkpoint passed as one of an earlier version, unchecked; others named
    files elsewhere. Python's own words ("'crc32'") say nothing of the file.
    """
    said = r"checksums\.json must hold the sizes and checksums of the checkpoint's files: (it|of) "
    for content in ({"crc32": forged}, forged):
        (tmp_path / CHECKSUMS).write_text(json.dumps(content))
        with pytest.raises(ValueError, match=said):
            read_checksums(tmp_path)
