"""pure. Reads the content of a record: a conversation, a passage of text, or token ids. The keys of
the record decide its format.

    messages | conversations | conversation              turns, see `messages`; with system, tools
                                                         and TRL's chat_template_kwargs
    prompt + completion, both lists of turns             TRL; the turns of the completion are
                                                         trained
    prompt + completion, one turns, the other a string   what the user asks, what the assistant
                                                         answers
    prompt + completion, both strings                    TRL; the completion is trained
    prompt + responses                                   several answers to turns, or to a text
                                                         (then they are text, too); see `answers`
    instruction | query | question                       Alpaca, Dolly, LLaMA-Factory, ms-swift,
      + output | response | answer                       OpenOrca: a question, with input | context,
                                                         system, history and tools
    query | question | instruction + answers             xLAM: a question and the calls it needs,
                                                         with tools
    text                                                 all of it is trained
    tokens                                               ids; all of them are trained
    input_ids                                            ids, with labels and masks: `token_ids`

A record has the first of these formats whose keys it has. A key with an empty value (null, "", [],
{}) counts as absent. A value that must be a list or an object may be its JSON text. Any record may
have `weight`, which scales its loss. A conversation may have images, see `images`.

Invariant: no text is lost silently. A text under one of the names in `TEXT_COLUMNS` is read, or
repeats text that is read, or is an error. Other keys are ignored, and are logged once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

from megatron.packing.quoting import shown
from megatron.sft.data.records.answers import (
    Keys,
    Paths,
    read_branches,
    read_responses,
    read_texts,
    weights_of,
)
from megatron.sft.data.records.call_values import checked_calls
from megatron.sft.data.records.columns import (
    ANSWER,
    BESIDE_TURNS,
    CONTEXT,
    QUESTION,
    SYSTEM,
    TEXT_COLUMNS,
    TOOLS,
    TURNS,
    rename_fields,
)
from megatron.sft.data.records.content import (
    Answers,
    Content,
    Conversation,
    Passage,
    TokenIds,
    messages_of,
    said_in,
)
from megatron.sft.data.records.images import COLUMNS as IMAGES
from megatron.sft.data.records.images import MARK, filled, read_images, split_marks
from megatron.sft.data.records.messages import Message, plain_turns, read_turns
from megatron.sft.data.records.preferences import (
    check_marks,
    columns_beside_turns,
    columns_without_turns,
    is_answer,
    preference_error,
)
from megatron.sft.data.records.token_ids import TOKEN_COLUMNS, read_token_ids, refuse_masks
from megatron.sft.data.records.tool_calls import are_calls, read_tools
from megatron.sft.data.records.values import SampleError, is_empty, text_of, weight_of
from megatron.sft.options.chat_template import are_variables

_FORMATS = (
    "messages | conversations | conversation (and responses), prompt + completion | responses, "
    "instruction | query | question "
    "(and input | context) + output | response | answer | answers, text, tokens or input_ids"
)


_IMAGES_LOST = (
    "record has images, which would be lost; pass --images to train a vision model on them, or "
    "leave them out with --data-columns none=images"
)


class Reading(NamedTuple):
    """Content of a record."""

    content: Content
    weight: float
    unread: set[str]
    """Keys of the record and of its turns that have a value and were not read."""


def read_record(
    record: Mapping[str, Any], columns: Mapping[str, str], *, takes_images: bool = False
) -> Reading:
    """Reads the content of `record`. Raises SampleError if it has none of the formats, or if text
    in it would be lost.

    columns: column of the record -> its name in the table above; "none" leaves the column out.
    takes_images: whether the caller trains images; otherwise a record with images is an error.
    """
    if record.keys() == {"messages"} and not columns:
        # Most of most data; the steps below find the same.
        messages = plain_turns(record["messages"], "messages")
        if messages:
            return Reading(Conversation(messages), 1.0, set())
    fields = rename_fields(record, columns)
    keys = Keys(*(_column_of(name, columns) for name in ("role", "content")))
    reading = _find(fields, keys, record)
    if takes_images:
        lists = [name for name in record if columns.get(name, name) in IMAGES]
        reading = _with_images(reading, fields, lists)
    elif any(message.images for message in messages_of(reading.content)):
        raise SampleError(_IMAGES_LOST)
    weight = weight_of(fields["weight"], "weight") if "weight" in fields else 1.0
    unread = {key for key in fields if not is_empty(fields[key])} - reading.read - {"weight"}
    _check_unread(fields, unread, reading.content, keys)
    if not isinstance(reading.content, TokenIds) and reading.read != {"text"}:
        check_marks(fields)
    return Reading(reading.content, weight, (unread - TEXT_COLUMNS) | reading.unread_of_turns)


class _Found(NamedTuple):
    """Content of a record, the keys that it was read from, and the unread keys of its turns."""

    content: Content
    read: set[str]
    unread_of_turns: Set[str] = frozenset()


def _with_images(found: _Found, fields: Mapping[str, Any], lists: Sequence[str]) -> _Found:
    """Returns a conversation whose messages have the images of the record, all of them.

    lists: keys of the record for its images, also those without a value.
    """
    listed, read = read_images(fields)
    messages = messages_of(found.content)
    has_parts = any(message.images for message in messages)
    if not listed and not has_parts:
        if lists and any(MARK in message.content for message in messages):
            raise SampleError(
                f"a text holds {MARK}, but {lists[0]} of the record is empty; give each place its "
                f"image, or pass --data-columns none={lists[0]} to train it as text"
            )
        return found
    if not isinstance(found.content, Conversation):
        raise SampleError(
            "record has images, but no conversation, or several answers to a turn; give each "
            "answer as a conversation of its own"
        )
    if listed and not has_parts:
        texts = (split_marks(message.content) for message in messages)
        messages = [
            message._replace(content=text, images=places)
            for message, (text, places) in zip(messages, texts)
        ]
    used: set[int] = set()
    messages = [
        message._replace(images=filled(message.images, listed, used, f"message {number}"))
        for number, message in enumerate(messages)
    ]
    if len(used) < len(listed):
        raise SampleError(
            f"record has {len(listed)} images, but the conversation has places for {len(used)}; "
            'write <image> where each belongs, or a part {"type": "image"}'
        )
    content = found.content._replace(messages=messages)
    return found._replace(content=content, read=found.read | read)


def _column_of(name: str, columns: Mapping[str, str]) -> str | None:
    return next((column for column, meaning in columns.items() if meaning == name), None)


def _find(fields: Mapping[str, Any], turn_keys: Keys, record: Mapping[str, Any]) -> _Found:
    """Returns the content by the first format whose keys are present."""
    for key in TURNS:
        if key in fields:
            return _turns(fields, key, turn_keys)
    if {"prompt", "responses"} <= fields.keys():
        return _prompt_and_responses(fields, turn_keys)
    if {"prompt", "completion"} <= fields.keys():
        return _prompt_and_completion(fields, turn_keys)
    if fields.keys() & set(QUESTION) and fields.keys() & set(ANSWER):
        read = {_one(fields, names)[0] for names in (QUESTION, CONTEXT, ANSWER)}
        return _Found(_conversation(fields, _question(fields)), {*read, *BESIDE_TURNS, "history"})
    if fields.keys() & set(QUESTION) and are_calls(fields.get("answers")):
        return _question_and_calls(fields, turn_keys)
    if "text" in fields:
        return _Found(Passage("", text_of(fields["text"], "text")), {"text"})
    if "tokens" in fields:
        refuse_masks(fields)
        return _Found(TokenIds(fields["tokens"]), {"tokens"})
    if "input_ids" in fields:
        return _Found(read_token_ids(fields), set(TOKEN_COLUMNS))
    if {"chosen", "rejected"} <= fields.keys():
        raise preference_error(columns_without_turns(fields, turn_keys))
    # Name the empty columns, too: Parquet has every column in every row, null or [] if a record
    # lacks it, so that a record may look complete.
    empty = ", ".join(repr(column) for column, value in record.items() if is_empty(value))
    raise SampleError(
        f"record has keys {', '.join(map(repr, fields)) or '(none)':.300}"
        f"{f' (empty: {empty:.300})' if empty else ''}, but must have {_FORMATS}; "
        "--data-columns gives odd names their meaning"
    )


def _turns(fields: Mapping[str, Any], key: str, turn_keys: Keys) -> _Found:
    read = {key, *BESIDE_TURNS}
    if "responses" not in fields:
        found = read_branches(fields[key], key, turn_keys)
        return _Found(_conversations(fields, found), read, found.unread)
    trunk, unread = read_turns(fields[key], key, *turn_keys)
    return _answered(fields, trunk, unread, read, turn_keys)


def _prompt_and_responses(fields: Mapping[str, Any], turn_keys: Keys) -> _Found:
    prompt, read = fields["prompt"], {"prompt", "responses", "weights"}
    if not isinstance(prompt, str):
        asked, unread = read_turns(prompt, "prompt", *turn_keys)
        trunk = [message._replace(weight=0.0) for message in asked]
        return _answered(fields, trunk, unread, read | set(BESIDE_TURNS), turn_keys)
    texts = read_texts(fields["responses"])
    passages = [Passage(text_of(prompt, "prompt"), text) for text in texts]
    return _Found(Answers(passages, weights_of(fields.get("weights"), len(texts))), read)


def _answered(
    fields: Mapping[str, Any], trunk: list[Message], unread: set[str], read: set[str], keys: Keys
) -> _Found:
    """Returns the paths of `responses`, each behind the turns of `trunk`. `read` has the keys that
    these turns were read from.
    """
    found = read_responses(trunk, fields["responses"], fields.get("weights"), keys)
    read = read | {"responses", "weights"}
    return _Found(_conversations(fields, found), read, unread | found.unread)


def _conversations(fields: Mapping[str, Any], found: Paths) -> Conversation | Answers:
    paths = [_conversation(fields, messages) for messages in found.paths]
    return paths[0] if len(paths) == 1 else Answers(paths, [1.0] * len(paths))


def _prompt_and_completion(fields: Mapping[str, Any], turn_keys: Keys) -> _Found:
    prompt, completion = fields["prompt"], fields["completion"]
    for name in ("prompt", "completion"):
        if isinstance(fields[name], (int, float)):  # "must be turns" would mislead
            text_of(fields[name], name)
    if isinstance(prompt, str) and isinstance(completion, str):
        return _Found(
            Passage(text_of(prompt, "prompt"), text_of(completion, "completion")),
            {"prompt", "completion"},
        )
    if isinstance(prompt, str) and is_answer(completion, turn_keys):
        prompt = [{"role": "user", "content": prompt}]
    asked, unread = read_turns(prompt, "prompt", *turn_keys)
    if isinstance(completion, str):
        completion = [{"role": "assistant", "content": completion}]
    turns = [completion] if isinstance(completion, Mapping) else completion
    answered, more = read_turns(turns, "completion", *turn_keys)
    messages = [*(message._replace(weight=0.0) for message in asked), *answered]
    return _Found(
        _conversation(fields, messages), {"prompt", "completion", *BESIDE_TURNS}, unread | more
    )


def _question_and_calls(fields: Mapping[str, Any], turn_keys: Keys) -> _Found:
    calls = [{"role": "assistant", "content": None, "tool_calls": fields["answers"]}]
    answered, unread = read_turns(calls, "answers", *turn_keys)
    read = {_one(fields, names)[0] for names in (QUESTION, CONTEXT)}
    return _Found(
        _conversation(fields, [*_asked(fields), *answered]),
        {*read, "answers", *BESIDE_TURNS, "history"},
        unread,
    )


def _question(fields: Mapping[str, Any]) -> list[Message]:
    """Returns the messages of an Alpaca record: what is asked, and the answer."""
    key, answer = _one(fields, ANSWER)
    return [*_asked(fields), Message("assistant", text_of(answer, key))]


def _asked(fields: Mapping[str, Any]) -> list[Message]:
    """Returns the messages before an answer: the history, and the question with its input."""
    messages = []
    history = fields.get("history", [])
    for number, pair in enumerate(history if isinstance(history, list) else [history]):
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise SampleError(f"history[{number}] must be [question, answer], but is {shown(pair)}")
        messages.append(Message("user", text_of(pair[0], f"history[{number}][0]")))
        messages.append(Message("assistant", text_of(pair[1], f"history[{number}][1]")))
    parts = [_one(fields, names) for names in (QUESTION, CONTEXT)]
    asked = "\n\n".join(text for text in (text_of(text, key) for key, text in parts) if text)
    return [*messages, Message("user", asked)]


def _one(fields: Mapping[str, Any], names: Sequence[str]) -> tuple[str, Any]:
    """Returns the first of these keys with a value, and the value; the first key and "" if all are
    empty.
    """
    key = next((name for name in names if fields.get(name, "") != ""), names[0])
    return key, fields.get(key, "")


def _conversation(fields: Mapping[str, Any], messages: list[Message]) -> Conversation:
    """Returns the turns with the record's system prompt, tools and template variables."""
    for key in SYSTEM:
        system = text_of(fields.get(key, ""), key)
        if system and messages[0].role != "system":
            messages = [Message("system", system), *messages]
        elif system and messages[0].content.strip() != system.strip():
            raise SampleError(
                f"record has two system prompts, {key} and another one; leave one out, as by "
                f"none={key}"
            )
    options = fields.get("chat_template_kwargs", {})
    if not are_variables(options):
        raise SampleError(
            "chat_template_kwargs must be an object with variables of its own, but is "
            f"{shown(options)}"
        )
    lists = [fields[key] for key in TOOLS if fields.get(key)]
    if len(lists) > 1:
        raise SampleError("record has tools and functions; leave one out, as by none=functions")
    tools = read_tools(lists[0]) if lists else None
    return Conversation(*checked_calls(messages, tools), options)


def _check_unread(
    fields: Mapping[str, Any], unread: set[str], content: Content, keys: Keys
) -> None:
    """Raises SampleError if an unread field has text of its own, which would be lost."""
    if {"chosen", "rejected"} <= unread and not isinstance(fields["chosen"], str):
        raise preference_error(columns_beside_turns(fields, content, keys))
    texts = unread & TEXT_COLUMNS
    said = said_in(content) if texts else []
    for key in sorted(texts):
        text = fields[key]
        if isinstance(text, (int, float)):
            continue  # a count, as `tokens` may be
        is_string = isinstance(text, str) and bool(said)
        if is_string and (
            any(text.strip() in part for part in said) or all(part in text for part in said)
        ):
            continue  # repeats a text that is read, or is the whole conversation as one text
        if key in IMAGES:
            raise SampleError(_IMAGES_LOST)
        raise SampleError(
            f"record has {key}, which would be lost beside what is read; name its meaning with "
            f"--data-columns, or leave it out with --data-columns none={key}"
        )
