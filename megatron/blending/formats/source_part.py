"""pure. A range of a source's records as a source of its own."""

from collections.abc import Sequence

from megatron.blending.formats.record import (
    ReadRecords,
    Record,
    RecordError,
    RecordSource,
    check_indices,
    planned_read,
)


class SourcePart(RecordSource):
    """Consecutive records of a source: index 0 is the first of `records`."""

    def __init__(self, source: RecordSource, records: range) -> None:
        self._source = source
        self._records = records

    def __len__(self) -> int:
        return len(self._records)

    def read(self, indices: Sequence[int]) -> list[Record | RecordError]:
        return self._read(indices, self._source.read)

    def planned_read(self, indices: Sequence[int]) -> ReadRecords:
        if not hasattr(type(self._source), "planned_read"):
            return self.read
        of_source = planned_read(self._source, [self._records[index] for index in indices])
        return lambda indices: self._read(indices, of_source)

    def _read(self, indices: Sequence[int], read: ReadRecords) -> list[Record | RecordError]:
        check_indices(indices, self)
        return read([self._records[index] for index in indices])

    def num_bytes(self, records: range) -> int | None:
        """Returns the bytes of consecutive records in sum; None if the source does not know."""
        of_source = getattr(self._source, "num_bytes", None)
        return None if of_source is None else of_source(self._records[records.start : records.stop])

    def describe(self, index: int) -> str:
        return self._source.describe(self._records[index])

    def fingerprint(self) -> str:
        return f"{self._records.start}-{self._records.stop} of {self._source.fingerprint()}"
