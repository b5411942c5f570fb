"""Which checkpoint a run continues from."""

import pytest

from megatron.sft.model.checkpoint import TRACKER, checkpoint_path, latest_iteration


def test_no_folder_and_no_tracker_is_none(tmp_path):
    """The first start of a job with --load must train, and not fail."""
    assert latest_iteration(tmp_path / "missing") is None
    assert latest_iteration(tmp_path) is None
    checkpoint_path(tmp_path, 5).mkdir()  # what a run killed while saving leaves
    assert latest_iteration(tmp_path) is None


@pytest.mark.parametrize("text", ["5", "5\n", " 0000005 \n"])
def test_tracker_names_the_newest(tmp_path, text):
    """Megatron's own tracker ends without a newline, an editor's with one."""
    for iteration in (5, 10):
        checkpoint_path(tmp_path, iteration).mkdir()
    (tmp_path / TRACKER).write_text(text)
    assert latest_iteration(tmp_path) == 5
    assert latest_iteration(str(tmp_path)) == 5


@pytest.mark.parametrize("text", ["", "release", "-5", "5.0", "five", "5 10", "²", "\N{ARABIC-INDIC DIGIT FIVE}"])
def test_garbage_is_refused_by_name(tmp_path, text):
    """Training anew instead would overwrite the checkpoints of weeks."""
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
