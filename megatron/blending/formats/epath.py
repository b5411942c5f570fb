"""pure. energon's EPath: a local path or a URL with methods like pathlib's.

    folder = EPath("/data/shards")
    sorted(path.name for path in folder.glob("*.tar"))

A URL (`s3://bucket/data`) is read and written through fsspec.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

URL = "://"


class EPath:
    """A local path or a URL. It is compared, sorted and hashed as its URL or absolute path. Local
    paths may start with `~` or `.`.
    """

    def __init__(
        self, initial_path: str | os.PathLike[str] | EPath, config_override: object = None
    ) -> None:
        """`config_override` is of energon's storage client, and must be None."""
        if config_override is not None:
            raise ValueError("EPath: config_override is not supported; configure fsspec instead")
        text = str(initial_path)
        if URL in text:
            protocol, rest = text.split(URL, 1)
            self._text = protocol + URL + posixpath.normpath(rest).removeprefix("./")
        else:
            self._text = os.path.abspath(os.path.expanduser(text))

    @property
    def name(self) -> str:
        """Last part of the path."""
        return posixpath.basename(self._text)

    @property
    def parent(self) -> EPath:
        """Folder of the path."""
        protocol, mark, rest = self._text.rpartition(URL)
        return EPath(protocol + mark + (posixpath.dirname(rest) or "."))

    @property
    def url(self) -> str:
        """URL, or local path."""
        return self._text

    @property
    def display_name(self) -> str:
        """Path for messages."""
        return self._text

    def is_local(self) -> bool:
        """Returns whether it is a local path."""
        return URL not in self._text

    def local_path(self) -> Path:
        """Returns a path of pathlib. Raises ValueError for a URL."""
        if not self.is_local():
            raise ValueError(f"{self} is no local path; copy it here first")
        return Path(self._text)

    def open(self, mode: str = "r", block_size: int | None = None, **options: Any) -> Any:
        """Opens the file. A mode that writes creates its folder. `block_size` has no effect."""
        if self.is_local():
            if set(mode) & set("wax"):
                Path(self._text).parent.mkdir(parents=True, exist_ok=True)
            return Path(self._text).open(mode, **options)
        return self._system().open(self._text, mode, **options)

    def read_text(self) -> str:
        """Returns the content of a UTF-8 file."""
        return self.read_bytes().decode()

    def read_bytes(self) -> bytes:
        """Returns the content of a file."""
        with self.open("rb") as file:
            content: bytes = file.read()
        return content

    def write_text(self, text: str) -> None:
        """Replaces the content of a file."""
        self.write_bytes(text.encode())

    def write_bytes(self, data: bytes) -> None:
        """Replaces the content of a file."""
        with self.open("wb") as file:
            file.write(data)

    def copy(self, target: EPath) -> None:
        """Copies a file. Its whole content is read into memory."""
        target.write_bytes(self.read_bytes())

    def move(self, target: EPath) -> None:
        """Moves a file."""
        if self.is_local() and target.is_local():
            os.replace(self._text, str(target))
        else:
            self.copy(target)
            self.unlink()

    def unlink(self) -> None:
        """Removes a file."""
        if self.is_local():
            os.remove(self._text)
        else:
            self._system().rm_file(self._text)

    def mkdir(self, exist_ok: bool = True, parents: bool = False) -> None:
        """Creates a folder. For a URL it does nothing, as object stores have no folders."""
        if self.is_local():
            Path(self._text).mkdir(exist_ok=exist_ok, parents=parents)

    def is_dir(self) -> bool:
        """Returns whether it is a folder."""
        if self.is_local():
            return os.path.isdir(self._text)
        return bool(self._system().isdir(self._text))

    def is_file(self) -> bool:
        """Returns whether it is a file."""
        if self.is_local():
            return os.path.isfile(self._text)
        return bool(self._system().isfile(self._text))

    def size(self) -> int:
        """Returns the size of a file in bytes."""
        if self.is_local():
            return os.path.getsize(self._text)
        return int(self._system().size(self._text))

    def walk(self) -> Iterator[EPath]:
        """Yields all files below a folder, in order of their names. Links to folders are followed,
        except to a folder above, which would have no end.
        """
        if self.is_local():
            for folder, folders, files in os.walk(self._text, followlinks=True):
                above = os.path.realpath(folder) + os.sep
                folders[:] = sorted(
                    name
                    for name in folders
                    if not above.startswith(os.path.realpath(os.path.join(folder, name)) + os.sep)
                )
                yield from (EPath(os.path.join(folder, name)) for name in sorted(files))
        else:
            protocol = self._text.split(URL, 1)[0]
            found = (path.lstrip("/") for path in sorted(self._system().find(self._text)))
            yield from (EPath(path if URL in path else protocol + URL + path) for path in found)

    def glob(self, pattern: str) -> Iterator[EPath]:
        """Yields the files below a folder whose relative path matches, in order. `**` matches any
        number of folders, also none.
        """
        parts = pattern.split("/")
        for path in self.walk():
            if _matches(path.relative_to(self).split("/"), parts):
                yield path

    def with_suffix(self, suffix: str) -> EPath:
        """Returns the path with another suffix, such as ".json"."""
        return EPath(posixpath.splitext(self._text)[0] + suffix)

    def relative_to(self, other: EPath) -> str:
        """Returns the path relative to a folder. Raises ValueError if it is not below it."""
        start = str(other).rstrip("/") + "/"
        if not self._text.startswith(start):
            raise ValueError(f"{self} is not below {other}")
        return self._text.removeprefix(start)

    def _system(self) -> Any:
        try:
            import fsspec
        except ImportError as error:
            raise ValueError(f"{self}: reading URLs needs fsspec; pip install it") from error
        return fsspec.core.url_to_fs(self._text)[0]

    def __truediv__(self, other: str | EPath) -> EPath:
        """Joins two paths. If `other` is absolute or a URL, it is the result."""
        text = str(other)
        if isinstance(other, EPath) or URL in text or os.path.isabs(text):
            return EPath(text)
        return EPath(f"{self._text.rstrip('/')}/{text}")

    def __fspath__(self) -> str:
        return str(self.local_path())

    def __str__(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return f"EPath({self._text!r})"

    def __hash__(self) -> int:
        return hash(self._text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EPath) and self._text == other._text

    def __lt__(self, other: EPath) -> bool:
        return self._text < other._text


def _matches(names: Sequence[str], parts: Sequence[str]) -> bool:
    """Returns whether the parts of a path match those of a pattern: `["a", "b", "c.tar"]` matches
    `["**", "*.tar"]`.
    """
    if not parts:
        return not names
    if parts[0] == "**":
        return any(_matches(names[start:], parts[1:]) for start in range(len(names) + 1))
    return bool(names) and fnmatchcase(names[0], parts[0]) and _matches(names[1:], parts[1:])
