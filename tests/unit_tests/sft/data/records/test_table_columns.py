"""Columns of tables without a JSON form: refused if they are read, by their types alone."""

import pytest

from megatron.blending.formats.json_forms import TableForms
from megatron.sft.data.records.table_columns import check_columns
from megatron.sft.data.records.values import SampleError

pa = pytest.importorskip("pyarrow")


def turns(content=None, arguments=None, **more):
    """The type of a column of turns."""
    function = pa.struct([("name", pa.string()), ("arguments", arguments or pa.string())])
    return pa.list_(
        pa.struct(
            [
                ("role", pa.string()),
                ("content", content or pa.string()),
                ("tool_calls", pa.list_(pa.struct([("function", function)]))),
                *more.items(),
            ]
        )
    )


def notes_on(columns=None, **types):
    return check_columns(TableForms(pa.schema(list(types.items()))), columns or {})


PARTS = pa.list_(pa.struct([("text", pa.string()), ("image", pa.binary())]))


@pytest.mark.parametrize(
    ("types", "columns", "fault"),
    [
        ({"text": pa.binary()}, {}, "column text of the type binary has no JSON form; cast it to"),
        ({"body": pa.binary()}, {"body": "text"}, "column body of the type binary has no JSON"),
        ({"text": pa.timestamp("ms")}, {}, "column text of the type timestamp[ms] must be text; "),
        ({"messages": turns(pa.date32())}, {}, "column messages.content of the type date32[day] m"),
        (
            {"messages": turns(arguments=pa.struct([("d", pa.duration("s"))]))},
            {},
            "column messages.tool_calls.function.arguments.d of the type duration[s] has no JSON",
        ),
        ({"labels": pa.list_(pa.binary())}, {}, "column labels of the type binary has no"),
    ],
)
def test_a_column_that_is_read_needs_a_form(types, columns, fault):
    """Each row would fail, or be trained as Python prints bytes."""
    with pytest.raises(SampleError) as caught:
        notes_on(columns, **types)
    assert str(caught.value).startswith(fault)


def test_other_columns_may_have_any_type():
    """A table with pictures, or with the times of its turns, was sound without them."""
    types = {
        "messages": turns(PARTS, at=pa.timestamp("ns"), photo=pa.binary()),
        "created": pa.timestamp("ns"),
        "images": pa.list_(pa.struct([("bytes", pa.binary())])),
        "raw": pa.binary(),
    }
    assert notes_on({"raw": "none"}, **types) == []
    assert notes_on({"text": "none"}, text=pa.binary()) == []


def test_times_in_arguments_are_noted():
    """`2024-01-02 03:04` has become a time in the table: how it was spelled, nobody knows."""
    (note,) = notes_on(messages=turns(arguments=pa.struct([("at", pa.timestamp("ms"))])))
    assert note.startswith("messages.tool_calls.function.arguments.at of the type timestamp[ms] is")
    assert note.endswith("if the data had another spelling, write the column as string")
