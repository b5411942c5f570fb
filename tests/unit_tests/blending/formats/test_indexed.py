"""Token sequences of .bin and .idx, laid out by hand here: no code of Megatron's is needed to read
them.
"""

import os
import pickle
import struct

import numpy as np
import pytest

from megatron.blending.formats.indexed import IndexedSource
from megatron.blending.formats.record import read_records
from megatron.blending.formats.sources import open_source


def write(
    folder, code=8, dtype="uint16", lengths=(3, 0, 2), bounds=(0, 2, 3), tokens=(7, 65535, 9, 4, 5)
):
    np.array(tokens, dtype).tofile(folder / "t.bin")
    size = np.dtype(dtype).itemsize
    pointers = np.cumsum([0, *lengths[:-1]]) * size
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(lengths), len(bounds))
    index += np.array(lengths, np.int32).tobytes() + pointers.astype(np.int64).tobytes()
    (folder / "t.idx").write_bytes(index + np.array(bounds, np.int64).tobytes())
    return folder / "t.bin"


def tokens(source, indices):
    return [record["tokens"].tolist() for record in source.read(indices)]


def test_reads_the_sequences(tmp_path):
    """A wrong width of a field in the index shifts every sequence after the first."""
    source = open_source(write(tmp_path))
    assert isinstance(source, IndexedSource)
    assert tokens(source, range(3)) == [[7, 65535, 9], [], [4, 5]]
    assert source[0]["tokens"].dtype == source.dtype == np.uint16
    assert source.lengths.tolist() == [3, 0, 2]
    assert source.pointers.tolist() == [0, 6, 6]
    assert source.document_indices.tolist() == [0, 2, 3]
    assert source.describe(2) == f"{tmp_path / 't'}.bin sequence 2"


@pytest.mark.parametrize(
    ("code", "dtype"), [(1, "uint8"), (4, "int32"), (5, "int64"), (7, "float32")]
)
def test_types(tmp_path, code, dtype):
    """Tokens of another type than they were written in are noise."""
    path = write(tmp_path, code, dtype, tokens=(1, 2, 3, 4, 5))
    assert tokens(open_source(path), [2, 0]) == [[4, 5], [1, 2, 3]]


def test_url(tmp_path):
    """The same sequences from object storage."""
    system = pytest.importorskip("fsspec").filesystem("memory")
    write(tmp_path)
    system.put(str(tmp_path), "/indexed", recursive=True)
    source = open_source("memory://indexed/t.bin")
    assert tokens(source, [2, 0, 1]) == [[4, 5], [7, 65535, 9], []]
    assert source[2]["tokens"].tolist() == [4, 5]
    system.rm("/indexed", recursive=True)


@pytest.mark.parametrize("name", ["t", "t.bin", "t.idx"])
def test_named_by_either_file_or_their_common_name(tmp_path, name):
    """Megatron's own options name data without a suffix."""
    write(tmp_path)
    assert len(IndexedSource(str(tmp_path / name))) == 3


def test_pickled_and_read_only(tmp_path):
    """A worker would be sent the tokens; a caller that writes to them would end the process."""
    source = open_source(write(tmp_path))
    sent = pickle.dumps(source)
    assert len(sent) < 400
    assert pickle.loads(sent)[2]["tokens"].tolist() == [4, 5]
    with pytest.raises(ValueError, match="read-only"):
        source[0]["tokens"][0] = 1
    with pytest.raises(IndexError, match=r"range\(3\)"):
        source[-1]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (
            lambda folder: (folder / "t.idx").unlink(),
            r"t\.idx: no such file; a \.bin and its \.idx belong together",
        ),
        (
            lambda folder: (folder / "t.bin").write_bytes(b"123"),
            r"t\.bin: has 3 bytes, but its index goes to 10",
        ),
        (
            lambda folder: (folder / "t.idx").write_bytes(b"MMIDIDX"),
            r"t\.idx: not the index of a \.bin file",
        ),
        (
            lambda folder: (folder / "t.idx").write_bytes(b"x" * 40),
            r"t\.idx: not the index of a \.bin file",
        ),
        (lambda folder: write(folder, code=9), r"t\.idx: version 1 and type 9 are not known"),
        (
            lambda folder: (folder / "t.idx").write_bytes((folder / "t.idx").read_bytes()[:-9]),
            r"t\.idx: .*it is cut or damaged",
        ),
    ],
)
def test_damage_is_refused_at_open(tmp_path, change, fault):
    """A run would train on whatever lies in the place of the tokens."""
    write(tmp_path)
    change(tmp_path)
    with pytest.raises(ValueError, match=fault):
        IndexedSource(str(tmp_path / "t.bin"))


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_file_that_is_cut_while_it_is_read_is_named(tmp_path, suffix):
    """The system ends a process that touches a map beyond the end of its file, without a word."""
    source = open_source(write(tmp_path))
    os.truncate(tmp_path / f"t{suffix}", 1)
    (error,) = read_records(source, [0])
    assert f"{tmp_path / 't'}{suffix}: was cut" in str(error)
