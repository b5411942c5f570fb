"""pure. Reads ranges of bytes: local files through a memory map, URLs through fsspec.

Invariants:
- A read returns all bytes of the range, or raises. It moves no position that another thread or a
  forked process could share.
- A file can be pickled. Unpickling opens it again, with the content it has by then.

If a mapped file is truncated, the operating system kills any process that touches the missing part.
So the size is checked before each read (1 microsecond, once for records that are read together),
and a truncated file is an error with its name.
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
"""Size of a range above which the system is asked to fetch it in one go."""
MAX_TEXT_BYTES = 1 << 24
"""Maximum size of a file that is read as a whole (YAML, JSON)."""


class File(Protocol):
    """A file of fixed content."""

    location: str
    size: int

    def read(self, start: int, end: int) -> bytes:
        """Returns bytes [start, end). Raises ValueError, naming the file, if it is shorter."""

    def array(self, dtype: npt.DTypeLike, start: int = 0, count: int = -1) -> npt.NDArray[Any]:
        """Returns `count` numbers from byte `start` on; all that follow if count is -1. The caller
        must not change them.

        For a local file the array is a view of the mapped file, without memory of its own.
        """


def open_file(location: str) -> File:
    """Opens a path or a URL. Raises ValueError, naming it, if it cannot be opened. A local file
    takes 10 to 20 microseconds.
    """
    local = local_path(location)
    return RemoteFile(location) if local is None else LocalFile(local)


def local_path(location: str) -> str | None:
    """Returns the local path of `location`; None if it is a remote URL: `file:///a -> /a`, `s3://a
    -> None`.
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
    """Returns the sorted paths, relative to `folder`, of the files below it that match `pattern`.

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
    """Returns the content of a small file. Raises ValueError if it has over `most_bytes`."""
    file = open_file(location)
    if file.size > most_bytes:
        raise ValueError(
            f"{location}: has {file.size:,} bytes, but must have at most {most_bytes:,}"
        )
    return file.read(0, file.size)


def read_text(path: str, where: str = "") -> str:
    """Returns the content of a small UTF-8 file. Raises ValueError, starting with `where`, if it
    cannot be read.
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
    """Returns the bytes of each (file, start, end). Ranges on the same remote file system are
    requested all at once.
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
    """A file mapped into memory. A read takes 1.5 microseconds in addition to the copy of its
    bytes, most of them for `check`.
    """

    def __init__(self, path: str) -> None:
        self.location = path
        self.content, self.size, self._inode = map_file(path)
        """The mapped memory: `content[a:b]` is bytes. Whoever reads it directly must call `check`
        before.
        """
        self.view = memoryview(self.content).cast("B")[: self.size]
        """The bytes of the file as a memoryview, for readers that need no copy."""

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
        """Raises ValueError if the file was truncated since it was opened. A file that was removed
        or replaced stays mapped, and can still be read.
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
        """Asks the operating system to fetch a long range in one go instead of page by page."""
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
        # Numpy believes the map to be writable, but the system would kill a process that writes.
        numbers.flags.writeable = False
        return numbers.view(dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        return LocalFile, (self.location,)


class RemoteFile:
    """A file that fsspec reads. Every read is a request; `read_ranges` sends many at once."""

    def __init__(self, location: str) -> None:
        self.location = location
        self.path = _resolve(location)[1]
        try:
            self.size = int(self.system.size(self.path))
        except Exception as error:  # fsspec's systems raise what their HTTP libraries do
            raise ValueError(
                f"{location}: cannot be opened: {error or type(error).__name__}"
            ) from error

    @property
    def system(self) -> Any:
        """File system object of fsspec, which caches one per process: a forked process must not use
        its parent's.
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
        """Returns a Python file object, for libraries that do the reading (pyarrow)."""
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
