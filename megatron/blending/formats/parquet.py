"""pure. A ParquetSource reads the rows of a file in any order. It needs pyarrow."""

import bisect
import warnings
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from megatron.blending.formats.files import RemoteFile, open_file
from megatron.blending.formats.record import FileSource, Record, RecordError, check_index

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.parquet

_MAX_ROWS = 1 << 48
_CACHED_BYTES = 1 << 28
"""Bytes of decoded row groups that a process keeps, of all its files together."""
_LARGE_ROW_GROUP = 1 << 25


class _DecodedRowGroups:
    """The row groups decoded last, by the files that they are of.

    A dict is never changed but replaced by another one, so that threads and forked processes never
    see one that changes; where two threads decode at once, the row group of one may be forgotten.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._tables: dict[tuple[object, int], tuple[pyarrow.Table, int]] = {}

    def get(self, key: tuple[object, int]) -> "pyarrow.Table | None":
        return self._tables.get(key, (None,))[0]

    def add(self, key: tuple[object, int], table: "pyarrow.Table") -> None:
        """Keeps `table`, whatever its size, and the ones before as far as there is room."""
        kept = {key: (table, table.nbytes)}
        room = self._most_bytes - table.nbytes
        for other, (held, num_bytes) in reversed(self._tables.items()):
            room -= num_bytes
            if room < 0:
                break
            kept[other] = held, num_bytes
        self._tables = dict(reversed(kept.items()))


_DECODED = _DecodedRowGroups(_CACHED_BYTES)


class ParquetSource(FileSource):
    """The rows of a Parquet file, counted from 0.

    A read decodes the row group that holds the row, unless it is among those decoded before, of
    which a process keeps 256 MB: files that fit there are decoded once. Of larger ones, those with
    small row groups are read fastest in random order.
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
                f"{path}: has row groups of {max(sizes) / 1e6:,.0f} MB, each of which is decoded "
                "for a single row in random order; write it again with smaller ones, as by "
                "pyarrow.parquet.write_table(table, path, row_group_size=1000)",
                stacklevel=4,
            )

    def __len__(self) -> int:
        return self._row_group_starts[-1]

    def read(self, indices: Sequence[int]) -> list[Record | RecordError]:
        """Reads many rows; each row group that they are in is decoded once."""
        records: list[Record | RecordError] = [{}] * len(indices)
        by_row_group: dict[int, list[int]] = {}
        for number, index in enumerate(indices):
            check_index(index, self)
            by_row_group.setdefault(self._row_group(index), []).append(number)
        for row_group, numbers in by_row_group.items():
            start = self._row_group_starts[row_group]
            rows = (
                self._table(row_group)
                .take([indices[number] - start for number in numbers])
                .to_pylist()
            )
            for number, row in zip(numbers, rows):
                records[number] = row
        return records

    def describe(self, index: int) -> str:
        return f"{self._path} row {index}"

    def _row_group(self, index: int) -> int:
        return bisect.bisect_right(self._row_group_starts, index) - 1

    def _stream(self) -> Any:
        """Returns what pyarrow opens: a path, or a file-like object over a URL."""
        return self._file.stream() if isinstance(self._file, RemoteFile) else self._file.location

    def _table(self, row_group: int) -> "pyarrow.Table":
        import pyarrow.parquet

        table = _DECODED.get((self._key, row_group))
        if table is None:
            # Opened again and read by this thread alone: nothing that a forked process could share
            # or wait for.
            with pyarrow.parquet.ParquetFile(
                self._stream(), metadata=self._metadata, pre_buffer=False
            ) as file:
                table = file.read_row_group(row_group, use_threads=False)
            _DECODED.add((self._key, row_group), table)
        return table
