"""pure. Renders conversations by a chat template, either as released or in its training variant.

A template that asks for today's date gets that of --template-date, so that samples do not change
from day to day.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from typing import Any

from jinja2 import TemplateError

from megatron.packing.quoting import shown
from megatron.sft.data.records.content import Conversation
from megatron.sft.data.records.messages import REASONING_NAMES, Message, with_call_ids
from megatron.sft.data.records.values import SampleError
from megatron.sft.data.templates.marked import MarkedTemplate, Written
from megatron.sft.data.templates.probes import MessageForm, find_form
from megatron.sft.data.templates.sandbox import LIMITS, EndlessTemplateError, Limits

WAY_OUT = (
    "pass --chat-template FILE, with {% generation %} ... {% endgeneration %} around what "
    "is to be trained"
)
TRAINING_VARIANTS: Mapping[str, str] = {
    # Qwen3 writes the thoughts of the last turns only, and an empty thought only in the last turn.
    "loop.index0 > ns.last_query_index": "true",
    "loop.last or (not loop.last and reasoning_content)": "true",
    # Mistral 0.3 and Nemo write the system prompt into the last message if it is the user's. In
    # training the last message is the assistant's.
    "loop.last and system_message is defined": "loop.first and system_message is defined",
}
"""Condition in a released template that prevents training on a whole conversation -> its
replacement in training.

Conditions are recognised by their text, so that other changes of a release do not matter. Exports
have the released template.
"""
_NEEDS_CALL_IDS = re.compile(r"\.id\s*\|\s*length\s*\)?\s*!=\s*9")
"""Text in templates that require call ids of nine characters: Mistral 0.3 and later."""
_PART_OF_THOUGHTS = re.compile(r"type['\"]?\]?\s*==\s*['\"]thinking['\"]")
_UNSAFE_FORM = re.compile(r"%(?!-?[A-Za-z%])")
"""Parts of a date format with a width, which could be arbitrarily large."""


class SlowTemplateError(SampleError):
    """A template takes too long. It will with other conversations, too, so that none is tried."""


@dataclass(eq=False)
class TemplateWriter:
    """A chat template. It is compiled when it is first used."""

    source: str
    special_tokens: Mapping[str, str]
    """Variables such as bos_token."""
    today: date | None = None
    """Date that the template may ask for; None if it may not."""
    variables: Mapping[str, Any] | None = None
    """Further variables. A conversation's own variables of the same name go first."""
    limits: Limits = LIMITS

    @cached_property
    def has_marks(self) -> bool:
        """True if the template marks trained text by {% generation %}."""
        return re.search(r"{%-?\s*generation\s*-?%}", self.source) is not None

    @cached_property
    def _needs_call_ids(self) -> bool:
        return _NEEDS_CALL_IDS.search(self.source) is not None

    def as_needed(self, conversation: Conversation) -> Conversation:
        """Returns the conversation with call ids if the template requires them."""
        if not self._needs_call_ids:
            return conversation
        return conversation._replace(messages=with_call_ids(conversation.messages))

    def write(
        self,
        conversation: Conversation,
        add_generation_prompt: bool = False,
        as_released: bool = False,
    ) -> Written:
        """Returns the rendering of a conversation.

        Raises SampleError if the template refuses it or fails, SlowTemplateError if it takes too
        long, and ValueError if the template is not valid.
        """
        template = self._released if as_released else self._in_training
        return self._write(template, conversation, add_generation_prompt, self._form)

    def _write(
        self,
        template: MarkedTemplate,
        conversation: Conversation,
        add_generation_prompt: bool,
        form: MessageForm,
    ) -> Written:
        variables = {
            "documents": None,
            **self.special_tokens,
            **(self.variables or {}),
            **conversation.template_options,
        }
        if self.today is not None:
            variables.setdefault("strftime_now", self._strftime_now)
        try:
            return template.write(
                [self._as_dict(message, form) for message in conversation.messages],
                **variables,
                tools=conversation.tools,
                add_generation_prompt=add_generation_prompt,
            )
        except EndlessTemplateError as error:
            raise SlowTemplateError(
                f"the chat template takes too long with the conversation: {error}; pass another "
                "--chat-template"
            ) from None
        except TemplateError as error:
            said = f"the chat template refuses the conversation: {error!s:.300}"
            if "strftime_now" in said:
                said = (
                    "the chat template asks for today's date, by which samples would change; pass "
                    "--template-date YYYY-MM-DD"
                )
            raise SampleError(said) from None
        except Exception as error:  # the template may raise anything
            said = f"{type(error).__name__}: {error}"
            raise SampleError(f"the chat template fails on the conversation: {said:.300}") from None

    @cached_property
    def _form(self) -> MessageForm:
        """Form in which the template reads messages, found by rendering short conversations."""

        def last_text(form: MessageForm, messages: Sequence[Message]) -> str | None:
            conversation = self.as_needed(Conversation(list(messages)))
            try:
                written = self._write(self._released, conversation, False, form)
            except SlowTemplateError:
                raise
            except SampleError:
                return None
            places = written.turns.get(len(messages) - 1) or [(0, len(written.text))]
            return "".join(written.text[start:end] for start, end in places)

        return find_form(last_text)

    @cached_property
    def _in_training(self) -> MarkedTemplate:
        source = self.source
        for released, in_training in TRAINING_VARIANTS.items():
            source = source.replace(released, in_training)
        return self._compiled(source)

    @cached_property
    def _released(self) -> MarkedTemplate:
        return self._compiled(self.source)

    def _as_dict(self, message: Message, form: MessageForm) -> dict[str, Any]:
        """Returns a message as the template reads it.

        Thoughts are given under all names that templates know, or as a part of the content if the
        template reads parts. If it reads thoughts in a field of their own (gpt-oss), thoughts in
        <think> tags in the content are moved there.
        """
        thoughts = message.fields.get("reasoning_content")
        if thoughts is None and self._reads_thoughts_apart and message.role == "assistant":
            before, is_thinking, answer = message.content.partition("</think>")
            if is_thinking:
                thoughts = before.strip().removeprefix("<think>").strip()
                message = message._replace(content=answer.strip())
        if thoughts is None:
            return form.as_dict(message)
        read = {**dict.fromkeys(REASONING_NAMES, thoughts), **form.as_dict(message)}
        if self._reads_parts:
            parts = [{"type": "thinking", "thinking": thoughts}]
            parts += [{"type": "text", "text": message.content}] if message.content else []
            read["content"] = parts
        return read

    @cached_property
    def _reads_thoughts_apart(self) -> bool:
        is_reading = any(name in self.source for name in REASONING_NAMES)
        return is_reading and "</think>" not in self.source

    @cached_property
    def _reads_parts(self) -> bool:
        """True if thoughts are parts of the content (Ministral 3)."""
        return _PART_OF_THOUGHTS.search(self.source) is not None

    def _strftime_now(self, form: object) -> str:
        assert self.today is not None
        if not isinstance(form, str) or len(form) > 100 or _UNSAFE_FORM.search(form):
            raise TemplateError(f"the chat template asks for the date as {shown(form)}")
        return self.today.strftime(form)

    def _compiled(self, source: str) -> MarkedTemplate:
        try:
            return MarkedTemplate(source, self.limits)
        except Exception as error:  # nested too deep, among others
            fault = f"the chat template cannot be read: {error!s:.300}; {WAY_OUT}"
            raise ValueError(fault) from None
