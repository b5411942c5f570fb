"""pure. The file `index.sqlite` of a prepared folder: the place of each key and of each part.

Reading by index does not need it. It is for lookups by key: joins and side stores, here and in
energon.
"""

import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from megatron.blending.arguments import shown
from megatron.blending.formats.files import join_location, local_path
from megatron.blending.formats.prepared.nv_meta import FOLDER, SQLITE
from megatron.blending.formats.prepared.tar import TarScan

_TABLES = (
    "CREATE TABLE samples (tar_file_id INTEGER NOT NULL, sample_key TEXT NOT NULL UNIQUE, "
    "sample_index INTEGER NOT NULL, byte_offset INTEGER, byte_size INTEGER)",
    "CREATE TABLE sample_parts (tar_file_id INTEGER, sample_index INTEGER, part_name TEXT, "
    "content_byte_offset INTEGER, content_byte_size INTEGER)",
)
_INDEXES = (
    "CREATE INDEX idx_samples_by_tar_and_idx ON samples(tar_file_id, sample_index)",
    "CREATE INDEX idx_sample_parts_seq ON sample_parts(tar_file_id, sample_index, "
    "content_byte_offset)",
    "CREATE INDEX idx_sample_parts_full ON sample_parts(tar_file_id, sample_index, part_name, "
    "content_byte_offset, content_byte_size)",
)
_KEYS_PER_QUERY = 500


class NoIndexError(ValueError):
    """The folder has no index, or none on this machine."""


class DuplicateKeyError(ValueError):
    """Two samples of a data set have the same key."""

    def __init__(self, key: str, shard_ids: tuple[int, int]) -> None:
        super().__init__(f"key {shown(key)} exists twice")
        self.key = key
        self.shard_ids = shard_ids


class SampleIndexWriter:
    """Context that writes an index to a temporary file, which replaces the old index at the end if
    there was no error.

    A sample of two parts takes about 6 microseconds.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._temporary = path + ".tmp"

    def __enter__(self) -> "SampleIndexWriter":
        if os.path.exists(self._temporary):
            os.remove(self._temporary)
        # No journal and no syncing: a temporary file that a crash leaves behind is thrown away.
        self._connection = sqlite3.connect(self._temporary, isolation_level=None)
        for statement in (
            "PRAGMA journal_mode = OFF",
            "PRAGMA synchronous = OFF",
            *_TABLES,
            "BEGIN",
        ):
            self._connection.execute(statement)
        return self

    def add(self, shard_id: int, scan: TarScan) -> None:
        """Adds the samples of a shard. Raises DuplicateKeyError if a key exists already."""
        ends = [*(sample.start for sample in scan.samples[1:]), scan.end]
        rows = (
            (shard_id, _storable(sample.key), number, sample.start, end - sample.start)
            for number, (sample, end) in enumerate(zip(scan.samples, ends))
        )
        try:
            self._connection.executemany("INSERT INTO samples VALUES (?, ?, ?, ?, ?)", rows)
        except sqlite3.IntegrityError as error:
            raise self._duplicate(shard_id, scan) from error
        self._connection.executemany(
            "INSERT INTO sample_parts VALUES (?, ?, ?, ?, ?)",
            (
                (shard_id, number, _storable(part.name), part.start, part.size)
                for number, sample in enumerate(scan.samples)
                for part in sample.parts
            ),
        )

    def _duplicate(self, shard_id: int, scan: TarScan) -> DuplicateKeyError:
        seen: set[str] = set()
        for sample in scan.samples:
            query = "SELECT tar_file_id FROM samples WHERE sample_key = ? AND tar_file_id != ?"
            row = self._connection.execute(query, (_storable(sample.key), shard_id)).fetchone()
            if row or sample.key in seen:
                return DuplicateKeyError(sample.key, (row[0] if row else shard_id, shard_id))
            seen.add(sample.key)
        raise AssertionError("a duplicate key was refused, but there is none")

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            for statement in (*_INDEXES, "COMMIT"):
                self._connection.execute(statement)
        self._connection.close()
        if kind is None:
            os.replace(self._temporary, self._path)
        else:
            os.remove(self._temporary)


class SampleIndex:
    """Finds samples of a prepared folder by their keys, in about 10 microseconds each.

    Each thread of each process opens a connection of its own with its first lookup: sqlite forbids
    a forked process to use its parent's.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._local = threading.local()

    def __reduce__(self) -> Any:
        return SampleIndex, (self._root,)

    def find(self, keys: Iterable[str]) -> dict[str, tuple[int, int]]:
        """Returns (number of the shard in .info.json, number of the sample in it) by key. Unknown
        keys are left out. Raises ValueError if there is no index.
        """
        found: dict[str, tuple[int, int]] = {}
        try:
            connection = self._connection()
            for some in _portions(keys):
                marks = _marks(some)
                query = (
                    "SELECT sample_key, tar_file_id, sample_index FROM samples WHERE "
                    f"sample_key IN ({marks})"
                )
                originals = {_storable(key): key for key in some}
                for key, shard_id, number in connection.execute(query, list(originals)):
                    found[originals[key]] = (int(shard_id), int(number))
        except (sqlite3.Error, TypeError, KeyError, ValueError) as error:
            if isinstance(error, NoIndexError):
                raise
            raise ValueError(
                f"{join_location(self._root, f'{FOLDER}/{SQLITE}')}: damaged: "
                f"{type(error).__name__}: {error}; prepare the data set again"
            ) from error
        return found

    def _connection(self) -> sqlite3.Connection:
        pid, connection = getattr(self._local, "opened", (None, None))
        if connection is None or pid != os.getpid():
            path = local_path(join_location(self._root, f"{FOLDER}/{SQLITE}"))
            if path is None or not os.path.isfile(path):
                raise NoIndexError(
                    f"{self._root}: samples cannot be found by key without a local "
                    f"{FOLDER}/{SQLITE}; prepare it here"
                )
            connection = sqlite3.connect(f"file:{_quoted(path)}?mode=ro", uri=True)
            self._local.opened = os.getpid(), connection
        return connection


def _portions(keys: Iterable[str]) -> Iterator[list[str]]:
    rest = iter(keys)
    while some := list(islice(rest, _KEYS_PER_QUERY)):
        yield some


def _marks(some: list[str]) -> str:
    return ", ".join("?" * len(some))


def _storable(name: str) -> str:
    """Returns a name that sqlite accepts: bytes that are not UTF-8 become escapes (\\\\udcff)."""
    return name.encode("utf-8", "backslashreplace").decode("utf-8")


def _quoted(path: str) -> str:
    return path.replace("%", "%25").replace("?", "%3f").replace("#", "%23")
