"""pure. Names of a record's fields, and the fields of a record under these names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.blending.formats.delimited import ParsedCell
from megatron.sft.data.records.token_ids import TOKEN_COLUMNS
from megatron.sft.data.records.values import SampleError, is_empty, json_of

TURNS = ("messages", "conversations", "conversation")
QUESTION, CONTEXT = ("instruction", "query", "question"), ("input", "context")
ANSWER, SYSTEM = ("output", "response", "answer"), ("system", "system_prompt")
TOOLS = ("tools", "functions")
BESIDE_TURNS = (*SYSTEM, *TOOLS, "chat_template_kwargs")
_READ = (
    *TURNS,
    "prompt",
    "completion",
    "responses",
    *QUESTION,
    *CONTEXT,
    *ANSWER,
    *BESIDE_TURNS,
    "history",
    "text",
)
TURN_COLUMNS = (*TURNS, "prompt", "completion", "responses")
"""Keys whose values may be turns."""
READ_COLUMNS = frozenset((*_READ, "answers", "tokens", *TOKEN_COLUMNS, "weight", "weights"))
"""Keys that some format reads."""
_JSON_TEXT = frozenset(
    (
        *(*TURNS, "responses", "weights", "history", "answers"),
        *(*TOOLS, "chat_template_kwargs", "tokens", *TOKEN_COLUMNS, "images"),
    )
)
"""Keys whose values are lists or objects. Such a value may be JSON text."""
_NEVER_READ = ("chosen", "rejected", "rejected_response", "rejected_messages")
_NOT_TEXT = ("image", "images", "audio", "audios", "video", "videos")
PREFERENCES = ("label", "kto_tag", "chosen")
"""Keys that mark an answer as good or bad, by true or false, in preference data: of TRL and
ms-swift, of LLaMA-Factory, of others.
"""
_LISTS = frozenset((*TURNS, *TOOLS))
"""Keys whose values are lists of objects, which tables may hold as JSON text."""
_THOUGHTS = ("reasoning_content", "reasoning", "thinking", "cot")
TEXT_COLUMNS = frozenset((*_READ, *_NEVER_READ, *_NOT_TEXT, *_THOUGHTS, "tokens"))
"""Keys whose values are meant for training, in any format of any trainer."""


def rename_fields(record: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """Returns the fields with a value, under the names above. An empty string is kept: it may be
    an answer. JSON text of a list or an object is parsed where only these can stand.
    """
    fields: dict[str, Any] = {}
    for column, value in record.items():
        name = columns.get(column, column)
        is_absent = value is None or (is_empty(value) and name not in TOKEN_COLUMNS)
        if name == "none" or (is_absent and not isinstance(value, str)):
            continue
        if name in _JSON_TEXT and isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
            value = _parse(value, name)
        if name in _LISTS and isinstance(value, list):
            value = [_parse(item, name) if _is_object(item) else item for item in value]
        is_list = name in _JSON_TEXT or (name in TURN_COLUMNS and _are_turns(value, columns))
        if isinstance(value, ParsedCell) and not is_list:
            value = value.text
        if name in fields:
            raise SampleError(
                f"record has {name} twice, by --data-columns; add none=COLUMN for the one to leave "
                "out"
            )
        fields[name] = value
    return fields


def _is_object(item: object) -> bool:
    return isinstance(item, str) and item.lstrip().startswith("{")


def _parse(text: str, name: str) -> Any:
    """Returns the value of JSON text. Other text stays, unless it must be turns or tools."""
    try:
        return json_of(text, name)
    except SampleError:
        if name in _LISTS:
            raise
        return text


def _are_turns(value: object, columns: Mapping[str, str]) -> bool:
    roles = {"role", "from", "human", *(key for key, name in columns.items() if name == "role")}
    return isinstance(value, list) and all(
        isinstance(turn, Mapping) and not roles.isdisjoint(turn) for turn in value
    )
