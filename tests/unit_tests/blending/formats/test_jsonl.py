"""Lines of JSON by index: the same records with an index file, without one, and with one that is
wrong.
"""

import json
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.blending.energon._prepare import prepare_jsonl
from megatron.blending.formats import jsonl
from megatron.blending.formats.files import open_file
from megatron.blending.formats.jsonl import JsonlSource, index_lines
from megatron.blending.formats.record import RecordError


def write(path, content):
    path.write_bytes(content)
    return str(path)


@pytest.mark.parametrize(
    ("content", "offsets"),
    [
        (b"{}\n\n{}\n", [0, 4, 7]),
        (b'{"a":1}\r\n\n  \n{"b":2}\n{"c":3}', [0, 13, 21, 28]),
        (b"\xef\xbb\xbf{}\n{}", [3, 6, 8]),
        (b"\n \n{}\n", [3, 6]),
        (b" {}\n\t\n", [0, 6]),
        (b"", [0]),
        (b"\n\r\n", [3]),
        (b"\xef\xbb\xbf", [3]),
    ],
)
def test_offsets(tmp_path, content, offsets):
    """Each is where a record starts for energon too, which reads these files: blank lines go with
    the line before.
    """
    assert index_lines(open_file(write(tmp_path / "a.jsonl", content))).tolist() == offsets


@given(
    lines=st.lists(
        st.sampled_from(["", " ", "\r", '{"k": 1}', ' {"k": "é"}\r', "\t"]), max_size=30
    ),
    scan=st.integers(1, 9),
    mark=st.sampled_from(["", "\ufeff"]),
)
def test_index_file_changes_nothing(tmp_path_factory, lines, scan, mark):
    """A record would be another one on the machine where the data was prepared."""
    path = write(
        tmp_path_factory.mktemp("jsonl") / "a.jsonl", (mark + "\n".join([*lines, "{}"])).encode()
    )
    plain = JsonlSource(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jsonl, "_SCAN_BYTES", scan)
        count = prepare_jsonl(path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        indexed = JsonlSource(path)
    assert count == len(plain) == len(indexed)
    everything = range(count)
    assert indexed.read(everything) == plain.read(everything) == [plain[i] for i in everything]
    assert [indexed.describe(i) for i in everything] == [plain.describe(i) for i in everything]
    assert indexed.fingerprint() == plain.fingerprint()


@pytest.mark.parametrize(
    ("index", "fault"),
    [
        ([0, 8, 16], "it ends at byte 16 of 24"),
        ([0, 9, 16, 24], "no line starts at byte 9"),
        ([0, 16, 8, 24], "no line starts at byte 8"),
        ([0, 8, 8, 24], "no line starts at byte 8"),
        ([], "it has 0 bytes, which is not a multiple of 8"),
        (b"123", "it has 3 bytes, which is not a multiple of 8"),
    ],
)
def test_stale_index_is_seen(tmp_path, index, fault):
    """Data that was written again after it was prepared would be read from the middle of its
    lines."""
    path = write(tmp_path / "a.jsonl", b'{"a":0}\n{"a":1}\n{"a":2}\n')
    raw = index if isinstance(index, bytes) else np.array(index, np.uint64).tobytes()
    write(tmp_path / "a.jsonl.idx", raw)
    with pytest.warns(
        UserWarning, match=f"a.jsonl.idx: does not belong to the file beside it: {fault}"
    ):
        source = JsonlSource(path)
    assert source.read([2, 0]) == [{"a": 2}, {"a": 0}]


def test_energons_index_with_leading_blank_lines(tmp_path):
    """Energon's first offset is 0 whatever stands there: the record is the same, and so is its
    line.
    """
    path = write(tmp_path / "a.jsonl", b'\n \n{"a":1}\r\n{"a":')
    write(tmp_path / "a.jsonl.idx", np.array([0, 12, 17], np.uint64).tobytes())
    source = JsonlSource(path)
    assert source[0] == {"a": 1}
    assert [source.describe(i) for i in range(2)] == [f"{path}:3", f"{path}:4"]


def test_faulty_lines_stand_in_their_places(tmp_path):
    """One bad line of a batch would take the others with it, or shift them."""
    lines = [
        b'{"a":0}',
        b"[1]",
        b'{"a":',
        b'{"a":3}',
        b"\xff",
        b'{"a":' + b"9" * 5000 + b"}",
        b"[" * 100_000,
    ]
    source = JsonlSource(write(tmp_path / "a.jsonl", b"\n".join(lines)))
    records = source.read([3, 2, 1, 0, 4, 5, 6])
    assert records[0] == {"a": 3}
    assert records[3] == {"a": 0}
    faults = [str(records[i]).split("a.jsonl:")[1] for i in (1, 2, 4, 5, 6)]
    assert [fault[:18] for fault in faults] == [
        "3: not JSON: Expec",
        "2: must be a JSON ",
        "5: not UTF-8 at by",
        "6: not JSON that c",
        "7: not JSON that c",
    ]
    assert all(isinstance(records[i], RecordError) for i in (1, 2, 4, 5, 6))


def test_index_out_of_range(tmp_path):
    """Numpy would take -1 for the last record."""
    source = JsonlSource(write(tmp_path / "a.jsonl", b"{}\n{}"))
    for wrong in (-1, 2):
        with pytest.raises(IndexError, match=rf"index must be in range\(2\), but is {wrong}"):
            source.read([0, wrong])


def test_url(tmp_path):
    """Data in object storage, with its index beside it."""
    system = pytest.importorskip("fsspec").filesystem("memory")
    system.pipe("/jsonl/a.jsonl", b'{"a":0}\n{"a":1}\n')
    assert JsonlSource("memory://jsonl/a.jsonl").read([1, 0]) == [{"a": 1}, {"a": 0}]
    system.pipe("/jsonl/a.jsonl.idx", np.array([0, 8, 16], np.uint64).tobytes())
    source = JsonlSource("memory://jsonl/a.jsonl")
    assert source.read([1, 0]) == [{"a": 1}, {"a": 0}]
    assert source.describe(1) == "memory://jsonl/a.jsonl:2"
    system.rm("/jsonl", recursive=True)


def test_an_index_that_leads_beyond_the_file_is_no_record(tmp_path):
    """Of a place between those that are checked when the index is opened; the memory there is
    another's.
    """
    lines = b"".join(b'{"a":%d}\n' % (number % 10) for number in range(200))
    offsets = np.arange(0, len(lines) + 1, 8, dtype=np.uint64)
    offsets[2] = len(lines) + 100
    path = write(tmp_path / "a.jsonl", lines)
    write(tmp_path / "a.jsonl.idx", offsets.tobytes())
    source = JsonlSource(path)
    assert source.read([0, 3]) == [{"a": 0}, {"a": 3}]
    for wrong in (1, 2):
        with pytest.raises(ValueError, match=r"a\.jsonl: bytes .* asked for, but it has 1600"):
            source.read([0, wrong])


def test_long_lines(tmp_path):
    """They are asked for ahead, from an address of their own."""
    records = [{"a": 1}, {"a": "x" * 300_000}, {"a": 2}]
    source = JsonlSource(write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, records)).encode()))
    assert source.read([2, 1, 0]) == records[::-1]


def test_values_are_those_of_json(tmp_path):
    """The parser is called below its usual entry, which strips and checks."""
    records = [{"a": [1.5, None, True, '\u2028 \\ "']}, {}, {"b": {"c": -0.0}}]
    source = JsonlSource(
        write(tmp_path / "a.jsonl", "\r\n".join(map(json.dumps, records)).encode() + b" \t")
    )
    assert source.read(range(3)) == records
