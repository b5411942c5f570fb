"""pure. A source of records is a fixed sequence of dicts, read in any order.

A source is read-only, may be pickled, and may be read by forked processes and by threads at the
same time: no read moves a position that they share. A file that cannot be used at all is a
ValueError when it is opened; a record that cannot be used is a `RecordError` when it is read, so
that a caller may skip and count it.
"""

import hashlib
from collections.abc import Sequence
from typing import Any, Protocol

from megatron.blending.formats.files import File, read_ranges

Record = dict[str, Any]

_PROBE_BYTES = 4096


class RecordError(ValueError):
    """Raised for a record that cannot be used.

    The message starts with where it stands: "train.jsonl:17: ...".
    """


class RecordSource(Protocol):
    """A fixed sequence of records. An index outside range(len(source)) is an IndexError.

    What is derived from it must define `__getitem__` or `read`: each has a default by the other.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Record:
        """Reads record `index`, to be left as it is by the caller; RecordError if it cannot be
        used."""
        record = self.read([index])[0]
        if isinstance(record, RecordError):
            raise record
        return record

    def read(self, indices: Sequence[int]) -> list[Record | RecordError]:
        """Reads many records, in the order asked for; for one that cannot be used the error stands
        in its place.
        """
        return read_each(self, indices)

    def describe(self, index: int) -> str:
        """Says where record `index` stands, for a person to find it: "train.jsonl:17" or "x.parquet
        row 5".
        """

    def fingerprint(self) -> str:
        """Returns 32 hex digits that stay the same when the data is moved, and change when it is
        other data.

        Made of sizes, numbers of records and 64 evenly spread blocks of 4 KiB, so it costs
        milliseconds; an edit that keeps the size and lies between the blocks of a large file goes
        unseen.
        """


class FileSource(RecordSource):
    """The records of one file. It is pickled as its path, and opened again by who unpickles it."""

    _file: File

    def __init__(self, path: str) -> None:
        self._path = path
        self._open()

    def _open(self) -> None:
        raise NotImplementedError

    def fingerprint(self) -> str:
        return fingerprint_file(self._file, len(self))

    def __getstate__(self) -> dict[str, Any]:
        return {"_path": self._path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["_path"])  # type: ignore[misc]


def read_each(source: RecordSource, indices: Sequence[int]) -> list[Record | RecordError]:
    """Reads many records one by one: `read` of a source that has no faster way."""
    records: list[Record | RecordError] = []
    for index in indices:
        try:
            records.append(source[index])
        except RecordError as error:
            records.append(error)
    return records


def read_records(source: RecordSource, indices: Sequence[int]) -> list[Record | RecordError]:
    """Reads many records of any source: for one that cannot be read, whatever was raised, a
    RecordError that says where it stands. Libraries that decode raise dozens of kinds on damaged
    bytes.
    """
    try:
        return source.read(indices)
    except Exception as error:
        if len(indices) != 1:
            return [record for index in indices for record in read_records(source, [index])]
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


def fingerprint_file(file: File, num_records: int, num_probes: int = 64) -> str:
    """Returns 32 hex digits of size, number of records and `num_probes` evenly spread blocks of 4
    KiB.
    """
    digest = hashlib.blake2b(f"{file.size} bytes {num_records} records".encode(), digest_size=16)
    last = max(file.size - _PROBE_BYTES, 0)
    starts = [last * probe // (num_probes - 1) for probe in range(num_probes)]
    for block in read_ranges(
        [(file, start, min(start + _PROBE_BYTES, file.size)) for start in starts]
    ):
        digest.update(block)
    return digest.hexdigest()
