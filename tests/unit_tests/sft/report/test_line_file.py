"""A run goes on whatever becomes of the files that it only tells in."""

import errno
import shutil

import pytest

from megatron.sft.report.line_file import LineFile
from megatron.sft.report.metrics_file import read_metrics
from megatron.sft.report.metrics_writer import MetricsWriter
from tests.unit_tests.sft.runs import step


@pytest.mark.parametrize("removed", ["file", "folder"])
def test_a_removed_file_is_made_again_with_all_lines(tmp_path, capsys, removed):
    """Lines went to a file without a name: a run of days had no metrics, and its report ended it
    with an error.
    """
    writer = MetricsWriter(tmp_path / "run", train_iters=3, log_interval=9)
    writer.event("run", iteration=0, seq_length=1000)
    writer.step(step(1))
    if removed == "file":
        (tmp_path / "run/metrics.jsonl").unlink()
    else:
        shutil.rmtree(tmp_path / "run")
    writer.step(step(2))
    writer.step(step(3))
    writer.close()
    metrics = read_metrics(tmp_path / "run")
    assert [found.iteration for found in metrics.steps] == [1, 2, 3]
    assert len(metrics.events) == 1
    assert (
        capsys.readouterr().out.count("metrics.jsonl was removed while the run writes to it") == 1
    )


def test_a_file_that_another_program_replaced_is_appended_to(tmp_path):
    """As editors save it: its lines must not stand in it twice."""
    file = LineFile(tmp_path / "lines")
    file.write("1\n")
    (tmp_path / "other").write_text("one\n")
    (tmp_path / "other").replace(tmp_path / "lines")
    file.write("2\n")
    file.close()
    assert (tmp_path / "lines").read_text() == "one\n2\n"


def test_what_cannot_be_written_is_noted_once(tmp_path, monkeypatch, capsys):
    """A full disk ended a run; what is written later begins a line of its own."""
    file = LineFile(tmp_path / "lines")
    file.write("1\n")
    full = open("/dev/full", "w", buffering=1)  # noqa: SIM115 - closed by the file
    monkeypatch.setattr(file, "_is_in_place", lambda: True)
    real, file._file = file._file, full
    file.write("2\n")
    file.write("3\n")
    file._file = real
    file.write("4\n")
    file.close()
    with pytest.raises(OSError, match="No space left"):
        full.close()
    assert (tmp_path / "lines").read_text() == "1\n4\n"
    (note,) = capsys.readouterr().out.splitlines()
    assert note.startswith(f"note: {tmp_path / 'lines'} cannot be written: [Errno {errno.ENOSPC}]")


def test_a_folder_that_became_a_file_is_noted(tmp_path, capsys):
    """Neither the file nor its folder can be made again."""
    file = LineFile(tmp_path / "run/lines")
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "run").write_text("")
    file.write("1\n")
    file.close()
    assert "cannot be written: " in capsys.readouterr().out


def test_a_board_that_cannot_be_written_is_left_out(tmp_path, capsys):
    """TensorBoard writes beside the checkpoints, to a disk that fills up."""

    class Board:
        def add(self, values, iteration):
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self):
            raise OSError(errno.ENOSPC, "No space left on device")

    writer = MetricsWriter(tmp_path, train_iters=3, log_interval=9, boards=[Board()])
    writer.step(step(1))
    writer.step(step(2))
    writer.close()
    assert (
        capsys.readouterr().out.count(
            "note: Board failed (OSError: [Errno 28] No space left on device); training continues "
            "without it"
        )
        == 1
    )
