"""pure. Locks a folder that a run writes to. The operating system frees the lock when the process
ends, even if it is killed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
from pathlib import Path
from typing import IO

from megatron.packing.folder_gate import open_output
from megatron.sft.model.checkpoints.folder import BEST, TRACKER, UNFINISHED

LOCK = ".lock"
OUTPUTS = (LOCK, f"{TRACKER}*", f"{BEST}*", f"iter_*{UNFINISHED}")
"""Patterns of what a run writes into a folder of checkpoints, before a checkpoint is complete."""
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of locking on a file system without locks."""


class FolderLock:
    """Lock of the process that writes to a folder, so that two runs never write to the same one.

    It is a POSIX record lock: child processes (data workers) do not inherit it, so that one that
    outlives the run does not keep the folder locked.
    """

    def __init__(self, folder: str | Path, flag: str = "--save") -> None:
        """Takes the lock, and removes unfinished checkpoints of runs that died. Raises ValueError,
        naming the holder and `flag`, if another process has the lock.

        On a file system without locks it prints a note and takes none.
        """
        self._path = Path(folder) / LOCK
        self._flag = flag
        self._file = self._locked()
        for left in Path(folder).glob(f"iter_*{UNFINISHED}"):
            shutil.rmtree(left, ignore_errors=True)

    def renew(self) -> None:
        """Takes the lock again if the folder was removed, and another was made at its place.

        Raises ValueError if another process has taken it.
        """
        try:
            is_in_place = os.path.samestat(self._path.stat(), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            is_in_place = False
        if not is_in_place:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            before, self._file = self._file, self._locked()
            before.close()

    def release(self) -> None:
        """Frees the lock."""
        self._file.close()

    def _locked(self) -> IO[str]:
        folder, file = self._path.parent, open_output(self._path, "a+")
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                print(
                    f"note: {folder} has no file locks ({error.strerror}); see that no other run "
                    f"{'saves' if self._flag == '--save' else 'writes'} there",
                    flush=True,
                )
                return file
            file.seek(0)
            holder = file.read(200).strip() or "another process"
            file.close()
            done = "saved" if self._flag == "--save" else "written"
            raise ValueError(
                f"{folder} is being {done} to by {holder}; end that run, or pass another "
                f"{self._flag}"
            ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} of {socket.gethostname()}\n")
        file.flush()
        return file
