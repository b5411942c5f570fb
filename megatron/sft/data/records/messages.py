"""pure. The turns of a conversation: as chat data sets write them -> messages, as chat templates
read them.

    {"role": "user", "content": "hi"}               OpenAI, TRL, ms-swift; content may be a list of
                                                    text parts, {"type": "text", "text": ...};
                                                    LLaMA-Factory: "value"
    {"from": "human", "value": "hi"}                ShareGPT, OpenHermes, LLaMA-Factory, Axolotl
    {"human": "hi", "assistant": "hello"}           ms-swift: two turns
    {"role": "assistant", "tool_calls": [...]}      OpenAI, TRL; `function_call` is the older name
                                                    of a single call
    {"from": "function_call", "value": "{...}"}     LLaMA-Factory, and ms-swift as `tool_call`:
                                                    calls in JSON; those that follow one another
                                                    make one message

A turn's `train`, `training` and `loss` (true or false), `loss_weight`, `weight` and `loss_scale`
(numbers) scale its loss. A `loss_weight` above 0 on a turn of others asks to train on it, as
`train` does.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

ROLES: Mapping[str, str] = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bot", "model"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "tool_response", "ipython"), "tool"),
}
"""Every accepted name of a role -> the name that chat templates know."""
_CALLING_ROLES = ("function_call", "tool_call")
"""Roles of turns in which the assistant calls tools, and that hold the calls as JSON."""
REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")
_TRAIN = ("train", "training", "loss", "loss_weight")
_WEIGHT = ("weight", "loss_scale")
_PASSED_ON = ("name", "tool_call_id")
_READ = {
    *("tool_calls", "function_call"),
    *_PASSED_ON,
    *REASONING_NAMES,
    *_TRAIN,
    *_WEIGHT,
}
"""Keys of a turn that are read, beside those of its role and content."""
_UNREADABLE = (
    "train_detail",
    "refusal",
    "prefix",
    "text",
    "image",
    "images",
    "audio",
    "audios",
    "video",
    "videos",
)
"""Keys of a turn that change what is trained on, and that nothing here can honour."""


MAX_WEIGHT = 10_000
"""Largest weight of a record, a turn or a source in the loss: gradients beyond it train the model
to pieces.
"""


class SampleError(ValueError):
    """A record that cannot be made a sample. The message lacks the place: prefix it with
    `source.describe(index)`.
    """


class Message(NamedTuple):
    """One turn of a conversation."""

    role: str
    """system, user, assistant or tool"""
    content: str
    weight: float = 1.0
    """Weight of the loss on an assistant's turn; the turns of others have none."""
    fields: Mapping[str, Any] = {}
    """Fields that chat templates may read: tool_calls, reasoning_content, name, tool_call_id."""

    def as_dict(self) -> dict[str, Any]:
        """Returns the message as chat templates expect it."""
        return {"role": self.role, "content": self.content, **self.fields}


class Turns(NamedTuple):
    """Content of a list of turns."""

    messages: list[Message]
    unread: set[str]
    """Keys of turns that hold something and that were not read."""


def read_turns(
    turns: object, where: str, role_key: str | None = None, content_key: str | None = None
) -> Turns:
    """Reads a list of turns. Raises SampleError, which begins with `where`, for anything else.

    Args:
        turns: a value of a record.
        where: its place in the record, for errors: `messages`.
        role_key: further name of the key of roles, by --data-columns.
        content_key: further name of the key of contents.
    """
    if not isinstance(turns, list) or not turns:
        raise SampleError(f"{where} must be a list of at least one message, but is {turns!r:.60}")
    messages: list[Message] = []
    unread: set[str] = set()
    for number, turn in enumerate(turns):
        place = f"{where}[{number}]"
        if not isinstance(turn, Mapping):
            raise SampleError(
                f"{place} must be {{role, content}} or {{from, value}}, but is {turn!r:.60}"
            )
        turn = {
            key: value
            for key, value in turn.items()
            if not is_empty(value) or key in ("content", "value")
        }
        if turn.keys() & {"role", "from", role_key} or not {"human", "assistant"} <= turn.keys():
            _append(messages, _read_turn(turn, place, role_key, content_key, unread))
        else:
            messages.append(Message("user", text_of(turn.pop("human"), f"{place}.human")))
            messages.append(
                Message("assistant", text_of(turn.pop("assistant"), f"{place}.assistant"))
            )
            unread |= turn.keys()
    return Turns(messages, unread)


def is_empty(value: object) -> bool:
    """Returns whether a field says nothing: null, "", [] or {}."""
    return value is None or (isinstance(value, (str, list, Mapping)) and not value)


def text_of(text: object, where: str) -> str:
    """Returns `text` if it is a string that can be written as UTF-8; raises SampleError if not."""
    if not isinstance(text, str):
        raise SampleError(f"{where} must be a string, but is {text!r:.60}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise SampleError(
            f"{where} holds half of a surrogate pair at character {error.start}; remove it"
        ) from error
    return text


def weight_of(weight: object, where: str) -> float:
    """Returns `weight` if it is a factor of the loss; raises SampleError if not."""
    if (
        isinstance(weight, bool)
        or not isinstance(weight, (int, float))
        or not 0 <= weight <= MAX_WEIGHT
    ):
        raise SampleError(
            f"{where} must be a number from 0 to {MAX_WEIGHT:,}, but is {weight!r:.60}"
        )
    return float(weight)


def read_tools(tools: object) -> list[Any]:
    """Returns the tools that a conversation may call, a list of JSON schemas or its JSON text."""
    if isinstance(tools, str):
        tools = _json(tools, "tools")
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise SampleError(f"tools must be a list of JSON schemas, but is {tools!r:.60}")
    return [
        tool if "function" in tool else {"type": "function", "function": tool} for tool in tools
    ]


def with_call_ids(messages: Sequence[Message]) -> list[Message]:
    """Returns the messages with an id for each call and each result that has none.

    A result belongs to the first call before it that has no result yet. Ids have nine letters and
    digits, as Mistral's templates demand.
    """
    numbers = itertools.count(1)
    unanswered: list[str] = []
    identified = []
    for message in messages:
        fields = dict(message.fields)
        if "tool_calls" in fields:
            calls = [
                {**call, "id": call.get("id") or f"call{next(numbers):05}"}
                for call in fields["tool_calls"]
            ]
            fields["tool_calls"], unanswered = calls, [call["id"] for call in calls]
        if message.role == "tool" and unanswered:
            answered = fields.setdefault("tool_call_id", unanswered[0])
            unanswered = [one for one in unanswered if one != answered]
        identified.append(message._replace(fields=fields))
    return identified


def _read_turn(
    turn: dict[str, Any],
    place: str,
    role_key: str | None,
    content_key: str | None,
    unread: set[str],
) -> Message:
    role_key, role = _either(turn, ("role", "from", role_key))
    content_key, content = _either(turn, ("content", "value", content_key))
    calls = _tool_calls(turn, place)
    if role_key is None or (content_key is None and not calls):
        raise SampleError(
            f"{place} must have role and content, or from and value, but has keys {list(turn)}"
        )
    name = _checked_role(role, f"{place}.{role_key}")
    for key in _UNREADABLE:
        if key in turn and key != content_key:
            raise SampleError(
                f"{place}.{key} would be lost, as it is not read; write it into content or remove "
                "it"
            )
    unread |= turn.keys() - {role_key, content_key, *_READ}
    content_place = f"{place}.{content_key}"
    if name in _CALLING_ROLES:
        calls += _calls_of_json(text_of(content, content_place), content_place)
        name, content = "assistant", ""
    fields = {key: turn[key] for key in _PASSED_ON if key in turn} | _reasoning(turn, place)
    if calls:
        fields["tool_calls"] = calls
    role = ROLES[name]
    text = "" if content is None and calls else _content(content, content_place)
    return Message(role, text, _loss_weight(turn, role, place), fields)


def _checked_role(role: object, where: str) -> str:
    """Returns the name of a role in lower case; raises SampleError if nothing here knows it."""
    name = role.lower() if isinstance(role, str) else ""
    if name not in ROLES and name not in _CALLING_ROLES:
        choices = ", ".join((*ROLES, *_CALLING_ROLES))
        raise SampleError(f"{where} must be one of {choices}, but is {role!r:.60}")
    return name


def _reasoning(turn: Mapping[str, Any], place: str) -> dict[str, str]:
    """Returns a turn's thoughts under the one name that templates know; {} where it has none."""
    found = {key: text_of(turn[key], f"{place}.{key}") for key in REASONING_NAMES if key in turn}
    if len(set(found.values())) > 1:
        raise SampleError(f"{place} has {' and '.join(found)}; keep one")
    return {"reasoning_content": next(iter(found.values()))} if found else {}


def _either(turn: Mapping[str, Any], names: Sequence[str | None]) -> tuple[str | None, Any]:
    """Returns the first of these keys whose value is not null, else the first that is there, and
    its value; (None, None) if none is there.
    """
    there = [name for name in names if name is not None and name in turn]
    filled = [name for name in there if turn[name] is not None] or there
    return (filled[0], turn[filled[0]]) if filled else (None, None)


def _append(messages: list[Message], message: Message) -> None:
    """Adds a message. Calls that follow calls, without a word between, join the message before."""
    before = messages[-1] if messages else None
    if (
        before is not None
        and _only_calls(message)
        and _only_calls(before)
        and before.weight == message.weight
    ):
        calls = [*before.fields["tool_calls"], *message.fields["tool_calls"]]
        messages[-1] = before._replace(fields={"tool_calls": calls})
    else:
        messages.append(message)


def _only_calls(message: Message) -> bool:
    return (
        message.role == "assistant"
        and not message.content
        and message.fields.keys() == {"tool_calls"}
    )


def _content(content: object, where: str) -> str:
    if not isinstance(content, list):
        return text_of(content, where)
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text":
            raise SampleError(
                f'{where} must hold parts {{"type": "text", "text": ...}} only, but holds '
                f"{part!r:.60}"
            )
    return "".join(
        text_of(_either(part, ("text", "value"))[1], f"{where} part") for part in content
    )


def _loss_weight(turn: Mapping[str, Any], role: str, place: str) -> float:
    weight = 1.0
    for key in (*_TRAIN, *_WEIGHT):
        value = turn.get(key)
        if value is None:
            continue
        if key in _TRAIN and value and role != "assistant":
            raise SampleError(
                f"{place}.{key} asks to train on a turn of the {role}, which is not supported; "
                "remove it"
            )
        flag = key in _TRAIN and isinstance(value, bool)
        weight *= float(value) if flag else weight_of(value, f"{place}.{key}")
    return weight


def _tool_calls(turn: Mapping[str, Any], place: str) -> list[Any]:
    """Returns the calls of a message, their arguments as objects, which templates write as JSON."""
    calls = turn.get("tool_calls", [])
    if isinstance(calls, str):
        calls = _json(calls, f"{place}.tool_calls")
    if not isinstance(calls, list):
        raise SampleError(f"{place}.tool_calls must be a list, but is {calls!r:.60}")
    if "function_call" in turn:
        calls = [*calls, turn["function_call"]]
    return [_call(call, f"{place}.tool_calls") for call in calls]


def _calls_of_json(text: str, where: str) -> list[Any]:
    calls = _json(text, where)
    return [_call(call, where) for call in (calls if isinstance(calls, list) else [calls])]


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise SampleError(f"{where} must hold calls {{name, arguments}}, but holds {call!r:.60}")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _json(arguments, f"{where} arguments")
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


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise SampleError(f"{where} must be JSON, but is {text!r:.60}: {error}") from None


def is_thinking(message: Message) -> bool:
    """Returns whether a message has thoughts, apart from its content or in it."""
    return "</think>" in message.content or "reasoning_content" in message.fields


def texts_of(messages: Iterable[Message]) -> list[str]:
    """Returns the texts of messages, thoughts included, without white space around."""
    said = [
        text
        for message in messages
        for text in (message.content, message.fields.get("reasoning_content", ""))
    ]
    return [text.strip() for text in said if text.strip()]
