"""pure. Reads ranges of bytes of files: local ones by a memory map, URLs through fsspec where it is
installed.

Invariants:
- a read gives the bytes of the range, all of them, or raises; it moves no position that another
  thread or a forked process could share;
- a file may be pickled: it is opened again, as it then is, by who unpickles it.

A local file that is cut short while a run reads it is an error that names it: the system ends a
process that touches a map beyond its file, so the size is looked at before (1 microsecond; once for
records that are read together).
"""

import ctypes
import glob
import mmap
import os
import posixpath
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from megatron.blending.formats.mapped_memory import libc, map_file
from megatron.blending.formats.paths import URL, check_exists

LONG_BYTES = 1 << 18
"""A range of so many bytes is fetched by a call of its own."""
MAX_TEXT_BYTES = 1 << 24
"""Bytes, at most, of a file that is read as a whole to be understood."""


class File(Protocol):
    """A file of fixed content."""

    location: str
    size: int

    def read(self, start: int, end: int) -> bytes:
        """Returns bytes [start, end); ValueError naming the file if it does not reach so far."""

    def array(self, dtype: npt.DTypeLike, start: int = 0, count: int = -1) -> npt.NDArray[Any]:
        """Returns `count` numbers from byte `start` on, to be left as they are; -1: as many as
        whole ones follow.

        Of a local file this is a view: it costs no memory of its own.
        """


def open_file(location: str) -> File:
    """Opens a path or a URL; ValueError naming it if it cannot be opened. 10 to 20 microseconds for
    a local file.
    """
    local = local_path(location)
    return RemoteFile(location) if local is None else LocalFile(local)


def local_path(location: str) -> str | None:
    """Returns the path that `location` is, or None if it is a URL to elsewhere: `file:///a -> /a`,
    `s3://a -> None`.
    """
    if URL not in location:
        return location
    return location.removeprefix("file://") if location.startswith("file://") else None


def join_location(folder: str, name: str) -> str:
    return posixpath.join(folder, name) if URL in folder else os.path.join(folder, name)


def is_file(location: str) -> bool:
    local = local_path(location)
    return _file_system(location).isfile(location) if local is None else os.path.isfile(local)


def is_folder(location: str) -> bool:
    local = local_path(location)
    return _file_system(location).isdir(location) if local is None else os.path.isdir(local)


def list_names(folder: str, pattern: str) -> list[str]:
    """Returns the names of the files below `folder` that match `pattern`, as paths from there,
    sorted.

    `list_names("data", "**/*.tar") -> ["a.tar", "part/b.tar"]`
    """
    local = local_path(folder)
    if local is not None:
        names = glob.glob(pattern, root_dir=local, recursive=True)
        return sorted(name for name in names if os.path.isfile(os.path.join(local, name)))
    system, root = _resolve(folder)
    return sorted(
        posixpath.relpath(path, root) for path in system.glob(posixpath.join(root, pattern))
    )


def read_file(location: str, most_bytes: int = MAX_TEXT_BYTES) -> bytes:
    """Returns all of a small file."""
    file = open_file(location)
    if file.size > most_bytes:
        raise ValueError(
            f"{location}: has {file.size:,} bytes, but must have at most {most_bytes:,}"
        )
    return file.read(0, file.size)


def read_text(path: str, where: str = "") -> str:
    """Returns the content of a small UTF-8 file; ValueError, starting with `where`, if it cannot be
    read.
    """
    check_exists(path, where)
    try:
        return read_file(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        fault = f"{path}: not UTF-8 at byte {error.start + 1}; convert the file"
    except (OSError, ValueError) as error:
        fault = str(error)
    raise ValueError(f"{where}: {fault}".removeprefix(": "))


def read_ranges(ranges: Sequence[tuple[File, int, int]]) -> list[bytes]:
    """Returns the bytes of each (file, start, end); those of one remote file system are asked for
    all at once.
    """
    if all(isinstance(file, LocalFile) for file, _, _ in ranges):
        return [file.read(start, end) for file, start, end in ranges]
    results: list[bytes] = [b""] * len(ranges)
    by_system: dict[int, list[int]] = {}
    for number, (file, start, end) in enumerate(ranges):
        if isinstance(file, RemoteFile):
            by_system.setdefault(id(file.system), []).append(number)
        else:
            results[number] = file.read(start, end)
    for numbers in by_system.values():
        for number, content in zip(numbers, _read_remote([ranges[number] for number in numbers])):
            results[number] = content
    return results


def _read_remote(ranges: Sequence[tuple[Any, int, int]]) -> Iterable[bytes]:
    paths, starts, ends = zip(*((file.path, start, end) for file, start, end in ranges))
    contents = ranges[0][0].system.cat_ranges(
        list(paths), list(starts), list(ends), on_error="raise"
    )
    for (file, start, end), content in zip(ranges, contents):
        yield _checked(content, file, start, end)


def _checked(content: bytes, file: "RemoteFile", start: int, end: int) -> bytes:
    if len(content) != end - start:
        raise ValueError(
            f"{file.location}: {end - start} bytes from {start} on asked for, {len(content)} came"
        )
    return content


class LocalFile:
    """A file mapped into memory. A read costs 1.5 microseconds over the copy of its bytes, most of
    it for `check`.
    """

    def __init__(self, path: str) -> None:
        self.location = path
        self.content, self.size, self._inode = map_file(path)
        """The mapped memory: `content[a:b]` is bytes. Who takes them from here calls `check`
        before.
        """
        self.view = memoryview(self.content).cast("B")[: self.size]
        """The same memory as far as the file goes, for who makes something else of it than bytes.
        """

    def read(self, start: int, end: int) -> bytes:
        if not 0 <= start <= end <= self.size:
            raise ValueError(
                f"{self.location}: bytes {start} to {end} asked for, but it has {self.size}"
            )
        self.check()
        if end - start > LONG_BYTES:
            self.fetch(start, end)
        return self.content[start:end]

    def check(self) -> None:
        """Raises ValueError if the file was cut since it was opened. One that was removed or
        replaced stays mapped.
        """
        try:
            status = os.stat(self.location)
        except OSError:
            return
        if status.st_size < self.size and status.st_ino == self._inode:
            raise ValueError(
                f"{self.location}: was cut from {self.size:,} to {status.st_size:,} bytes while it "
                "was read; restore it"
            )

    def fetch(self, start: int, end: int) -> None:
        """Has the system fetch a long range in one go, instead of page by page."""
        address = ctypes.addressof(self.content) + start
        first = address & -mmap.PAGESIZE
        libc().madvise(first, end - start + address - first, mmap.MADV_WILLNEED)

    def array(self, dtype: npt.DTypeLike, start: int = 0, count: int = -1) -> npt.NDArray[Any]:
        item = np.dtype(dtype).itemsize
        if count < 0:
            count = max(self.size - start, 0) // item
        if start < 0 or start + count * item > self.size:
            raise ValueError(
                f"{self.location}: {count} numbers of {item} bytes from byte {start} on asked for, "
                f"but it has {self.size} bytes; it is cut or damaged"
            )
        numbers = (
            np.frombuffer(self.content, np.uint8, count * item, start)
            if count
            else np.zeros(0, np.uint8)
        )
        # Numpy takes the map for writable memory; to write there would end the process.
        numbers.flags.writeable = False
        return numbers.view(dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        return LocalFile, (self.location,)


class RemoteFile:
    """A file that fsspec reads. Every read is a request: `read_ranges` makes many at once."""

    def __init__(self, location: str) -> None:
        self.location = location
        self.path = _resolve(location)[1]
        try:
            self.size = int(self.system.size(self.path))
        except (OSError, TypeError) as error:
            raise ValueError(
                f"{location}: cannot be opened: {error or type(error).__name__}"
            ) from error

    @property
    def system(self) -> Any:
        """The file system, which fsspec keeps, one for each process: a forked one must not use its
        parent's.
        """
        return _file_system(self.location)

    def read(self, start: int, end: int) -> bytes:
        if start == end:
            return b""
        return _checked(self.system.cat_file(self.path, start, end), self, start, end)

    def array(self, dtype: npt.DTypeLike, start: int = 0, count: int = -1) -> npt.NDArray[Any]:
        item = np.dtype(dtype).itemsize
        if count < 0:
            count = max(self.size - start, 0) // item
        return np.frombuffer(self.read(start, start + count * item), dtype)

    def stream(self) -> Any:
        """Returns a file object, as libraries that read by themselves want one."""
        return self.system.open(self.path, "rb")

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteFile, (self.location,)


def _resolve(location: str) -> tuple[Any, str]:
    try:
        import fsspec
    except ImportError as error:
        raise ValueError(f"{location}: reading URLs needs fsspec; pip install fsspec") from error
    try:
        system, path = fsspec.core.url_to_fs(location)
    except (ValueError, ImportError) as error:
        raise ValueError(f"{location}: {error}") from error
    return system, path


def _file_system(location: str) -> Any:
    return _resolve(location)[0]
