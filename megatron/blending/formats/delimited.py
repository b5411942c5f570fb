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

from megatron.blending.formats.files import File, open_file
from megatron.blending.formats.json_forms import JsonObject, parse_json_cell
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
        self._names = self._row(0)
        doubled = {name for name in self._names if self._names.count(name) > 1 or not name.strip()}
        if doubled:
            raise ValueError(
                f"{path}:1: column names must differ and not be empty, but are "
                f"{', '.join(self._names)[:200]}; correct the first line"
                + " (pandas: to_csv with index=False)"
                * (not self._names[0].strip())
            )
        self._check_separator()

    def _check_separator(self) -> None:
        """Raises ValueError if the column names are a single one, with another separator in it."""
        others = set(",;|\t") - {self._separator}
        found = next((mark for mark in self._names[0] if mark in others), None)
        if len(self._names) == 1 and found is not None:
            suffixes = {mark: f"name it {suffix}" for suffix, mark in _SEPARATORS.items()}
            way_out = suffixes.get(found, "save it with that, values that hold one in quotes")
            raise ValueError(
                f"{self._path}:1: columns must be separated by {self._separator!r}, but "
                f"{self._names[0]!r:.200} are by {found!r}; {way_out}"
            )

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
        start, end = int(self._starts[number]), int(self._starts[number + 1])
        data = self._file.read(start, end).removeprefix(_UTF8_BOM)
        try:
            text = data.decode("utf-8")
            rows = list(
                csv.reader(io.StringIO(text, newline=""), delimiter=self._separator, strict=True)
            )
        except UnicodeDecodeError as error:
            raise ValueError(f"not UTF-8 at byte {error.start + 1} of the row") from None
        except csv.Error as error:
            raise ValueError(f"not a row of values: {error}") from None
        return next((row for row in rows if row), [])


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
    is_short = np.flatnonzero(np.diff(starts) <= 2)  # "\n" or "\r\n" alone
    blank = [row for row in is_short if not file.read(*map(int, starts[row : row + 2])).strip()]
    return np.delete(starts, blank)


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
