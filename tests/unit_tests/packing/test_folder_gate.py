"""Folders that come from others: what is written goes into them, and nowhere else."""

import os
from pathlib import Path

import pytest

from megatron.packing.folder_gate import check_outputs, is_below, open_output, write_output


@pytest.mark.parametrize("mode", ["w", "wb", "a+", "r+b", "x"])
@pytest.mark.parametrize("exists", [True, False])
def test_links_are_not_written_through(tmp_path: Path, mode: str, exists: bool) -> None:
    """A run in a stranger's folder would truncate a file of the user's, or make one."""
    victim, link = tmp_path / "victim", tmp_path / "folder" / ".lock"
    link.parent.mkdir()
    link.symlink_to(victim)
    if exists:
        victim.write_text("precious")
    with pytest.raises(OSError, match=r"symbolic link|File exists") as failure:
        open_output(link, mode)
    assert failure.value.filename == str(link)
    assert victim.exists() == exists
    assert not exists or victim.read_text() == "precious"


@pytest.mark.parametrize("mode", ["w", "a+"])
def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path, mode: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="no regular file"):
        open_output(tmp_path / "pipe", mode)


def test_files_are_written_as_by_open(tmp_path: Path) -> None:
    """Also in a folder that is a link itself, as runs on a big disk are."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs").symlink_to("disk")
    before = os.umask(0o022)
    try:
        write_output(tmp_path / "runs" / "file", "gr\u00fcn")
    finally:
        os.umask(before)
    assert (tmp_path / "disk" / "file").read_bytes() == "gr\u00fcn".encode()
    assert (tmp_path / "disk" / "file").stat().st_mode & 0o777 == 0o644
    write_output(tmp_path / "disk" / "file", "b")
    assert (tmp_path / "disk" / "file").read_text() == "b"


def test_links_at_places_of_outputs_are_named_before_the_run(tmp_path: Path) -> None:
    """After a step, work would be lost. Links of other names are the user's own affair."""
    (tmp_path / "iter_0000004").symlink_to("elsewhere")
    (tmp_path / "metrics.jsonl").touch()
    check_outputs(tmp_path, ("metrics.jsonl", "schedule_*"), "--run-dir")
    (tmp_path / "schedule_3.html").symlink_to("elsewhere")
    with pytest.raises(
        ValueError, match=r"schedule_3.html is a symbolic link to elsewhere, .*--run"
    ):
        check_outputs(tmp_path, ("metrics.jsonl", "schedule_*"), "--run-dir")


@pytest.mark.parametrize(
    ("name", "stays"),
    [
        ("a.bin", True),
        ("huggingface/a..b", True),
        ("../a", False),
        ("a/../../b", False),
        ("/etc/hosts", False),
        ("", False),
        (".", False),
    ],
)
def test_names_stay_in_the_folder(name: str, stays: bool) -> None:
    assert is_below(name) == stays
