"""pure. Reads the turns of a conversation, in the forms of common data sets, as messages for a chat
template.

    {"role": "user", "content": "hi"}               OpenAI, TRL, ms-swift; content may be a list of
                                                    text parts, {"type": "text", "text": ...};
                                                    LLaMA-Factory: "value"; images see `images`
    {"from": "human", "value": "hi"}                ShareGPT, OpenHermes, LLaMA-Factory, Axolotl
    {"human": "hi", "assistant": "hello"}           ms-swift: two turns
    {"role": "assistant", "tool_calls": [...]}      OpenAI, TRL; `function_call` is the older name
                                                    of a single call
    {"from": "function_call", "value": "{...}"}     LLaMA-Factory, and ms-swift as `tool_call`:
                                                    calls in JSON; several such turns in a row
                                                    become one message

A turn may scale its loss: by `train`, `training` and `loss` (true or false), and by `loss_weight`,
`weight` and `loss_scale` (numbers). Only turns of the assistant can be trained, so that `train` or
a `loss_weight` above 0 on any other turn is an error.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from megatron.packing.quoting import shown
from megatron.sft.data.records.images import MessageImage, is_image_part, source_of_part
from megatron.sft.data.records.tool_calls import calls_of_json, calls_of_turn
from megatron.sft.data.records.values import SampleError, is_empty, text_of, weight_of

ROLES: Mapping[str, str] = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bot", "model"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "tool_response", "ipython"), "tool"),
}
"""Accepted name of a role -> its name in chat templates."""
_CALLING_ROLES = ("function_call", "tool_call")
"""Roles of assistant turns whose content is tool calls as JSON."""
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
"""Keys of a turn that are read, apart from those of its role and content."""
READ_KEYS = frozenset((*_READ, "role", "from", "content", "value", "human", "assistant"))
"""All keys of a turn that are read."""
_PLAIN_KEYS = {"role", "content"}
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
"""Keys of a turn that would change its training, and are not supported: a turn that has one is
refused.
"""


_TEXTS = ("text", "input_text", "output_text")
"""Types of parts of a content that are text; the latter two in OpenAI's responses."""


class Message(NamedTuple):
    """One turn of a conversation."""

    role: str
    """system, user, assistant or tool"""
    content: str
    weight: float = 1.0
    """Weight of the loss of an assistant's turn. No effect on other turns."""
    fields: Mapping[str, Any] = {}
    """Fields that chat templates may read: tool_calls, reasoning_content, name, tool_call_id."""
    is_null: bool = False
    """True if the record has no content beside the calls, or null. Then `content` is empty."""
    images: Sequence[MessageImage] = ()
    """Images in the content, in order."""

    @property
    def pieces(self) -> list[str]:
        """Texts of the content: before the first image, between images, and behind the last."""
        if not self.images:
            return [self.content]
        ends = [0, *(image.at for image in self.images), len(self.content)]
        return [self.content[start:end] for start, end in itertools.pairwise(ends)]

    def as_dict(self) -> dict[str, Any]:
        """Returns the message as chat templates expect it; with images its content is a list of
        parts.
        """
        if not self.images:
            return {"role": self.role, "content": self.content, **self.fields}
        parts: list[dict[str, str]] = []
        for number, text in enumerate(self.pieces):
            parts += [{"type": "image"}] if number else []
            parts += [{"type": "text", "text": text}] if text else []
        return {"role": self.role, "content": parts, **self.fields}


class Turns(NamedTuple):
    """Messages of a list of turns."""

    messages: list[Message]
    unread: set[str]
    """Keys of the turns that have a value and were not read."""


def plain_turns(turns: object, where: str) -> list[Message] | None:
    """Returns the messages of a list of turns that are a role and a text each, as most of most data
    are; None for another value, which `read_turns` reads or refuses.
    """
    if type(turns) is not list:
        return None
    messages = []
    for number, turn in enumerate(turns):
        message = _plain_turn(turn, where, number)
        if message is None:
            return None
        messages.append(message)
    return messages


def _plain_turn(turn: object, where: str, number: int) -> Message | None:
    if not isinstance(turn, dict) or turn.keys() != _PLAIN_KEYS:
        return None
    role, content = turn["role"], turn["content"]
    if not type(role) is type(content) is str or role not in ROLES:
        return None
    if not content.isascii():
        text_of(content, f"{where}[{number}].content")
    return Message(ROLES[role], content)


def read_turns(
    turns: object, where: str, role_key: str | None = None, content_key: str | None = None
) -> Turns:
    """Reads a list of turns. Raises SampleError, which begins with `where`, for anything else.

    Args:
        turns: the value of a record's field.
        where: name of that field, for errors: `messages`.
        role_key: further name of the role's key, by --data-columns.
        content_key: further name of the content's key, by --data-columns.
    """
    if not isinstance(turns, list) or not turns:
        raise SampleError(f"{where} must be a list of at least one message, but is {shown(turns)}")
    messages: list[Message] = []
    unread: set[str] = set()
    for number, turn in enumerate(turns):
        plain = _plain_turn(turn, where, number)
        if plain is not None:
            messages.append(plain)
            continue
        place = f"{where}[{number}]"
        if not isinstance(turn, Mapping):
            raise SampleError(
                f"{place} must be {{role, content}} or {{from, value}}, but is {shown(turn)}"
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


def with_call_ids(messages: Sequence[Message]) -> list[Message]:
    """Returns the messages with ids on all tool calls and results; those that have an id keep it.

    A result without an id belongs to the first call of the last message with calls that has no
    result yet. Ids have nine letters and digits, as Mistral's templates demand: `call00001`.
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
    calls = calls_of_turn(turn, place)
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
        calls += calls_of_json(text_of(content, content_place), content_place)
        name, content = "assistant", ""
    fields = {key: turn[key] for key in _PASSED_ON if key in turn} | _reasoning(turn, place)
    if calls:
        fields["tool_calls"] = calls
    role = ROLES[name]
    is_null = content is None and bool(calls)
    text, images = ("", []) if is_null else _content(content, content_place)
    return Message(role, text, _loss_weight(turn, role, place), fields, is_null, images)


def _checked_role(role: object, where: str) -> str:
    """Returns the name of a role in lower case; raises SampleError if it is not known."""
    name = role.lower() if isinstance(role, str) else ""
    if name not in ROLES and name not in _CALLING_ROLES:
        choices = ", ".join((*ROLES, *_CALLING_ROLES))
        raise SampleError(f"{where} must be one of {choices}, but is {shown(role)}")
    return name


def _reasoning(turn: Mapping[str, Any], place: str) -> dict[str, str]:
    """Returns a turn's thoughts under the name that templates read, `reasoning_content`; {} if it
    has none.
    """
    found = {key: text_of(turn[key], f"{place}.{key}") for key in REASONING_NAMES if key in turn}
    if len(set(found.values())) > 1:
        raise SampleError(f"{place} has {' and '.join(found)}; keep one")
    return {"reasoning_content": next(iter(found.values()))} if found else {}


def _either(turn: Mapping[str, Any], names: Sequence[str | None]) -> tuple[str | None, Any]:
    """Returns the first of these keys with a value other than null, and its value. If all are null
    it returns the first key that exists; if no key exists, (None, None).
    """
    present = [name for name in names if name is not None and name in turn]
    filled = [name for name in present if turn[name] is not None] or present
    return (filled[0], turn[filled[0]]) if filled else (None, None)


def _append(messages: list[Message], message: Message) -> None:
    """Adds a message. If it and the last one consist of tool calls only, they become one message:
    LLaMA-Factory and ms-swift write each parallel call as a turn.
    """
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
        and not message.images
        and message.fields.keys() == {"tool_calls"}
    )


def _content(content: object, where: str) -> tuple[str, list[MessageImage]]:
    """Returns the text of a content, and its images."""
    if not isinstance(content, list):
        return text_of(content, where), []
    texts: list[str] = []
    images: list[MessageImage] = []
    for part in content:
        if isinstance(part, Mapping) and is_image_part(part):
            place = f"{where} image {len(images)}"
            images.append(MessageImage(sum(map(len, texts)), source_of_part(part, place)))
        elif isinstance(part, Mapping) and (part.get("type") or "text") in _TEXTS:
            texts.append(text_of(_either(part, ("text", "value"))[1], f"{where} part"))
        else:
            raise SampleError(
                f'{where} must hold parts {{"type": "text", "text": ...}} and {{"type": "image", '
                f'"image": ...}} only, but holds {shown(part)}'
            )
    return "".join(texts), images


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


def is_thinking(message: Message) -> bool:
    """Returns whether a message has thoughts, in its content or in a field of their own."""
    return "</think>" in message.content or "reasoning_content" in message.fields


def texts_of(messages: Iterable[Message]) -> list[str]:
    """Returns the texts of messages, thoughts included, without white space around them."""
    said: list[str] = []
    for message in messages:
        said += message.pieces
        if message.fields:
            said.append(message.fields.get("reasoning_content", ""))
    return [stripped for text in said if (stripped := text.strip())]
