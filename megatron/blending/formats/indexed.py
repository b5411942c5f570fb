"""pure. Reads the token sequences of Megatron's tools: tokens in FILE.bin, their places in
FILE.idx.

Content of the index:

    b"MMIDIDX\\0\\0"     9 bytes
    version            uint64, 1
    type of tokens     uint8, 1 to 8: see `_DTYPES`
    num_sequences      uint64
    num_bounds         uint64
    lengths            int32 [num_sequences], in tokens
    pointers           int64 [num_sequences], offset in FILE.bin in bytes
    bounds             int64 [num_bounds]; document d is sequences [bounds[d], bounds[d + 1])
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megatron.blending.formats.files import File, LocalFile, is_file, open_file, read_ranges
from megatron.blending.formats.record import FileSource, Record, RecordError, check_index, read_each

_MAGIC = b"MMIDIDX\x00\x00"
_HEAD_BYTES = 34  # 9 of the magic, 8 of the version, 1 of the type, 8 of each number
_DTYPES = ("uint8", "int8", "int16", "int32", "int64", "float64", "float32", "uint16")


class IndexedSource(FileSource):
    """The sequences of a .bin and its .idx. A record is {"tokens": array}, in the stored type.

    The path may name either file, or both without a suffix. A read takes about 1 microsecond: the
    array is a read-only view of the file.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path.removesuffix(".bin").removesuffix(".idx"))

    def _open(self) -> None:
        for suffix in (".bin", ".idx"):
            if not is_file(self._path + suffix):
                raise ValueError(
                    f"{self._path}{suffix}: no such file; a .bin and its .idx belong together"
                )
        self._file = open_file(self._path + ".bin")
        self._index = index = open_file(self._path + ".idx")
        code, count, num_bounds = self._read_head(index)
        self.dtype = np.dtype(_DTYPES[code - 1])
        """Type of the tokens."""
        self.lengths: npt.NDArray[np.int32] = index.array(np.int32, _HEAD_BYTES, count)
        """Number of tokens of each sequence."""
        self.pointers: npt.NDArray[np.int64] = index.array(np.int64, _HEAD_BYTES + 4 * count, count)
        """Offset of each sequence in bytes."""
        self.document_indices: npt.NDArray[np.int64] = index.array(
            np.int64, _HEAD_BYTES + 12 * count, num_bounds
        )
        """First sequence of each document, and the number of sequences at the end."""
        # Megatron's tools write sequences one after the other, so that the last one ends the file.
        if (
            count
            and (end := int(self.pointers[-1]) + int(self.lengths[-1]) * self.dtype.itemsize)
            > self._file.size
        ):
            raise ValueError(
                f"{self._file.location}: has {self._file.size} bytes, but its index goes to {end}; "
                "it is cut, or the index of another file"
            )
        self._tokens = self._file.array(self.dtype) if isinstance(self._file, LocalFile) else None

    @staticmethod
    def _read_head(index: File) -> tuple[int, int, int]:
        """Returns the code of the tokens' type, the number of sequences, and the number of document
        bounds.
        """
        head = index.read(0, min(_HEAD_BYTES, index.size))
        if not head.startswith(_MAGIC) or len(head) < _HEAD_BYTES:
            raise ValueError(
                f"{index.location}: not the index of a .bin file; it must start with {_MAGIC!r}"
            )
        version, code = int.from_bytes(head[9:17], "little"), head[17]
        if version != 1 or not 1 <= code <= len(_DTYPES):
            raise ValueError(
                f"{index.location}: version {version} and type {code} are not known; 1 and 1 to 8 "
                "are"
            )
        count, num_bounds = (int.from_bytes(head[at : at + 8], "little") for at in (18, 26))
        return code, count, num_bounds

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Record:
        check_index(index, self)
        for file in (self._index, self._file):
            if isinstance(file, LocalFile):
                file.check()
        start, length = int(self.pointers[index]), int(self.lengths[index])
        if self._tokens is None:
            return {"tokens": self._file.array(self.dtype, start, length)}
        first = start // self.dtype.itemsize
        return {"tokens": self._tokens[first : first + length]}

    def read(self, indices: Sequence[int]) -> list[Record | RecordError]:
        if self._tokens is not None:
            return read_each(self, indices)
        for index in indices:
            check_index(index, self)
        starts = self.pointers[list(indices)].tolist()
        ends = [
            start + int(self.lengths[index]) * self.dtype.itemsize
            for start, index in zip(starts, indices)
        ]
        contents = read_ranges([(self._file, start, end) for start, end in zip(starts, ends)])
        return [{"tokens": np.frombuffer(content, self.dtype)} for content in contents]

    def describe(self, index: int) -> str:
        return f"{self._path}.bin sequence {index}"
