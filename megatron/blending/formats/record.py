"""pure. A record source: a fixed sequence of dicts, read in any order.

    source = open_source("train.jsonl")
    len(source), source[17]    ->    (1000, {"text": "..."})

A source is read-only and can be pickled. Forked processes and threads may read it at the same time,
since no read moves a shared position. An unusable file raises ValueError when it is opened. An
unusable record raises `RecordError` when it is read, so that a caller may skip and count it.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from megatron.blending.formats.files import File, read_ranges

Record = dict[str, Any]

PROBE_BYTES = 4096
"""Bytes of a block that a fingerprint reads."""
_PROBE_SPACING = 1 << 19
_MIN_PROBES, _MAX_PROBES = 64, 256


class RecordError(ValueError):
    """A record cannot be used. The message starts with its place: "train.jsonl:17: ..."."""


ReadRecords = Callable[[Sequence[int]], "list[Record | RecordError]"]
"""Reads many records, as `RecordSource.read` does."""


class RecordSource(Protocol):
    """A fixed sequence of records. An index outside range(len(source)) raises IndexError.

    A subclass must define `__getitem__` or `read`: the default of each calls the other.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Record:
        """Returns record `index`, which the caller must not change. Raises RecordError if it cannot
        be used.
        """
        record = self.read([index])[0]
        if isinstance(record, RecordError):
            raise record
        return record

    def read(self, indices: Sequence[int]) -> list[Record | RecordError]:
        """Returns many records, in the order of `indices`. The place of an unusable record holds
        its error.
        """
        return read_each(self, indices)

    def describe(self, index: int) -> str:
        """Returns the place of record `index` for a person to find it: "train.jsonl:17" or
        "x.parquet row 5".
        """

    def fingerprint(self) -> str:
        """Returns 32 or 64 hex digits that differ for other data, and stay the same if files are
        moved.

        They are hashes of sizes, number of records and evenly spread blocks of 4 KiB, so that it
        takes milliseconds. An edit of a large file that keeps its size and lies between these
        blocks is not noticed.
        """


class FileSource(RecordSource):
    """The records of one file. Pickling keeps the path alone; unpickling opens the file again."""

    _file: File

    def __init__(self, path: str) -> None:
        self._path = path
        self._open()

    def _open(self) -> None:
        raise NotImplementedError

    def fingerprint(self) -> str:
        # Earlier versions had the first half alone, and checkpoints hold it.
        num_records = len(self)
        dense = fingerprint_file(self._file, num_records, count_probes(self._file.size))
        return fingerprint_file(self._file, num_records) + dense

    def __getstate__(self) -> dict[str, Any]:
        return {"_path": self._path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["_path"])  # type: ignore[misc]


def read_each(source: RecordSource, indices: Sequence[int]) -> list[Record | RecordError]:
    """Reads many records one by one: the default of `RecordSource.read`."""
    records: list[Record | RecordError] = []
    for index in indices:
        try:
            records.append(source[index])
        except RecordError as error:
            records.append(error)
    return records


def planned_read(source: RecordSource, indices: Sequence[int]) -> ReadRecords:
    """Returns `source.read` for a plan that reads these records in this order, a few with each
    call. A source whose records are decoded many at once has a method `planned_read` for it.
    """
    # Of its class: a wrapper that passes on attributes must not lose a `read` of its own.
    of_class = getattr(type(source), "planned_read", None)
    return source.read if of_class is None else of_class(source, indices)


def read_records(
    source: RecordSource, indices: Sequence[int], read: ReadRecords | None = None
) -> list[Record | RecordError]:
    """Reads many records of any source. Any exception of a record becomes a RecordError with its
    place: libraries raise dozens of kinds for damaged bytes. `read` replaces `source.read`.
    """
    try:
        return (read or source.read)(indices)
    except Exception as error:
        if len(indices) != 1:  # find the record that failed by reading them one by one
            return [record for index in indices for record in read_records(source, [index], read)]
        if isinstance(error, RecordError):
            return [error]
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        return [
            RecordError(
                f"{source.describe(indices[0])}: cannot be read: "
                f"{kind}{' '.join(str(error).split())}"
            )
        ]


def check_index(index: int, source: RecordSource) -> None:
    if not 0 <= index < len(source):
        raise IndexError(f"index must be in range({len(source)}), but is {index}")


def check_indices(indices: Sequence[int], source: RecordSource) -> None:
    if len(indices) and not (min(indices) >= 0 and max(indices) < len(source)):
        for index in indices:
            check_index(index, source)


def count_probes(size: int) -> int:
    """Returns the number of blocks that a fingerprint of a file reads: at least one in 512 KiB up
    to 128 MiB, so that a lost megabyte is noticed, and 256 of any larger file.
    """
    return min(max(-(-size // _PROBE_SPACING), _MIN_PROBES), _MAX_PROBES)


def probe_starts(size: int, num_probes: int) -> list[int]:
    """Returns where the blocks of a fingerprint begin: the first one at the begin of the file, the
    last one at its end. In a small file they overlap.
    """
    last = max(size - PROBE_BYTES, 0)
    return [last * probe // (num_probes - 1) for probe in range(num_probes)]


def fingerprint_file(file: File, num_records: int, num_probes: int = _MIN_PROBES) -> str:
    """Returns a hash of a file's size, its number of records and `num_probes` evenly spread blocks
    of 4 KiB.
    """
    digest = hashlib.blake2b(f"{file.size} bytes {num_records} records".encode(), digest_size=16)
    starts = probe_starts(file.size, num_probes)
    for block in read_ranges(
        [(file, start, min(start + PROBE_BYTES, file.size)) for start in starts]
    ):
        digest.update(block)
    return digest.hexdigest()
