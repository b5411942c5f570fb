"""pure. Maps files into memory, by mmap of the C library."""

import ctypes
import mmap
import os
import stat
import weakref
from functools import cache
from typing import Any


class _Map(ctypes.Array):  # type: ignore[type-arg]
    """Mapped memory, whose slices are bytes. The type is longer than any file, so that one type
    serves all files: ctypes never frees a type.
    """

    _type_ = ctypes.c_char
    _length_ = 1 << 47


@cache
def libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_longlong]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc


def map_file(path: str) -> tuple[Any, int, int]:
    """Maps a file into memory. Returns the map, the size of the file and its inode number.

    Python's own `mmap` is not used: it keeps a file descriptor open for each map. A process often
    may have 1024 of them, and a thousand sources have tens of thousands of shards.
    """
    try:
        # O_NONBLOCK: opening a pipe returns at once, instead of waiting for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise ValueError(f"{path}: cannot be opened: it is no regular file")
            size = status.st_size
            if size == 0:
                return _Map.from_address(0), 0, status.st_ino
            mapped = map_descriptor(descriptor, size, mmap.PROT_READ)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ValueError(f"{path}: cannot be opened: {error.strerror}") from error
    return mapped, size, status.st_ino


def map_descriptor(descriptor: int, size: int, protection: int) -> Any:
    """Maps `size` bytes of an open file, which may be closed afterwards. Raises OSError if that
    fails. The memory is unmapped when the last reference to it is gone.
    """
    address = libc().mmap(None, size, protection, mmap.MAP_SHARED, descriptor, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    mapped = _Map.from_address(address)
    weakref.finalize(mapped, libc().munmap, address, size).atexit = False
    return mapped
