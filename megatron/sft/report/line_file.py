"""pure. A file that a run appends lines to. A failure never ends the run: it is printed once."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import IO

from megatron.packing.folder_gate import open_output


class LineFile:
    """A file of lines. A line is in the file when `write` returns, so that a killed run keeps it.

    If the file is removed, it is written again with all earlier lines. A line that cannot be
    written is skipped. Each line costs two system calls in addition to the write.
    """

    def __init__(self, path: Path) -> None:
        """Opens the file, and creates its folder. Raises OSError if that fails."""
        self._path = path
        self._noted: set[str] = set()
        self._file = self._open()

    def write(self, line: str) -> None:
        """Appends a line, its newline included."""
        try:
            if not self._is_in_place():
                self._replace()
            self._file.write(line)
        except OSError as error:
            self._note(f"{self._path} cannot be written: {error}; its lines are left out")

    def close(self) -> None:
        """Closes the file."""
        try:
            self._file.close()
        except OSError as error:  # the disk was full for the last lines
            self._note(f"{self._path} cannot be written: {error}; its lines are left out")

    def _open(self) -> IO[str]:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # Line-buffered, so that a killed run keeps its lines.
        return open_output(self._path, "a+", encoding="utf-8", buffering=1)

    def _is_in_place(self) -> bool:
        # The file at the path is still the open one if it has the same device and inode.
        try:
            return os.path.samestat(self._path.stat(), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False

    def _replace(self) -> None:
        """Opens the file that is at the path now. If there is none, makes it again from the old
        file, which this process still has open.
        """
        is_removed, before = not self._path.exists(), self._file
        self._file = self._open()
        with before:
            if is_removed:
                self._note(f"{self._path} was removed while the run writes to it; it is made again")
                before.seek(0)
                shutil.copyfileobj(before, self._file)

    def _note(self, text: str) -> None:
        if text not in self._noted:
            print(f"note: {text}", flush=True)
            self._noted.add(text)
