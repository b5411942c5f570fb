"""pure. Reads a file with one JSON object per line in any order, by the offsets of its lines.

If there is an index file `FILE.idx`, as `python -m megatron.blending prepare` and energon write it,
the offsets are a view of it, which takes no time and no memory. Otherwise the file is scanned for
line ends, at about 1 GB/s, and 8 bytes per record are kept.

Invariant: an index file makes opening faster, but never changes the records.
"""

import json
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from megatron.blending.formats.files import (
    LONG_BYTES,
    File,
    LocalFile,
    is_file,
    open_file,
    read_ranges,
)
from megatron.blending.formats.other_forms import HEAD_BYTES, encoding_fault, json_lines_fault
from megatron.blending.formats.record import (
    FileSource,
    Record,
    RecordError,
    check_index,
    check_indices,
)

INDEX_SUFFIX = ".idx"

T = TypeVar("T")
Progress = Callable[[Iterable[Any], int], Iterable[Any]]
"""Function (steps, number of them) -> the same steps, with their progress shown."""

_SCAN_BYTES = 1 << 24
_COUNTED_BYTES = 1 << 31
_INDEX_PROBES = 64
_SPACE = " \t\r\n"
_JSON_SPACE = _SPACE.encode()
_UTF8_BOM = b"\xef\xbb\xbf"

_parse = json.JSONDecoder().scan_once  # type: ignore[attr-defined]


class JsonlSource(FileSource):
    """A UTF-8 file with one JSON object per line. Blank lines are skipped; CRLF and a byte-order
    mark are allowed.

    A read takes about half a microsecond in addition to the parsing.
    """

    def _open(self) -> None:
        self._file = open_file(self._path)
        self._index, self._offsets = _indexed_lines(self._file)
        self._places = self._offsets.data

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> Record:
        check_index(index, self)
        return self._record(index, self._file.read(*self._place(index)))

    def read(self, indices: Sequence[int]) -> list[Record | RecordError]:
        check_indices(indices, self)
        if isinstance(self._index, LocalFile):
            self._index.check()
        if isinstance(self._file, LocalFile):
            try:
                return self._read_mapped(self._file, indices)
            except (StopIteration, ValueError, RecursionError):
                # One of the lines is unusual or broken. Read them one by one below, which finds
                # the line and its fault.
                pass
        lines = read_ranges([(self._file, *self._place(index)) for index in indices])
        records: list[Record | RecordError] = []
        for index, line in zip(indices, lines):
            try:
                records.append(self._record(index, line))
            except RecordError as error:
                records.append(error)
        return records

    def _read_mapped(self, file: LocalFile, indices: Sequence[int]) -> list[Any]:
        """Parses lines without leading white space; raises for any other. It is one loop without
        function calls or copies of bytes, which would take half as long as the parsing itself.
        """
        file.check()
        view, places, records = file.view, self._places, []
        for index in indices:
            start, end = places[index], places[index + 1]
            if end - start > LONG_BYTES:
                file.fetch(start, end)
            text = str(view[start:end], "utf-8")
            record, length = _parse(text, 0)
            rest = text[length:]
            if type(record) is not dict or (rest != "\n" and rest.strip(_SPACE)):
                raise ValueError(f"line {index} is not an object")
            records.append(record)
        return records

    def num_bytes(self, records: range) -> int:
        """Returns the bytes of consecutive records in sum."""
        return int(self._places[records.stop] - self._places[records.start])

    def describe(self, index: int) -> str:
        """Returns file and line. The lines before are counted now; if the file has too many
        gigabytes before, or was truncated, the place is given as record and byte.
        """
        start = self._place(index)[0]
        by_byte = f"{self._path} record {index} (at byte {start})"
        if start > _COUNTED_BYTES:
            return by_byte
        blocks = range(0, start, _SCAN_BYTES)
        try:
            num_before = sum(
                self._file.read(at, min(at + _SCAN_BYTES, start)).count(b"\n") for at in blocks
            )
            # With an index file, the first record may begin with the blank lines before it.
            head = self._file.read(*self._place(index))
        except ValueError:
            return by_byte
        num_before += head[: len(head) - len(head.lstrip(_JSON_SPACE))].count(b"\n")
        return f"{self._path}:{num_before + 1}"

    def _place(self, index: int) -> tuple[int, int]:
        # Blank lines before the next record count to the end of this one.
        return self._places[index], self._places[index + 1]

    def _record(self, index: int, line: bytes) -> Record:
        try:
            text = line.decode("utf-8").strip(_SPACE)
            record, end = _parse(text, 0)
            if end == len(text) and type(record) is dict:
                return record
        except (StopIteration, ValueError, RecursionError):
            pass
        raise self._error(index, line)

    def _error(self, index: int, line: bytes) -> RecordError:
        head = self._file.read(0, min(HEAD_BYTES, self._file.size))
        of_file = encoding_fault(self._path, head) or json_lines_fault(self._path, head)
        if of_file is not None:
            return RecordError(f"{self.describe(index)}: the file {of_file}")
        try:
            record = json.loads(line.strip(_JSON_SPACE).decode("utf-8"))
            fault = f"must be a JSON object, but is a {type(record).__name__}"
        except UnicodeDecodeError as error:
            fault = f"not UTF-8 at byte {error.start + 1} of the line"
        except json.JSONDecodeError as error:
            fault = f"not JSON: {error.msg.removesuffix(' at')} at column {error.colno}"
        except (ValueError, RecursionError) as error:
            fault = f"not JSON that can be read: {error}"
        return RecordError(f"{self.describe(index)}: {fault}; fix the line")


def unseen(steps: Iterable[T], total: int) -> Iterable[T]:
    """Returns the steps, and shows no progress."""
    return steps


def index_lines(file: File, progress: Progress = unseen) -> npt.NDArray[np.uint64]:
    """Returns the offset of each line that is not blank, and the size of the file at the end. This
    is the content of an index file.

    `b'{}\\n\\n{}\\n' -> [0, 4, 7]`. After a byte-order mark the first line starts at 3.

    progress: shows the progress over blocks of the file.
    """
    carried = np.array([_mark_bytes(file)], np.int64)
    found, suspects = [], []
    scans = range(0, file.size, _SCAN_BYTES)
    for scan in progress(scans, len(scans)):
        data = np.frombuffer(file.read(scan, min(scan + _SCAN_BYTES, file.size)), np.uint8)
        # A line starts after each newline. If the newline ends the block, the line starts in the
        # next block, at 0: it is carried over.
        starts = np.append(carried, np.flatnonzero(data == ord("\n")) + 1)
        carried, starts = starts[starts >= len(data)] - len(data), starts[starts < len(data)]
        found.append(starts + scan)
        # Only a line that starts with white space can be blank. These are few, so that they are
        # read one by one below.
        suspects.append(data[starts] <= ord(" "))
    offsets = np.append(np.concatenate([np.zeros(0, np.int64), *found]), file.size)
    is_record = np.ones(len(offsets), np.bool_)
    for line in np.flatnonzero(np.concatenate([np.zeros(0, np.bool_), *suspects])):
        is_record[line] = bool(
            file.read(int(offsets[line]), int(offsets[line + 1])).strip(_JSON_SPACE)
        )
    return offsets[is_record].astype(np.uint64)


def _mark_bytes(file: File) -> int:
    mark = len(_UTF8_BOM)
    return mark if file.size >= mark and file.read(0, mark) == _UTF8_BOM else 0


def _indexed_lines(file: File) -> tuple[File | None, npt.NDArray[np.uint64]]:
    """Returns the index file, or None if there is no valid one, and the offsets of the lines."""
    location = file.location + INDEX_SUFFIX
    if not is_file(location):
        return None, index_lines(file)
    index = open_file(location)
    fault = _fault_of_index(index, file)
    if fault is None:
        return index, index.array(np.uint64)
    warnings.warn(
        f"{location}: does not belong to the file beside it: {fault}; its lines are counted again. "
        f"Run python -m megatron.blending prepare {file.location}",
        stacklevel=4,
    )
    return None, index_lines(file)


def _fault_of_index(index: File, file: File) -> str | None:
    """Returns the fault of an index file, or None; checks its ends and 64 evenly spread lines."""
    if index.size == 0 or index.size % 8:
        return f"it has {index.size} bytes, which is not a multiple of 8"
    offsets = index.array(np.uint64)
    if offsets[-1] != file.size:
        return f"it ends at byte {offsets[-1]} of {file.size}"
    if len(offsets) > 1 and offsets[0] < _mark_bytes(file):
        return "it starts within the byte-order mark"
    num_lines = len(offsets) - 1
    for line in sorted(
        {1 + probe * (num_lines - 2) // (_INDEX_PROBES - 1) for probe in range(_INDEX_PROBES)}
    ):
        if not 0 < line < num_lines:
            continue
        before, start = int(offsets[line - 1]), int(offsets[line])
        if not before < start < file.size or file.read(start - 1, start) != b"\n":
            return f"no line starts at byte {start}"
    return None
