"""Random access to records: the right record, the right place in every message."""

import json
import os
import pickle
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.blending.formats import jsonl
from megatron.blending.formats.record import RecordError, read_records
from megatron.blending.formats.sources import SOURCES, open_source
from tests.unit_tests.blending.folders import write_parquet

RECORDS = [{"text": "a"}, {"text": "é\u2028\n"}, {"n": [1, None]}]


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\n\n \t\n"])
@pytest.mark.parametrize("last_newline", [True, False])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_jsonl_reads_what_was_written(tmp_path, newline, last_newline, mark):
    """Files from other systems would lose their first or last record, or count blank lines as
    records.
    """
    lines = newline.join(json.dumps(record, ensure_ascii=False) for record in RECORDS)
    source = open_source(write(tmp_path / "a.jsonl", mark + lines + newline * last_newline))
    assert len(source) == 3
    assert [source[i] for i in range(3)] == RECORDS


@given(
    lines=st.lists(
        st.sampled_from(["", " ", "\r", '{"k": 1}', ' {"k": "longer than a scan"}\r']), max_size=30
    ),
    scan=st.integers(1, 9),
)
def test_jsonl_index_agrees_with_reading_line_by_line(tmp_path_factory, lines, scan):
    """A line end at the border of two scans would be missed: two records read as one, or line
    numbers off by one.
    """
    path = write(tmp_path_factory.mktemp("jsonl") / "a.jsonl", "\n".join(['{"k": 0}', *lines]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jsonl, "_SCAN_BYTES", scan)
        source = open_source(path)
    expected = [
        (f"{path}:{n}", json.loads(line))
        for n, line in enumerate(path.read_text().split("\n"), 1)
        if line.strip()
    ]
    assert [(source.describe(i), source[i]) for i in range(len(source))] == expected


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (b'{"a": ', "not JSON: Expecting value at column 6"),
        (b"[1]", "must be a JSON object, but is a list"),
        (b'{"a": 1} {"b": 2}', "not JSON: Extra data at column 10"),
        (b'{"a": "\xff"}', "not UTF-8 at byte 8 of the line"),
        (b"\x0c", "not JSON: Expecting value at column 1"),
    ],
)
def test_jsonl_faulty_line_is_named_by_file_and_line(tmp_path, line, fault):
    """The user would search a file of millions of lines; and a faulty line must not spoil its
    neighbours.
    """
    path = write(tmp_path / "a.ndjson", b'{"a": 0}\n\n' + line + b'\n\n{"a": 2}\n')
    source = open_source(path)
    expected = f"{path}:3: {fault}; fix the line"
    with pytest.raises(RecordError, match=f"^{re.escape(expected)}$"):
        source[1]
    assert [source[0], source[2]] == [{"a": 0}, {"a": 2}]


def test_json_array(tmp_path):
    """Alpaca's own file is a JSON list; a list read as lines would be one broken record."""
    path = write(tmp_path / "a.json", "\ufeff" + json.dumps([*RECORDS, 5], indent=1))
    source = open_source(path)
    assert [source[i] for i in range(3)] == RECORDS
    assert source.describe(2) == f"{path} item 2"
    with pytest.raises(
        RecordError, match=r"a\.json item 3: must be a JSON object, but is a int; fix the item"
    ):
        source[3]
    lines = write(tmp_path / "b.json", "\ufeff\n" + "\n".join(map(json.dumps, RECORDS)))
    source = pickle.loads(pickle.dumps(open_source(lines)))
    assert source.read(range(len(source))) == RECORDS, "datasets and Spark name lines so"


def test_each_read_of_a_json_array_gives_objects_of_its_own(tmp_path):
    """An encoder that changes its record changed the data: 2, 3 and 4 turns in epochs 1, 2 and
    3."""
    source = open_source(
        write(tmp_path / "a.json", json.dumps([{"turns": ["a", "b"], "n": 10**30}]))
    )
    for _ in range(2):
        (record,) = read_records(source, [0])
        assert record == source[0] == {"turns": ["a", "b"], "n": 10**30}
        record["turns"].append("c")


@pytest.fixture(params=["a.jsonl", "a.json", "a.parquet"])
def path(request, tmp_path):
    rows = [{"text": str(i)} for i in range(6)]
    path = tmp_path / request.param
    if path.suffix == ".parquet":
        return write_parquet(path, rows, row_group_size=2)
    return write(
        path, json.dumps(rows) if path.suffix == ".json" else "\n".join(map(json.dumps, rows))
    )


def test_survives_pickling_and_forking(path):
    """Loader workers would read garbage through a file position that they share, or be sent the
    file's contents.
    """
    source = open_source(path)
    assert source[5] == {"text": "5"}
    assert pickle.loads(pickle.dumps(source))[4] == {"text": "4"}
    child = os.fork()
    if child == 0:
        os._exit(0 if all(source[i % 6] == {"text": str(i % 6)} for i in range(300)) else 1)
    assert all(source[i % 6] == {"text": str(i % 6)} for i in range(300))
    assert os.waitpid(child, 0)[1] == 0


def test_fingerprint_follows_the_content(path, tmp_path):
    """A run resumed on swapped data would go on as if nothing had happened; one on moved data would
    be refused.
    """
    fingerprint = open_source(path).fingerprint()
    moved = path.rename(tmp_path / f"moved{path.suffix}")
    assert open_source(moved).fingerprint() == fingerprint
    if path.suffix != ".parquet":
        moved.write_bytes(moved.read_bytes().replace(b"3", b"7"))
        assert open_source(moved).fingerprint() != fingerprint


def test_bulk_reads_agree_with_single_ones(path):
    """Training reads in bulk, people look at single records: what they see would not be what was
    trained on.
    """
    source = open_source(path)
    order = [3, 0, 5, 5, 1, 4, 2]
    assert source.read(order) == [source[i] for i in order] == [{"text": str(i)} for i in order]
    assert source.read([]) == []
    with pytest.raises(IndexError):
        source.read([0, 6])


def test_bulk_reads_keep_errors_in_their_places(tmp_path):
    """A caller counts and names what it skips."""
    source = open_source(write(tmp_path / "a.json", '[{"a": 0}, 1, {"a": 2}]'))
    first, error, last = source.read([0, 1, 2])
    assert (first, last) == ({"a": 0}, {"a": 2})
    assert isinstance(error, RecordError)


def test_urls(path):
    """Any file of these kinds may lie in object storage."""
    system = pytest.importorskip("fsspec").filesystem("memory")
    system.put(str(path), f"/sources/{path.name}")
    source = open_source(f"memory://sources/{path.name}")
    assert source.read([5, 2]) == [{"text": "5"}, {"text": "2"}]
    assert pickle.loads(pickle.dumps(source))[1] == {"text": "1"}
    assert source.fingerprint() == open_source(path).fingerprint()
    system.rm("/sources", recursive=True)
    with pytest.raises(ValueError, match="cannot be opened"):
        open_source(f"memory://sources/{path.name}")


def test_index_out_of_range(path):
    """A negative index would read a record that the order never meant."""
    source = open_source(path)
    for index in (-1, 6):
        with pytest.raises(IndexError, match=rf"index must be in range\(6\), but is {index}"):
            source[index]


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("a.jsonl", None, "no such file; check the path"),
        ("a.jsonl", "", "has no records; leave it out of the data"),
        ("a.jsonl", "\ufeff \n\n", "has no records; leave it out of the data"),
        ("a.json", "[]", "has no records; leave it out of the data"),
        ("a.xls", "a,b", f"suffix must be one of {', '.join(SOURCES)}; convert or rename the file"),
        ("a.csv", "a,b", "has no records; leave it out of the data"),
        (
            "a.json",
            '{"data": []}',
            "must hold a list of objects, but holds a dict; write one (pandas",
        ),
        ("a.json", '{"a":\n1}\n{"a": 2}', "one per line into a .jsonl: jq -c . "),
        ("a.json", b'["\xff"]', "not UTF-8 at byte 3; convert the file"),
        ("a.parquet", "PAR?", "not a Parquet file"),
    ],
)
def test_unusable_files_are_refused_at_open(tmp_path, name, content, fault):
    """A run would start without one of its data sets, or fail hours later with a message that names
    no file.
    """
    path = tmp_path / name
    if content is not None:
        write(path, content)
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))}.*{re.escape(fault)}"):
        open_source(path)


def test_directory_is_refused(tmp_path):
    """A directory would be reported as a file of an unknown kind."""
    with pytest.raises(ValueError, match="is a directory; name a file in it"):
        open_source(tmp_path)


@pytest.mark.parametrize("path", ["a.jsonl"], indirect=True)
def test_a_file_that_is_cut_while_it_is_read_is_named(path):
    """The system ends a process that touches a map beyond the end of its file, without a word."""
    source = open_source(path)
    assert not any(
        isinstance(record, RecordError) for record in read_records(source, range(len(source)))
    )
    os.truncate(path, 1)
    for record in read_records(source, range(len(source))):
        assert isinstance(record, RecordError)
        assert re.search(
            rf"{re.escape(str(path))}: was cut from [\d,]+ to 1 bytes while it was read",
            str(record),
        )


def test_what_a_library_raises_names_file_and_row(tmp_path):
    """pyarrow has a dozen kinds of errors, none of which says which file of a thousand is damaged,
    or in which row.
    """
    source = open_source(
        write_parquet(tmp_path / "a.parquet", [{"text": "a" * 50}, {"text": "b"}], 1)
    )
    content = bytearray((tmp_path / "a.parquet").read_bytes())
    at = content.index(b"a" * 50)
    content[at - 20 : at] = b"\xff" * 20
    (tmp_path / "a.parquet").write_bytes(content)
    broken, whole = read_records(source, [0, 1])
    assert isinstance(broken, RecordError)
    assert str(broken).startswith(f"{tmp_path}/a.parquet row 0: cannot be read: ")
    assert whole == {"text": "b"}
