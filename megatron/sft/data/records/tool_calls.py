"""pure. Tools and tool calls of a conversation, in the form of OpenAI's API, which chat templates
read.

    {"name": "add", "arguments": {"a": 1}}
    -> {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}

Arguments stay as the record has them, an object or its JSON text. Templates differ in which of them
they read, so `templates.writer` gives each its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.packing.quoting import shown
from megatron.sft.data.records.values import SampleError, json_of


def read_tools(tools: object) -> list[Any]:
    """Returns the tools of a conversation. `tools` is a list of JSON schemas, whose parameters may
    be JSON text.
    """
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise SampleError(f"tools must be a list of JSON schemas, but is {shown(tools)}")
    return [_tool(tool) for tool in tools]


def _tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a tool in the form {"type": "function", "function": ...}."""
    if "function" not in tool:
        tool = {"type": "function", "function": tool}
    function = tool["function"]
    if isinstance(function, Mapping) and isinstance(function.get("parameters"), str):
        parameters = json_of(function["parameters"], "tools parameters")
        return {**tool, "function": {**function, "parameters": parameters}}
    return tool


def are_calls(value: object) -> bool:
    """Returns whether a value is a list of calls: objects with a name, or with a function."""
    return isinstance(value, list) and all(
        isinstance(call, Mapping) and not {"name", "function"}.isdisjoint(call) for call in value
    )


def calls_of_turn(turn: Mapping[str, Any], place: str) -> list[Any]:
    """Returns the calls of a turn, in `tool_calls` and the older `function_call`."""
    calls = turn.get("tool_calls", [])
    if isinstance(calls, str):
        calls = json_of(calls, f"{place}.tool_calls")
    if not isinstance(calls, list):
        raise SampleError(f"{place}.tool_calls must be a list, but is {shown(calls)}")
    if "function_call" in turn:
        calls = [*calls, turn["function_call"]]
    where = f"{place}.tool_calls"
    calls = [json_of(call, where) if isinstance(call, str) else call for call in calls]
    return [_call(call, where) for call in calls]


def calls_of_json(text: str, where: str) -> list[Any]:
    """Returns the calls in a JSON text, which has one call or a list of them."""
    calls = json_of(text, where)
    return [_call(call, where) for call in (calls if isinstance(calls, list) else [calls])]


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise SampleError(f"{where} must hold calls {{name, arguments}}, but holds {shown(call)}")
    arguments = function.get("arguments")
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        arguments = {}  # a call without arguments, as servers read null and ""
    elif isinstance(arguments, str):
        json_of(arguments, f"{where} arguments")
    rest = {
        key: value
        for key, value in call.items()
        if key not in ("function", "name", "arguments", "type")
    }
    return {
        "type": "function",
        **rest,
        "function": {"name": function["name"], "arguments": arguments},
    }
