"""Cells of tables as JSON values: by type, at any depth, and as the documents say."""

import datetime
import json
from decimal import Decimal
from itertools import groupby
from pathlib import Path

import pytest

from megatron.blending.formats.json_forms import FORMS, TableForms
from megatron.blending.formats.record import read_records
from megatron.blending.formats.sources import open_source

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

DATA_PAGE = Path(__file__).parents[4] / "docs" / "reference" / "data.md"
MOMENT = datetime.datetime(2024, 1, 2, 3, 4, 5, 120000)
DAY = MOMENT.date()
STRUCT = pa.struct([("x", pa.float32()), ("at", pa.timestamp("ns")), ("none", pa.null())])

CELLS = [
    (pa.int64(), 2**53 + 1, 2**53 + 1),
    (pa.uint64(), 2**64 - 1, 2**64 - 1),
    (pa.float32(), 0.1, 0.1),
    (pa.float32(), 16777216.0, 16777216.0),
    (pa.float64(), 0.30000000000000004, 0.30000000000000004),
    (pa.decimal128(5, 2), Decimal("1.10"), 1.1),
    (pa.decimal128(38, 0), Decimal(2**70), 2**70),
    (pa.decimal128(38, 18), Decimal("1.5"), 1.5),
    (pa.bool_(), True, True),
    (pa.null(), None, None),
    (pa.large_string(), "a", "a"),
    (pa.dictionary(pa.int8(), pa.string()), "a", "a"),
    (pa.date32(), DAY, "2024-01-02"),
    (pa.date64(), DAY, "2024-01-02"),
    (pa.time64("us"), MOMENT.time(), "03:04:05.120"),
    (pa.timestamp("ms"), MOMENT, "2024-01-02T03:04:05.120"),
    (pa.timestamp("ns"), MOMENT.replace(microsecond=0), "2024-01-02T03:04:05"),
    (pa.timestamp("us", "Europe/Berlin"), MOMENT, "2024-01-02T03:04:05.120Z"),
    (pa.map_(pa.string(), pa.float32()), [("a", 0.1), ("b", None)], {"a": 0.1, "b": None}),
    (
        pa.map_(pa.string(), STRUCT),
        [("k", {"x": 0.1})],
        {"k": {"x": 0.1, "at": None, "none": None}},
    ),
    (
        pa.large_list(STRUCT),
        [{"x": 1e-8, "at": MOMENT}, None],
        [{"x": 1e-8, "at": "2024-01-02T03:04:05.120", "none": None}, None],
    ),
    (pa.list_(pa.time32("s"), 1), [datetime.time(1)], ["01:00:00"]),
]


def written(path, *cells):
    """A Parquet file of one row with these cells, (type, value), opened."""
    columns = {f"c{number}": pa.array([cell[1]], cell[0]) for number, cell in enumerate(cells)}
    pq.write_table(pa.table(columns), path)
    return open_source(str(path))


def test_each_type_has_its_form(tmp_path):
    """Another value would be trained than the data have: 0.10000000149 for 0.1, pairs for a map,
    or none at all, as pyarrow raises for nanoseconds where pandas is missing.
    """
    source = written(tmp_path / "a.parquet", *CELLS)
    assert not source.forms.without_form
    (row,) = source.read([0])
    values = [row[f"c{number}"] for number in range(len(CELLS))]
    assert values == [value for _, _, value in CELLS]
    assert json.dumps(values) == json.dumps([value for _, _, value in CELLS]), "1 is not 1.0"
    assert [str(field) for field in source.forms.times][:2] == [
        "c12 of the type date32[day]",
        "c13 of the type date32[day]",
    ]


def test_columns_without_a_form_do_not_hinder_others(tmp_path):
    """Who trains on text could not read a table that has pictures or durations, too."""
    cells = [
        (pa.string(), "a"),
        (pa.binary(), b"\xff"),
        (pa.duration("ns"), 5),
        (pa.map_(pa.int8(), pa.int8()), [(1, 2)]),
        (pa.decimal128(38, 20), Decimal("0.12345678901234567890")),
        (pa.struct([("a", pa.list_(pa.binary()))]), {"a": [b""]}),
    ]
    source = written(tmp_path / "a.parquet", *cells)
    assert [".".join(field.path) for field in source.forms.without_form] == [
        "c1",
        "c2",
        "c3",
        "c5.a",
    ]
    (row,) = source.read([0])
    assert (row["c0"], row["c1"], row["c4"]) == ("a", b"\xff", cells[4][1])


def test_what_stands_twice_is_refused(tmp_path):
    """One of two values would be lost."""
    source = written(
        tmp_path / "a.parquet", (pa.map_(pa.string(), pa.int8()), [("a", 1), ("a", 2)])
    )
    (error,) = read_records(source, [0])
    assert str(error).endswith("row 0: cannot be read: a map has the key 'a' twice; keep one")
    forms = TableForms(pa.schema([("a", pa.int8()), ("a", pa.string())]))
    assert [field.form.way_out for field in forms.without_form] == [
        "rename one of the two fields of that name"
    ]


@pytest.mark.parametrize("kind", ["run_end_encoded", "sparse_union", "duration", "tensor", "view"])
def test_types_that_are_not_declared_have_no_form(kind):
    """A new type of Arrow would be trained as Python prints it."""
    kinds = {
        "run_end_encoded": lambda: pa.run_end_encoded(pa.int32(), pa.string()),
        "sparse_union": lambda: pa.sparse_union([pa.field("a", pa.int8())]),
        "duration": lambda: pa.duration("s"),
        "tensor": lambda: pa.fixed_shape_tensor(pa.int8(), [2]),
        "view": lambda: pa.list_view(pa.date32()),
    }
    if kind == "view" and not hasattr(pa, "list_view"):
        pytest.skip("a later pyarrow has it")
    forms = TableForms(pa.schema([("outer", pa.struct([("inner", kinds[kind]())]))]))
    assert [field.path for field in forms.without_form] == [("outer", "inner")]


def test_the_documents_have_the_forms():
    """The page would promise another form than the one that is trained."""
    rows = [
        f"| {', '.join(f'`{name}`' for name, _ in group)} | {form.json}"
        + (f"; {form.way_out}" if form.way_out else "")
        + " |"
        for form, group in groupby(FORMS.items(), key=lambda item: item[1])
    ]
    page = DATA_PAGE.read_text().splitlines()
    start = page.index("| Arrow type | JSON form |") + 2
    assert page[start : start + len(rows)] == rows
