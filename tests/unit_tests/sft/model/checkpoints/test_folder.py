"""What lies in a folder of checkpoints."""

import errno
import os
import shutil

import pytest

from megatron.sft.model.checkpoints.folder import (
    BEST,
    TRACKER,
    check_load,
    checkpoint_path,
    iterations,
    latest_iteration,
    remove_old,
    track,
    unfinished_path,
)
from tests.unit_tests.sft.model.checkpoints.small_checkpoints import checkpoint


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


def test_what_is_newer_than_the_tracker_stays(tmp_path):
    """Somebody who went back to an earlier step may want the later ones yet."""
    for iteration in (5, 10, 15, 20):
        checkpoint(tmp_path, iteration)
    track(tmp_path, TRACKER, 10)
    remove_old(tmp_path, 1)
    assert iterations(tmp_path) == [10, 15, 20]


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


def test_a_tracker_that_is_a_folder(tmp_path):
    """As a copy that went wrong leaves it; it ended in Python's words."""
    (tmp_path / TRACKER).mkdir()
    with pytest.raises(ValueError, match=r"must be a file with the iteration of a checkpoint"):
        latest_iteration(tmp_path)
