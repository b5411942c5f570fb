"""Calls and tools: nulls of tables are left out, those of the data stay, and JSON alone is read."""

import json
from decimal import Decimal

import pytest

from megatron.sft.data.records.content import Conversation
from megatron.sft.data.records.formats import read_record
from megatron.sft.data.records.values import SampleError

TEXT, NUMBER = {"type": "string"}, {"type": "integer"}


def conversation(record) -> Conversation:
    content = read_record(record, {}).content
    assert isinstance(content, Conversation)
    return content


def tool(name, properties, **schema):
    parameters = {"type": "object", "properties": properties, **schema}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def call(arguments, **more):
    return {"type": "function", **more, "function": {"name": "f", "arguments": arguments}}


def read(arguments, tools=None, **more):
    """The arguments of a call, and the tools, as a template gets them."""
    turns = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [call(arguments, **more)]},
    ]
    content = conversation({"messages": turns, "tools": tools})
    (made,) = content.messages[1].fields["tool_calls"]
    return made, content.tools


@pytest.mark.parametrize(
    ("arguments", "tools", "kept"),
    [
        ({"a": 1, "x": None}, [tool("f", {"a": NUMBER, "x": None})], {"a": 1}),
        ({"a": None, "x": 1}, [tool("f", {"a": TEXT, "x": TEXT})], {"a": None, "x": 1}),
        (
            {"a": {"b": None, "c": 1}},
            [tool("f", {"a": {"properties": {"c": {}}}})],
            {"a": {"c": 1}},
        ),
        (
            {"a": [{"b": None, "c": None}]},
            [tool("f", {"a": {"items": {"properties": {"c": {}}}}})],
            {"a": [{"c": None}]},
        ),
        ({"x": None}, [tool("f", {})], {}),
        ({"x": None}, [tool("g", {"x": TEXT})], {"x": None}),
        ({"x": None}, None, {"x": None}),
        ({"x": None}, [tool("f", {}, additionalProperties=True)], {"x": None}),
        ({"x": None}, [tool("f", {}, anyOf=[{"properties": {"x": TEXT}}])], {"x": None}),
        ({"x": None}, [{"name": "f", "parameters": {"type": "object"}}], {"x": None}),
    ],
)
def test_nulls_that_a_table_added_are_left_out(arguments, tools, kept):
    """Half of the arguments of all tools would be trained as null in each call; or a null that the
    data mean would be lost.
    """
    made, _ = read(arguments, tools, id=None)
    assert made == call(kept), "nor a null id"


def test_nulls_of_json_text_stay():
    """Text was never part of a table: its nulls are the author's."""
    tools = [tool("f", {"a": NUMBER, "b": {"type": "string", "enum": None}})]
    record = {
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "tool_calls": [call({"x": None})]},
        ],
        "tools": tools,
    }
    content = conversation({key: json.dumps(value) for key, value in record.items()})
    assert content.messages[1].fields["tool_calls"] == [call({"x": None})]
    assert content.tools == tools


def test_schemas_lose_their_nulls():
    """`"enum": null` is no schema, and would stand in every prompt."""
    given = {
        "default": {"type": "string", "enum": None, "default": None},
        "x": None,
        "list": {"items": {"const": None, "description": None, "enum": [None, "a"]}},
    }
    kept = {
        "default": {"type": "string", "default": None},
        "list": {"items": {"const": None, "enum": [None, "a"]}},
    }
    _, tools = read({}, [tool("f", given, required=None)])
    assert tools == [tool("f", kept)]


def test_parameters_and_items_as_json_text():
    """A schema as text in a prompt of schemas is text within JSON, and a call as text is none."""
    schema = {"type": "object", "properties": {"a": NUMBER}}
    tools = [{"name": "f", "parameters": json.dumps(schema)}]
    text = json.dumps(call({}))
    for calls in ([text], f"[{text}]"):
        turn = {"role": "assistant", "tool_calls": calls}
        content = conversation({"messages": [turn]})
        assert content.messages[0].fields["tool_calls"] == [call({})]
    for form in (tools, [json.dumps(tools[0])], json.dumps(tools)):
        assert read({}, form)[1] == [tool("f", {"a": NUMBER})]


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        (float("nan"), "arguments of f.x is nan, which JSON does not have; write null or text"),
        ([float("-inf")], "arguments of f.x is -inf, which JSON does not have"),
        (b"a", "arguments of f.x is b'a', which has no JSON form; write it as text"),
        (Decimal("0.1"), "arguments of f.x is Decimal('0.1'), which has no JSON form"),
    ],
)
def test_what_json_does_not_have_is_refused(value, fault):
    """The call would be trained as no server can parse it."""
    with pytest.raises(SampleError) as caught:
        read({"x": value})
    assert str(caught.value).startswith(fault)
    with pytest.raises(SampleError, match=r"tools\.function\.parameters\.properties\.x is|has no"):
        read({}, [tool("f", {"x": value})])
