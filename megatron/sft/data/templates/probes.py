"""pure. Short conversations, by which a template is asked how it renders turns and what it reads.

Chat templates differ in what they read of a call. Most write arguments as JSON themselves, so that
they need an object. Those of DeepSeek R1 and V3 join them to other text, so that they need JSON
text, and they write calls only in a message whose content is null. transformers 5 takes null
contents out, so that there the same templates raise an error or leave the call out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from megatron.sft.data.records.messages import Message

_CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}, "id": "abcdefghi"}
_QUESTION, _ANSWER = Message("user", "q"), Message("assistant", "a")
PROBES: Sequence[Sequence[Message]] = (
    (_QUESTION, _ANSWER, _QUESTION, _ANSWER),
    (Message("system", "s"), _QUESTION, _ANSWER, _QUESTION, _ANSWER),
    (_QUESTION, Message("assistant", "<think>\nt\n</think>\n\na"), _QUESTION, _ANSWER),
    (
        _QUESTION,
        Message("assistant", "a", fields={"reasoning_content": "t"}),
        _QUESTION,
        Message("assistant", "a", fields={"reasoning_content": "t"}),
    ),
    (
        _QUESTION,
        Message("assistant", "", fields={"tool_calls": [_CALL]}),
        Message("tool", "r", fields={"tool_call_id": "abcdefghi"}),
        _ANSWER,
        _QUESTION,
        _ANSWER,
    ),
)
"""Conversations whose earlier turns some templates render in another way as more turns follow."""

LEFT_OUT = object()
"""Content of a message that has no key `content`."""
_FORMS_OF_NULL = (None, LEFT_OUT, "")
_FORMS_OF_EMPTY = ("", None, LEFT_OUT)
"""Contents of a message with calls alone, the record's own first."""
_WORD, _NAME = "word of probe", "name_of_probe"
_ARGUMENTS = {"city_of_probe": _WORD}


class MessageForm(NamedTuple):
    """The form in which a template reads messages."""

    text_is_parts: bool = False
    """True if a content must be a list of parts, `[{"type": "text", "text": "hi"}]`."""
    arguments_are_text: bool = False
    """True if the arguments of calls must be JSON text, not objects."""
    null: object = ""
    """Content of a message with calls whose content is null or missing."""
    empty: object = ""
    """Content of a message with calls whose content is empty."""

    def as_dict(self, message: Message) -> dict[str, Any]:
        """Returns a message as the template reads it."""
        read = message.as_dict()
        if "tool_calls" in read:
            read["tool_calls"] = [self._call(call) for call in read["tool_calls"]]
        if message.images:
            pass  # parts, in any form
        elif self.text_is_parts:
            read["content"] = [{"type": "text", "text": message.content}] if message.content else []
        elif "tool_calls" in read and not message.content:
            read["content"] = self.null if message.is_null else self.empty
            if read["content"] is LEFT_OUT:
                del read["content"]
        return read

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = call["function"]
        arguments = function["arguments"]
        if self.arguments_are_text and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)  # as `tojson` writes them
        elif not self.arguments_are_text and isinstance(arguments, str):
            arguments = json.loads(arguments)
        return {**call, "function": {**function, "arguments": arguments}}


Render = Callable[[MessageForm, Sequence[Message]], str | None]
"""Function that returns the text of a conversation's last message as a template writes it; None if
the template fails.
"""


def find_form(render: Render) -> MessageForm:
    """Returns the first form in which a template renders texts and calls whole. A template that
    renders them in no form is given plain texts and objects.
    """
    form = MessageForm()
    answer = [_QUESTION, Message("assistant", _WORD)]
    if _WORD not in (render(form, answer) or ""):
        parts = form._replace(text_is_parts=True)
        text = render(parts, answer) or ""
        # A list that is written as it is, [{'type': ...}], is not read.
        form = parts if _WORD in text and "'type'" not in text else form
    for arguments_are_text in (False, True):
        of_calls = form._replace(arguments_are_text=arguments_are_text)
        null = _first_whole(render, of_calls, "null", _FORMS_OF_NULL)
        empty = _first_whole(render, of_calls, "empty", _FORMS_OF_EMPTY)
        if null or empty:
            return of_calls._replace(**(null or {}), **(empty or {}))
    return form


def _first_whole(
    render: Render, form: MessageForm, field: str, contents: Sequence[object]
) -> dict[str, Any] | None:
    """Returns the first content with which a template writes a call and its arguments, as a field
    of MessageForm; None if there is none.
    """
    function = {"name": _NAME, "arguments": _ARGUMENTS}
    calls = {"tool_calls": [{"type": "function", "function": function, "id": "abcdefghi"}]}
    message = Message("assistant", "", fields=calls, is_null=field == "null")
    if form.arguments_are_text:
        words = [_NAME, json.dumps(_ARGUMENTS)]
    else:
        words = [_NAME, *_ARGUMENTS, _WORD]
    for content in contents:
        fields: dict[str, Any] = {field: content}
        text = render(form._replace(**fields), [_QUESTION, message])
        # Objects and nulls that are written as Python writes them, {'city': ...} and None, were
        # not meant to be read.
        if text is None or str(_ARGUMENTS) in text or "None" in text:
            continue
        if all(word in text for word in words):
            return fields
    return None
