"""pure. The gate of folders that may come from others: files that are opened for writing, and names
that stay in the folder.

Whoever continues a run in a downloaded folder writes into it. A symbolic link in place of one of
its files (`.lock -> ~/.bashrc`) would make the run overwrite a file of the user's. Only the last
part of a path is looked at: the folder itself may be a link, as `runs -> /big/disk`. Links are fine
where files are only read: the cache of the HuggingFace hub consists of them.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable
from pathlib import Path, PurePath
from typing import IO, Any

_LINK = "it is a symbolic link, which is not written through; remove it"
_IRREGULAR = "it is no regular file; remove it"


def open_output(path: str | os.PathLike[str], mode: str = "w", **options: Any) -> IO[Any]:
    """Opens a file for writing, as `open` does. Raises OSError, naming it, if there is a symbolic
    link at its place, or anything else but a regular file.
    """
    return open(path, mode, opener=_open_regular_file, **options)


def _open_regular_file(path: str, flags: int) -> int:
    try:
        # O_NONBLOCK: opening a pipe returns at once, instead of waiting for a reader.
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        # Linux reports a link as a loop, and a pipe without a reader as a missing device.
        if error.errno == errno.ELOOP and os.path.islink(path):
            raise OSError(errno.ELOOP, _LINK, path) from None
        if error.errno == errno.ENXIO:
            raise OSError(errno.EINVAL, _IRREGULAR, path) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, _IRREGULAR, path)
    return descriptor


def write_output(path: str | os.PathLike[str], text: str) -> None:
    """Writes a text file in UTF-8; see `open_output`."""
    with open_output(path, encoding="utf-8") as file:
        file.write(text)


def check_outputs(folder: str | os.PathLike[str], patterns: Iterable[str], flag: str) -> None:
    """Raises ValueError if a file that will be written into `folder` is a symbolic link now.

    patterns: names that will be written, as for `Path.glob`. flag: option that names the folder.
    """
    for pattern in patterns:
        for path in sorted(Path(folder).glob(pattern)):
            if path.is_symlink():
                raise ValueError(
                    f"{path} is a symbolic link to {os.readlink(path)!s:.200}, which the run would "
                    f"write through; remove it, or pass another {flag}"
                )


def is_below(name: str) -> bool:
    """Returns whether a relative path stays in its folder: `a/b.bin`, and neither `/etc/hosts` nor
    `../b.bin`.
    """
    path = PurePath(name)
    return not path.is_absolute() and ".." not in path.parts and path.parts != ()
