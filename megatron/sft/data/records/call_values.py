"""pure. Checks the values of calls and tools, and leaves out the nulls that a table added to them.

Tables give each object of a column the keys of all. `Dataset.to_json` and pandas write those that
an object lacks as null. Left out are

- arguments that are null and that the called tool's schema does not name
- properties and keywords of schemas that are null, but for default and const
- keys of a call that are null

Other nulls stay. Nulls of objects that were JSON text (`JsonObject`) stand in the data, and stay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from megatron.blending.formats.json_forms import JsonObject
from megatron.sft.data.records.messages import Message
from megatron.sft.data.records.values import check_json

_VALUES = ("default", "const", "enum", "example", "examples")
"""Keywords of a schema whose values are data, no schemas."""
_NAMES = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords of a schema whose values map names to schemas."""
_OPEN = ("$ref", "allOf", "anyOf", "oneOf", "patternProperties")
"""Keywords of a schema that may name further properties."""


class CheckedCalls(NamedTuple):
    """The messages and tools of a conversation."""

    messages: list[Message]
    tools: list[Any] | None


def checked_calls(messages: Sequence[Message], tools: list[Any] | None) -> CheckedCalls:
    """Returns messages and tools without the nulls of a table. Raises SampleError for a value that
    JSON does not have.
    """
    if tools is not None:
        check_json(tools, "tools")
        tools = [_without_schema_nulls(tool) for tool in tools]
    schemas = {
        tool["function"].get("name"): tool["function"].get("parameters")
        for tool in tools or []
        if isinstance(tool.get("function"), Mapping)
    }
    return CheckedCalls([_checked_message(message, schemas) for message in messages], tools)


def _checked_message(message: Message, schemas: Mapping[Any, Any]) -> Message:
    if "tool_calls" not in message.fields:
        return message
    calls = [_checked_call(call, schemas) for call in message.fields["tool_calls"]]
    return message._replace(fields={**message.fields, "tool_calls": calls})


def _checked_call(call: Mapping[str, Any], schemas: Mapping[Any, Any]) -> dict[str, Any]:
    function = call["function"]
    check_json(function["arguments"], f"arguments of {function['name']:.60}")
    arguments = _without_unnamed(function["arguments"], schemas.get(function["name"]))
    rest = {key: value for key, value in call.items() if value is not None}
    return {**rest, "function": {**function, "arguments": arguments}}


def _without_unnamed(value: Any, schema: Any) -> Any:
    """Returns a value without keys that are null and that its schema does not name."""
    if isinstance(value, JsonObject) or not isinstance(schema, Mapping):
        return value
    if isinstance(value, list):
        return [_without_unnamed(item, schema.get("items")) for item in value]
    names = schema.get("properties")
    is_open = schema.get("additionalProperties") not in (None, False) or any(
        schema.get(key) for key in _OPEN
    )
    if not isinstance(value, Mapping) or not isinstance(names, Mapping) or is_open:
        return value
    return {
        key: _without_unnamed(part, names.get(key))
        for key, part in value.items()
        if part is not None or key in names
    }


def _without_schema_nulls(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("parameters"), Mapping):
        return tool
    return {**tool, "function": {**function, "parameters": _cleaned(function["parameters"])}}


def _cleaned(schema: Any, are_names: bool = False) -> Any:
    """Returns a schema, or an object of names with schemas, without its nulls."""
    if isinstance(schema, list):
        return [_cleaned(part) for part in schema]
    if isinstance(schema, JsonObject) or not isinstance(schema, Mapping):
        return schema
    return {
        key: part
        if not are_names and key in _VALUES
        else _cleaned(part, not are_names and key in _NAMES)
        for key, part in schema.items()
        if part is not None or (not are_names and key in ("default", "const"))
    }
