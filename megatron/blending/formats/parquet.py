"""pure. A ParquetSource reads the rows of a file in any order. It needs pyarrow."""

import bisect
import os
import threading
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from megatron.blending.formats.files import RemoteFile, open_file
from megatron.blending.formats.json_forms import TableForms
from megatron.blending.formats.record import (
    FileSource,
    ReadRecords,
    Record,
    RecordError,
    check_index,
)

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.parquet

_MAX_ROWS = 1 << 48
_CACHED_BYTES = 1 << 28
"""Bytes of decoded row groups that a process keeps, of all its files together."""
_PLANNED_BYTES = 1 << 13
"""Bytes of decoded rows that a plan keeps for each of its rows: 256 MB for 32,768 of them."""
_LARGE_ROW_GROUP = 1 << 25
_SMALL_BATCH = 4
"""Rows that are sliced one by one, at 3 microseconds each; a `take` of them all costs 14."""

_Key = TypeVar("_Key")
_Decoded = TypeVar("_Decoded")


class _ByteCache(Generic[_Key, _Decoded]):
    """Cache of what was decoded last, up to a number of bytes. Threads may share it."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self.clear()

    def clear(self) -> None:
        """Forgets everything, with the lock, which in a forked process a thread of the parent may
        hold for ever.
        """
        self._lock = threading.Lock()
        self._num_bytes = 0
        self._held: OrderedDict[_Key, tuple[_Decoded, int]] = OrderedDict()

    def get(self, key: _Key) -> _Decoded | None:
        found = self._held.get(key)
        return None if found is None else found[0]

    def add(self, key: _Key, decoded: _Decoded, num_bytes: int) -> None:
        """Keeps `decoded`, whatever its size, and the ones before as far as there is room."""
        with self._lock:
            self._num_bytes += num_bytes - self._held.pop(key, (None, 0))[1]
            self._held[key] = decoded, num_bytes
            while self._num_bytes > self._most_bytes and len(self._held) > 1:
                self._num_bytes -= self._held.popitem(last=False)[1][1]


_DECODED: "_ByteCache[tuple[object, int], pyarrow.Table]" = _ByteCache(_CACHED_BYTES)
os.register_at_fork(after_in_child=_DECODED.clear)


class _PlannedRows:
    """Rows of a file in the order in which a plan reads them, about.

    When a row group is decoded for one of them, those that follow are kept as well: all of them
    where there is room, and else the next ones, so that they are read before they must go.
    """

    def __init__(self, indices: Sequence[int]) -> None:
        planned = np.asarray(indices, np.int64)
        # Planned 5 3 9 3 -> in ascending order 3 3 5 9, which are read as number 1 3 0 2.
        self._numbers = np.argsort(planned, kind="stable")
        self._indices = planned[self._numbers]
        self._most_bytes = _PLANNED_BYTES * len(planned)
        # By row group: rows of it as a table, and the place of each of them there.
        self._kept: _ByteCache[int, tuple[pyarrow.Table, dict[int, int]]] = _ByteCache(
            self._most_bytes
        )

    def find(self, row_group: int, rows: Sequence[int]) -> "tuple[pyarrow.Table, list[int]] | None":
        """Returns a table and the places of some rows of a row group in it; None if they are not
        kept.
        """
        found = self._kept.get(row_group)
        if found is None or not all(row in found[1] for row in rows):
            return None
        return found[0], [found[1][row] for row in rows]

    def keep(self, row_group: int, start: int, table: "pyarrow.Table", row: int) -> None:
        """Keeps rows of a row group that was decoded for its row `row`; it starts at row `start` of
        the file.
        """
        first, end = np.searchsorted(self._indices, [start, start + table.num_rows])
        rows, numbers = self._indices[first:end] - start, self._numbers[first:end]
        now = numbers[rows == row]
        if not len(now):  # not planned
            return
        # Rows for which there is room until each is read, if all row groups are like this one.
        ahead = self._most_bytes * table.num_rows // max(1, table.nbytes)
        rows = rows[(now[0] <= numbers) & (numbers <= now[0] + ahead)]
        if len(rows) > 1:  # else it is read by now, and not again
            rows = np.unique(rows)
            part = table.take(rows)
            places = {row: place for place, row in enumerate(rows.tolist())}
            self._kept.add(row_group, (part, places), part.nbytes)


class ParquetSource(FileSource):
    """The rows of a Parquet file, counted from 0. Their cells have the JSON forms of `json_forms`.

    A read decodes the row group that holds the row, unless it is among those decoded before, of
    which a process keeps 256 MB: files that fit there are decoded once. A plan of many reads of a
    larger one decodes each row group once, for all rows that the plan has of it.
    """

    def _open(self) -> None:
        path = self._path
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError as error:
            raise ValueError(
                f"{path}: reading Parquet needs pyarrow; pip install pyarrow"
            ) from error
        self._file = open_file(path)
        try:
            with pyarrow.parquet.ParquetFile(self._stream()) as file:
                self._metadata: pyarrow.parquet.FileMetaData = file.metadata
                self.forms = TableForms(file.schema_arrow)
            num_rows = [
                self._metadata.row_group(group).num_rows
                for group in range(self._metadata.num_row_groups)
            ]
            if min(num_rows, default=0) < 0 or sum(num_rows) >= _MAX_ROWS:
                raise ValueError(f"its row groups say that they have {num_rows!s:.100} rows")
        except Exception as error:  # of dozens of kinds, by what is damaged
            raise ValueError(
                f"{path}: not a Parquet file: {' '.join(str(error).split()):.500}"
            ) from error
        self._row_group_starts = [0, *accumulate(num_rows)]
        self._key = object()  # this file's, in the cache
        sizes = [self._metadata.row_group(n).total_byte_size for n in range(len(num_rows))]
        if sum(sizes) > _CACHED_BYTES and max(sizes) > _LARGE_ROW_GROUP:
            warnings.warn(
                f"{path}: has row groups of {max(sizes) / 1e6:,.0f} MB. In random order a worker "
                "decodes each of them for every 32,768 samples that it makes, with 30 GB of such "
                "data half a millisecond per sample; if that is too slow, write it again with "
                "smaller ones, as by pyarrow.parquet.write_table(table, path, row_group_size=1000)",
                stacklevel=4,
            )

    def __len__(self) -> int:
        return self._row_group_starts[-1]

    def read(self, indices: Sequence[int]) -> list[Record | RecordError]:
        """Reads many rows; each row group that they are in is decoded once."""
        return self._read(indices, None)

    def planned_read(self, indices: Sequence[int]) -> ReadRecords:
        """Returns `read` for a plan that reads these rows in this order, a few with each call.

        Besides the cache it holds the rows that were decoded ahead, at most 8 KB for each of the
        plan.
        """
        return partial(self._read, planned=_PlannedRows(indices))

    def _read(
        self, indices: Sequence[int], planned: _PlannedRows | None
    ) -> list[Record | RecordError]:
        records: list[Record | RecordError] = [{}] * len(indices)
        by_row_group: dict[int, list[int]] = {}
        for number, index in enumerate(indices):
            check_index(index, self)
            by_row_group.setdefault(self._row_group(index), []).append(number)
        for row_group, numbers in by_row_group.items():
            start = self._row_group_starts[row_group]
            rows = [indices[number] - start for number in numbers]
            found = None if planned is None else planned.find(row_group, rows)
            table, places = found or (self._table(row_group, rows[0], planned), rows)
            for number, row in zip(numbers, _rows_at(table, places)):
                records[number] = self.forms.convert(row)
        return records

    def describe(self, index: int) -> str:
        return f"{self._path} row {index}"

    def _row_group(self, index: int) -> int:
        return bisect.bisect_right(self._row_group_starts, index) - 1

    def _stream(self) -> Any:
        """Returns what pyarrow opens: a path, or a file-like object over a URL."""
        return self._file.stream() if isinstance(self._file, RemoteFile) else self._file.location

    def _table(self, row_group: int, row: int, planned: _PlannedRows | None) -> "pyarrow.Table":
        import pyarrow.parquet

        table = _DECODED.get((self._key, row_group))
        if table is None:
            # Opened again and read by this thread alone: nothing that a forked process could share
            # or wait for.
            with pyarrow.parquet.ParquetFile(
                self._stream(), metadata=self._metadata, pre_buffer=False
            ) as file:
                table = self.forms.cast(file.read_row_group(row_group, use_threads=False))
            _DECODED.add((self._key, row_group), table, table.nbytes)
            if planned is not None:
                planned.keep(row_group, self._row_group_starts[row_group], table, row)
        return table


def _rows_at(table: "pyarrow.Table", places: list[int]) -> list[Record]:
    """Returns rows of a table as objects of their own."""
    if len(places) > _SMALL_BATCH:
        return table.take(places).to_pylist()
    return [table.slice(place, 1).to_pylist()[0] for place in places]
