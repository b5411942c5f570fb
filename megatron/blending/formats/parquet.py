"""pure. A ParquetSource reads the rows of a file in any order. It needs pyarrow."""

import bisect
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from megatron.blending.formats.files import RemoteFile, open_file
from megatron.blending.formats.record import FileSource, Record, RecordError, check_index

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.parquet

_CACHED_ROW_GROUPS = 4
_MAX_ROWS = 1 << 48


class ParquetSource(FileSource):
    """The rows of a Parquet file, counted from 0.

    A read decodes the row group that holds the row, unless it is one of the last few decoded: in
    random order, files with small row groups are read fastest.
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
        self._tables: dict[int, pyarrow.Table] = {}

    def __len__(self) -> int:
        return self._row_group_starts[-1]

    def read(self, indices: Sequence[int]) -> list[Record | RecordError]:
        """Read many rows; each row group that they are in is decoded once."""
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
        """Return what pyarrow opens: a path, or a file-like object over a URL."""
        return self._file.stream() if isinstance(self._file, RemoteFile) else self._file.location

    def _table(self, row_group: int) -> "pyarrow.Table":
        import pyarrow.parquet

        tables = self._tables
        table = tables.get(row_group)
        if table is None:
            # Opened again and read by this thread alone: nothing that a forked process could share
            # or wait for.
            with pyarrow.parquet.ParquetFile(
                self._stream(), metadata=self._metadata, pre_buffer=False
            ) as file:
                table = file.read_row_group(row_group, use_threads=False)
            # A dict of its own for the next reader, so that threads never see one that changes.
            self._tables = {
                **dict(list(tables.items())[1 - _CACHED_ROW_GROUPS :]),
                row_group: table,
            }
        return table
