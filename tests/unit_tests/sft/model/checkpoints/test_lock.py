"""One run at a time writes to a folder."""

import errno
import fcntl
import os
import shutil
import subprocess
import sys

import pytest

from megatron.sft.model.checkpoints.folder import checkpoint_path, unfinished_path
from megatron.sft.model.checkpoints.lock import LOCK, FolderLock

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
