"""pure. Random access to the records of one file: (source, index) -> record, a dict.

`open_source(path)` picks the kind by the suffix. A source is read-only, may be pickled, and may be read by forked
processes at the same time: no read moves a shared file position.

A file that cannot be used at all is a ValueError at `open_source`; a record that cannot be used is a `RecordError` when
it is read, so that a caller may skip and count it.
"""

import bisect
import hashlib
import json
import os
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.parquet

Record = dict[str, Any]

_SCAN_BYTES = 1 << 24
_FINGERPRINT_PROBES = 64
_FINGERPRINT_PROBE_BYTES = 4096
_CACHED_ROW_GROUPS = 4
_JSON_SPACE = b" \t\r\n"
_UTF8_BOM = b"\xef\xbb\xbf"


class RecordError(ValueError):
    """One record cannot be used. The message starts with where it stands: "train.jsonl:17: ..."."""


class RecordSource(Protocol):
    """A fixed sequence of records. An index outside range(len(source)) is an IndexError."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Record:
        """Read record `index`, to be left as it is by the caller; RecordError if it is not a JSON object."""

    def describe(self, index: int) -> str:
        """Say where record `index` stands, for a person to find it: "train.jsonl:17" or "x.parquet row 5"."""

    def fingerprint(self) -> str:
        """Return 32 hex digits that stay the same when the file is moved, and change when it is another file.

        Made of the size, the number of records and 64 evenly spread blocks of 4 KiB, so it costs milliseconds; an edit
        that keeps the size and lies between the blocks of a large file goes unseen.
        """


def open_source(path: str | os.PathLike[str]) -> RecordSource:
    """Open `path` as the kind of source that its suffix names; ValueError if it is not such a file or is empty."""
    if not os.path.isfile(path):
        fault = "is a directory; name a file in it" if os.path.isdir(path) else "no such file; check the path"
        raise ValueError(f"{path}: {fault}")
    kind = SOURCES.get(Path(path).suffix)
    if kind is None:
        raise ValueError(f"{path}: suffix must be one of {', '.join(SOURCES)}; convert or rename the file")
    source = kind(os.fspath(path))
    if len(source) == 0:
        raise ValueError(f"{path}: has no records; leave it out of the data")
    return source


class JsonlSource:
    """One JSON object per line, UTF-8; blank lines are passed over, CRLF and a byte-order mark are allowed.

    Opening scans the file for line ends, at about 1 GB/s, and parses nothing; it keeps 8 bytes per record. A read is
    one `pread`.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._offsets, self._blank_lines_at = _index_lines(path)
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed with this object

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> Record:
        _check_index(index, self)
        # Up to the next record there may be blank lines, which go with the end of the line.
        start, end = int(self._offsets[index]), int(self._offsets[index + 1])
        line = os.pread(self._file.fileno(), end - start, start).rstrip(_JSON_SPACE)
        try:
            record = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise self._error(index, f"not UTF-8 at byte {error.start + 1} of the line") from error
        except json.JSONDecodeError as error:
            raise self._error(index, f"not JSON: {error.msg.removesuffix(' at')} at column {error.colno}") from error
        if not isinstance(record, dict):
            raise self._error(index, f"must be a JSON object, but is a {type(record).__name__}")
        return record

    def describe(self, index: int) -> str:
        num_blank_lines_before = int(np.searchsorted(self._blank_lines_at, index, side="right"))
        return f"{self._path}:{index + num_blank_lines_before + 1}"

    def fingerprint(self) -> str:
        return _fingerprint(self._path, len(self))

    def _error(self, index: int, fault: str) -> RecordError:
        return RecordError(f"{self.describe(index)}: {fault}; fix the line or pass --skip-bad-samples")

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_file"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._file = open(self._path, "rb", buffering=0)  # noqa: SIM115 - closed with this object


class JsonArraySource:
    """One JSON list of objects, parsed and held in memory as a whole: for small files. Items are counted from 0."""

    def __init__(self, path: str) -> None:
        self._path = path
        try:
            items = json.loads(Path(path).read_text(encoding="utf-8-sig"))
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not UTF-8 at byte {error.start + 1}; convert the file") from error
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{path}:{error.lineno}: not JSON: {error.msg.removesuffix(' at')} at column {error.colno}; "
                "fix the file, or rename it to .jsonl if it holds one object per line"
            ) from error
        if not isinstance(items, list):
            raise ValueError(f"{path}: must hold a list of objects, but holds a {type(items).__name__}; fix the file")
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Record:
        _check_index(index, self)
        item = self._items[index]
        if not isinstance(item, dict):
            raise RecordError(
                f"{self.describe(index)}: must be a JSON object, but is a {type(item).__name__}; "
                "fix the item or pass --skip-bad-samples"
            )
        return item

    def describe(self, index: int) -> str:
        return f"{self._path} item {index}"

    def fingerprint(self) -> str:
        return _fingerprint(self._path, len(self))


class ParquetSource:
    """The rows of a Parquet file, counted from 0. Needs pyarrow.

    A read decodes the row group that holds the row, unless it is one of the last few decoded: in random order, files
    with small row groups are read fastest.
    """

    def __init__(self, path: str) -> None:
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError as error:
            raise ValueError(f"{path}: reading Parquet needs pyarrow; pip install pyarrow") from error
        self._path = path
        try:
            with pyarrow.parquet.ParquetFile(path) as file:
                self._metadata: pyarrow.parquet.FileMetaData = file.metadata
        except pyarrow.ArrowInvalid as error:
            raise ValueError(f"{path}: not a Parquet file: {error}") from error
        num_rows = [self._metadata.row_group(group).num_rows for group in range(self._metadata.num_row_groups)]
        self._row_group_starts = [0, *accumulate(num_rows)]
        self._tables: dict[int, pyarrow.Table] = {}

    def __len__(self) -> int:
        return self._row_group_starts[-1]

    def __getitem__(self, index: int) -> Record:
        _check_index(index, self)
        row_group = bisect.bisect_right(self._row_group_starts, index) - 1
        table = self._table(row_group)
        row = index - self._row_group_starts[row_group]
        return {name: column[row].as_py() for name, column in zip(table.column_names, table.columns)}

    def describe(self, index: int) -> str:
        return f"{self._path} row {index}"

    def fingerprint(self) -> str:
        return _fingerprint(self._path, len(self))

    def _table(self, row_group: int) -> "pyarrow.Table":
        import pyarrow.parquet

        if row_group not in self._tables:
            if len(self._tables) == _CACHED_ROW_GROUPS:
                del self._tables[next(iter(self._tables))]
            # Opened anew and read by this thread alone: nothing that a forked process could share or wait for.
            with pyarrow.parquet.ParquetFile(self._path, metadata=self._metadata, pre_buffer=False) as file:
                self._tables[row_group] = file.read_row_group(row_group, use_threads=False)
        return self._tables[row_group]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tables": {}}


SOURCES: dict[str, Callable[[str], RecordSource]] = {
    ".jsonl": JsonlSource,
    ".ndjson": JsonlSource,
    ".json": JsonArraySource,
    ".parquet": ParquetSource,
}


def _index_lines(path: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return where each non-blank line starts, then the end of the file; and before which record each blank line is.

    `b'{}\\n\\n{}\\n' -> [0, 4, 7], [1]`: two records, a blank line before record 1.
    """
    num_bytes = os.path.getsize(path)
    if num_bytes == 0:
        return np.zeros(1, np.int64), np.zeros(0, np.int64)
    data = np.memmap(path, np.uint8, mode="r").view(np.ndarray)
    first = len(_UTF8_BOM) if data[:3].tobytes() == _UTF8_BOM else 0
    starts_per_scan = [np.array([first], np.int64)]
    for scan in range(0, num_bytes, _SCAN_BYTES):
        starts_per_scan.append(np.flatnonzero(data[scan : scan + _SCAN_BYTES] == ord("\n")) + scan + 1)
    starts = np.concatenate(starts_per_scan)
    starts = starts[starts < num_bytes]
    ends = np.append(starts[1:], num_bytes)
    is_blank = np.zeros(len(starts), np.bool_)
    # Only a line that starts with white space can be blank: few do, so they are looked at one by one.
    for line in np.flatnonzero(data[starts] <= ord(" ")):
        is_blank[line] = not data[starts[line] : ends[line]].tobytes().strip(_JSON_SPACE)
    num_records_before = np.cumsum(~is_blank, dtype=np.int64)
    return np.append(starts[~is_blank], num_bytes), num_records_before[is_blank]


def _fingerprint(path: str, num_records: int) -> str:
    num_bytes = os.path.getsize(path)
    digest = hashlib.blake2b(f"{num_bytes} bytes {num_records} records".encode(), digest_size=16)
    with open(path, "rb") as file:
        for probe in range(_FINGERPRINT_PROBES):
            file.seek(max(num_bytes - _FINGERPRINT_PROBE_BYTES, 0) * probe // (_FINGERPRINT_PROBES - 1))
            digest.update(file.read(_FINGERPRINT_PROBE_BYTES))
    return digest.hexdigest()


def _check_index(index: int, source: RecordSource) -> None:
    if not 0 <= index < len(source):
        raise IndexError(f"index must be in range({len(source)}), but is {index}")
