"""pure. Reads the rows of a CSV or TSV file in any order. The first line has the column names.

Values are text. A value that is a JSON list or object (the turns of a chat) is parsed, and keeps
its text (`ParsedCell`). Quoted values may contain separators and line ends (RFC 4180). The file is
scanned once for the ends of rows, and 8 bytes per row are kept.
"""

import csv
import io
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.blending.arguments import shown
from megatron.blending.formats.files import File, open_file
from megatron.blending.formats.json_forms import JsonObject, parse_json_cell
from megatron.blending.formats.other_forms import HEAD_BYTES, encoding_fault
from megatron.blending.formats.record import FileSource, Record, RecordError, check_index

_SEPARATORS = {".csv": ",", ".tsv": "\t"}
_SCAN_BYTES = 1 << 24
_UTF8_BOM = b"\xef\xbb\xbf"
_QUOTE, _LINE_END = ord('"'), ord("\n")
_MAX_FIELD = 1 << 30


class ParsedCell:
    """A value of JSON text, with the text: its column decides which of them is meant."""

    text: str


class _ListCell(list[Any], ParsedCell):
    pass


class _ObjectCell(JsonObject, ParsedCell):
    pass


class DelimitedSource(FileSource):
    """The rows of a CSV or TSV file, counted from 0, without the line of column names."""

    def _open(self) -> None:
        path = self._path
        csv.field_size_limit(_MAX_FIELD)
        self._file = open_file(path)
        self._separator = _SEPARATORS[PurePosixPath(path).suffix]
        self._starts = _row_starts(self._file)
        if len(self._starts) < 2:
            raise ValueError(f"{path}: must begin with a line of column names, but is empty")
        self._names = self._read_names()
        doubled = {name for name in self._names if self._names.count(name) > 1 or not name.strip()}
        if doubled or not self._names:
            raise ValueError(
                f"{path}:1: column names must differ and not be empty, but are "
                f"{', '.join(self._names)[:200]}; correct the first line"
                + " (pandas: to_csv with index=False)"
                * ("" in doubled)
            )

    def _read_names(self) -> list[str]:
        """Returns the column names. Raises ValueError if they are no line of names, or are
        separated by another mark than the file's suffix says.
        """
        fault = encoding_fault(self._path, self._file.read(0, min(HEAD_BYTES, self._file.size)))
        if fault is not None:
            raise ValueError(f"{self._path}: {fault}")
        separator = self._other_separator()
        if separator is not None:
            suffixes = {mark: f"name it {suffix}" for suffix, mark in _SEPARATORS.items()}
            way_out = suffixes.get(separator, "save it with that, values that hold one in quotes")
            first = self._text(0).strip()
            raise ValueError(
                f"{self._path}:1: columns must be separated by {self._separator!r}, but "
                f"{shown(first)} are by {shown(separator)}; {way_out}"
            )
        try:
            return self._row(0)
        except ValueError as error:
            raise ValueError(f"{self._path}:1: {error}; correct the first line") from None

    def _other_separator(self) -> str | None:
        """Returns the mark by which the names are separated if it is not the one of the suffix:
        there is a single name with such a mark in it, or the first two rows have equally many
        values by the other mark alone.
        """
        try:
            first = self._text(0)
            rows = [first, *([self._text(1)] if len(self) else [])]
        except UnicodeDecodeError:
            return None
        others = [mark for mark in ",;|\t" if mark != self._separator and mark in first]
        if _num_values([first], self._separator) == [1]:
            return min(others, key=first.find, default=None)
        if _are_alike(_num_values(rows, self._separator)):
            return None
        return next((mark for mark in others if _are_alike(_num_values(rows, mark))), None)

    def __len__(self) -> int:
        return len(self._starts) - 2

    def __getitem__(self, index: int) -> Record:
        check_index(index, self)
        try:
            values = self._row(index + 1)
        except ValueError as error:
            raise RecordError(f"{self.describe(index)}: {error}; fix the row") from None
        if len(values) != len(self._names):
            raise RecordError(
                f"{self.describe(index)}: must have {len(self._names)} values, as the first line "
                f"has, but has {len(values)}; quote values that hold a separator"
            )
        return {name: _value(text) for name, text in zip(self._names, values)}

    def describe(self, index: int) -> str:
        return f"{self._path} row {index + 2}"

    def _row(self, number: int) -> list[str]:
        try:
            return _values(self._text(number), self._separator)
        except UnicodeDecodeError as error:
            raise ValueError(f"not UTF-8 at byte {error.start + 1} of the row") from None
        except csv.Error as error:
            raise ValueError(f"not a row of values: {error}") from None

    def _text(self, number: int) -> str:
        start, end = int(self._starts[number]), int(self._starts[number + 1])
        return self._file.read(start, end).removeprefix(_UTF8_BOM).decode("utf-8")


def _values(text: str, separator: str) -> list[str]:
    rows = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    return next((row for row in list(rows) if row), [])


def _num_values(rows: list[str], separator: str) -> list[int]:
    """Returns the number of values of each row, by a separator; [] if a row cannot be read so."""
    try:
        return [len(_values(row, separator)) for row in rows]
    except csv.Error:
        return []


def _are_alike(sizes: list[int]) -> bool:
    return len(sizes) == 2 and sizes[0] == sizes[1] > 1


def _row_starts(file: File) -> npt.NDArray[np.int64]:
    """Returns the offset of each row that is not blank, and the size of the file at the end.

    A line end within quotes does not end a row: `b'a,b\\n1,"x\\ny"\\n' -> [0, 4, 12]`. A line end
    is within quotes if the number of quotes before it is odd. A quote in a value is written twice,
    so that it does not change this.
    """
    ends, num_quotes = [], 0
    mark = len(_UTF8_BOM)
    first = mark if file.read(0, min(mark, file.size)) == _UTF8_BOM else 0
    for start in range(0, file.size, _SCAN_BYTES):
        data = np.frombuffer(file.read(start, min(start + _SCAN_BYTES, file.size)), np.uint8)
        quotes = np.cumsum(data == _QUOTE) + num_quotes
        ends.append(np.flatnonzero((data == _LINE_END) & (quotes % 2 == 0)) + start + 1)
        num_quotes = int(quotes[-1])
    starts = np.concatenate([np.full(1, first, np.int64), *ends])
    starts = np.append(starts[starts < file.size], file.size)
    # "\n" or "\r\n" alone, or behind a byte-order mark of a file that was appended to another.
    is_short = np.flatnonzero(np.diff(starts) <= mark + 2)
    return np.delete(starts, [row for row in is_short if _is_blank(file, *starts[row : row + 2])])


def _is_blank(file: File, start: int, end: int) -> bool:
    return not file.read(int(start), int(end)).removeprefix(_UTF8_BOM).strip(b"\r\n")


def _value(text: str) -> Any:
    """Returns a JSON list or object parsed, any other text as it is: `"[1, 2]" -> [1, 2]`."""
    if text[:1] in ("[", "{"):
        try:
            value = parse_json_cell(text)
        except (ValueError, RecursionError):
            return text
        cell: Any = (_ListCell if isinstance(value, list) else _ObjectCell)(value)
        cell.text = text
        return cell
    return text
