"""CSV and TSV as spreadsheets and data frames write them."""

import csv
import io
import json
import pickle
from string import printable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.blending.formats.delimited import DelimitedSource
from megatron.blending.formats.record import RecordError
from megatron.blending.formats.sources import open_source


def written(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return DelimitedSource(str(path))


TEXTS = st.lists(st.tuples(st.text(printable), st.text('äß"\n\r, ab')), min_size=1, max_size=8)


@given(rows=TEXTS, ends=st.sampled_from(["\n", "\r\n"]))
@settings(max_examples=60, deadline=None)
def test_rows_come_back_as_python_wrote_them(tmp_path_factory, rows, ends):
    """A line end in quotes would tear a row in two, and shift all that follow."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator=ends, quoting=csv.QUOTE_ALL)
    writer.writerows([("prompt", "completion"), *rows])
    source = written(tmp_path_factory.mktemp("csv") / "a.csv", text.getvalue())
    assert len(source) == len(rows)
    for number, (prompt, completion) in enumerate(rows):
        if prompt[:1] not in ("[", "{"):
            assert source[number] == {"prompt": prompt, "completion": completion}


def test_tabs_marks_blank_lines_and_json(tmp_path):
    """Excel's byte-order mark would become part of the first name; turns are JSON in a cell."""
    turns = [{"role": "user", "content": "a, b"}]
    cell = json.dumps(turns).replace('"', '""')
    source = written(tmp_path / "a.tsv", f'\ufeffmessages\tid\n\n"{cell}"\t7\r\n\r\n[x\t8')
    assert [source[0], source[1]] == [{"messages": turns, "id": "7"}, {"messages": "[x", "id": "8"}]
    assert source.describe(1) == f"{tmp_path / 'a.tsv'} row 3"
    assert source[0]["messages"].text == json.dumps(turns), "the text, for a column of text"
    for head in ("\ufeff\n", "\ufeff\r\n\n", "\n\ufeff", "\ufeff\ufeff\n", "\n\ufeff\n", "\r\r\n"):
        assert written(tmp_path / "b.csv", f"{head}text\na\n")[0] == {"text": "a"}
    again = pickle.loads(pickle.dumps(source))
    assert (again[1], again.fingerprint()) == (source[1], source.fingerprint())


@pytest.mark.parametrize(
    ("name", "names", "fault"),
    [
        ("a.csv", "prompt;completion", r"by ',', but 'prompt;completion' are by ';'; save it with"),
        ("a.csv", "prompt\tcompletion", r"by .* are by '\\t'; name it \.tsv"),
        ("a.tsv", "prompt,completion", r"by '\\t', but 'prompt,completion' .*; name it \.csv"),
    ],
)
def test_another_separator_is_named(tmp_path, name, names, fault):
    """Excel writes `;` where numbers have commas; rows were refused for keys that they lack."""
    with pytest.raises(ValueError, match=rf"{name}:1: columns must be separated {fault}"):
        written(tmp_path / name, f'{names}\n"a; b"\t"c, d"\n')
    for names in ('question;"answer, long"', "a,b;c", '"a";"b"'):
        with pytest.raises(ValueError, match=r"a.csv:1: columns must be .* are by ';'; save it"):
            written(tmp_path / "a.csv", f"{names}\n1;2\n")
    assert written(tmp_path / "a.csv", "a;b,c\n1,2\n")[0] == {"a;b": "1", "c": "2"}
    assert len(written(tmp_path / "a.csv", "text\na; b\n")) == 1


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        (b"1", "must have 2 values, as the first line has, but has 1"),
        (
            b"1,2,3",
            "must have 2 values, as the first line has, but has 3; quote values that",
        ),
        (b"\xff,2", "not UTF-8 at byte 1"),
        (b'"a"b,2', "not a row of values"),
    ],
)
def test_a_bad_row_is_named(tmp_path, row, fault):
    """A row too short would train on an empty answer."""
    source = written(tmp_path / "a.csv", b"q,a\n1,2\n" + row + b"\n3,4\n")
    assert source[2] == {"q": "3", "a": "4"}
    with pytest.raises(RecordError, match=f"a.csv row 3: {fault}"):
        source[1]


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("", "is empty"),
        ("\ufeff", "is empty"),
        ("\ufeff\n", "is empty"),
        ("a,a\n1,2\n", "must differ"),
        ("a,b\n", "has no records"),
    ],
)
def test_a_file_without_names_or_rows_is_refused(tmp_path, content, fault):
    """The first record would be taken for names, or names for data."""
    path = tmp_path / "a.csv"
    path.write_text(content)
    with pytest.raises(ValueError, match=fault):
        open_source(path)
