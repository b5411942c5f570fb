"""pure. Renders a conversation by a chat template, and finds the characters that are trained.

    <|im_start|>user\\n1+1?<|im_end|>\\n<|im_start|>assistant\\n2<|im_end|>\\n
                                     |-- generation prompt --||- trained -|

A template with {% generation %} marks the trained characters itself. In any other template the text
of a message is what the template writes while its loop is at that message (`marked` records it). Of
an assistant's text, everything between the generation prompt and the end of the turn is trained,
the end-of-turn token included and white space after it not.

Invariants:
- Each trained turn follows exactly the text that generation would start from, and reads as if it
  were the last turn. This is checked by rendering the turns before it, and those up to it, for one
  conversation of each kind (order of roles, with tools, calls, thoughts).
- The text of every message is in its turn, or the conversation is refused.
- Each trained turn ends with the template's end of turn.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import cached_property
from typing import Any, NamedTuple

from megatron.packing.quoting import shown
from megatron.sft.data.records.content import Conversation
from megatron.sft.data.records.messages import Message, is_thinking
from megatron.sft.data.records.turns import Contexts
from megatron.sft.data.records.values import SampleError
from megatron.sft.data.templates.checks import (
    check_nothing_lost,
    kind_of,
    opens_thought,
    without_earlier_thoughts,
)
from megatron.sft.data.templates.marked import Written
from megatron.sft.data.templates.probes import PROBES
from megatron.sft.data.templates.sandbox import LIMITS, Limits
from megatron.sft.data.templates.turn_ends import AroundAnswers, Place, around_answers
from megatron.sft.data.templates.writer import WAY_OUT, SlowTemplateError, TemplateWriter

__all__ = ["ChatTemplate", "ContextError", "Rendering", "SlowTemplateError", "Span", "Turn"]
_CHECKED_AT_EACH_END = 4
"""Answers at the start and at the end of a conversation that are checked against generation."""


class Span(NamedTuple):
    """Characters [start, end) of a rendering, and the weight of their loss."""

    start: int
    end: int
    weight: float


class Rendering(NamedTuple):
    """A conversation as text, with its trained spans."""

    text: str
    spans: list[Span]


class ContextError(ValueError):
    """A template does not write an answer behind the generation prompt for it."""


class Turn(NamedTuple):
    """An answer and its context, as text."""

    prompt: str
    """Text that generation starts from: the turns before, and the generation prompt."""
    answer: str
    """Text up to the end of the turn, all of it trained."""
    weight: float


@dataclass(eq=False)
class ChatTemplate:
    """A compiled chat template. `render` remembers the kinds of conversations that it has
    checked."""

    source: str
    special_tokens: Mapping[str, str]
    """Variables such as bos_token."""
    today: date | None = None
    """Date that the template may ask for; None if it may not."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Further variables. A conversation's own variables of the same name go first."""
    limits: Limits = LIMITS
    """Limits of each rendering."""
    _prompts: dict[str, AroundAnswers] = field(default_factory=dict, init=False, repr=False)
    """Text around answers, by the variables of the conversation as JSON."""
    _checked: set[Any] = field(default_factory=set, init=False, repr=False)
    """Kinds of conversations (`kind_of`) whose turns were checked."""

    def __getstate__(self) -> tuple[Any, ...]:
        # For workers: a compiled template cannot be pickled, so each compiles its own.
        return self.source, self.special_tokens, self.today, self.variables, self.limits

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    @cached_property
    def _writer(self) -> TemplateWriter:
        return TemplateWriter(
            self.source, self.special_tokens, self.today, self.variables, self.limits
        )

    def render(self, conversation: Conversation) -> Rendering:
        """Renders the whole conversation once, and finds the trained spans.

        Raises SampleError for a conversation that does not fit the template, and ValueError for a
        template under which no conversation can be trained.
        """
        conversation = self._writer.as_needed(conversation)
        options, prompt = self._around(conversation)
        written = prompt.with_end(self._writer.write(conversation), conversation.messages)
        try:
            check_nothing_lost(conversation, written)
        except SampleError as error:
            raise SampleError(f"{error}{self._or_served()}") from None
        if self._writer.has_marks:
            return Rendering(written.text, _marked_spans(conversation.messages, written))
        spans = []
        for number, message in enumerate(conversation.messages):
            if message.role == "assistant":
                place = self._answer(written, number, prompt)
                spans.append(Span(place.start, place.end, message.weight))
        kind = (options, *kind_of(conversation))
        if kind not in self._checked:
            self._check_turns(conversation, written, prompt)
            self._checked.add(kind)
        return Rendering(written.text, spans)

    def render_turns(self, conversation: Conversation) -> list[Turn]:
        """Returns the assistant's turns with a weight, each with the prompt that the released
        template gives for it.

        Raises SampleError for a conversation that does not fit the template, and ContextError for a
        template that does not write an answer behind its own generation prompt.
        """
        conversation = self._writer.as_needed(conversation)
        _, around = self._around(conversation)
        return [
            self._turn(conversation, number, around)
            for number, message in enumerate(conversation.messages)
            if message.role == "assistant" and message.weight and number
        ]

    def prompt(self, conversation: Conversation) -> str:
        """Returns the text that the next answer is generated from. Raises SampleError for a
        conversation that does not fit the template.
        """
        conversation = self._writer.as_needed(conversation)
        return self._writer.write(conversation, add_generation_prompt=True, as_released=True).text

    def _around(self, conversation: Conversation) -> tuple[str, AroundAnswers]:
        """Returns the variables of the conversation, as JSON, and the text around its answers."""
        given = conversation.template_options
        options = json.dumps(given, sort_keys=True, default=str) if given else "{}"
        if options not in self._prompts:
            self._prompts[options] = around_answers(self._writer, conversation.template_options)
        return options, self._prompts[options]

    def _turn(self, conversation: Conversation, number: int, around: AroundAnswers) -> Turn:
        """Returns message `number`, an answer, with the prompt that it would be generated from."""
        before, until = (
            conversation._replace(messages=conversation.messages[:size])
            for size in (number, number + 1)
        )
        prompt = self._writer.write(before, add_generation_prompt=True, as_released=True).text
        written = around.with_end(self._writer.write(until, as_released=True), until.messages)
        # Some templates write the last end-of-text token after their loop, which is outside of any
        # message: then the whole text is searched.
        places = written.turns.get(number) or [(0, len(written.text))]
        end = len(written.text) if around.is_of_next else places[-1][1]
        if written.text.startswith(prompt):
            start = len(prompt)
        elif around.is_prompt_of(prompt, written.text[places[0][0] : end]):
            # gpt-oss leaves out the thoughts before a call once the answer to it is there.
            start = places[0][0] + len(around.prompt)
        elif is_thinking(conversation.messages[number]):
            raise SampleError(
                f"the chat template prompts for answer {number} with ...{prompt[-40:]!r}, behind "
                "which its thoughts cannot be written; remove them, or pass what makes the "
                "template think, such as --chat-template-kwargs '{\"enable_thinking\": true}'"
            )
        elif opens_thought(prompt):
            raise SampleError(
                f"the chat template prompts for answer {number} with ...{prompt[-40:]!r}, which "
                "opens a thought, but the answer has none; give the message reasoning_content"
            )
        else:
            raise ContextError(
                f"the chat template prompts for answer {number} with ...{prompt[-40:]!r}, but "
                "writes the answer behind something else, so that it cannot be trained as it is "
                f"generated; {WAY_OUT}, or --train-turns all"
            )
        check_nothing_lost(without_earlier_thoughts(until), written)
        answer = written.text[start:end]
        has_calls = "tool_calls" in conversation.messages[number].fields
        ended = around.last_answer(answer, has_calls)
        if ended is None:
            raise SampleError(_other_end(number, answer, around))
        return Turn(prompt, ended, conversation.messages[number].weight)

    @cached_property
    def contexts(self) -> Contexts:
        """Relation of the contexts of answers to one rendering of the conversation.

        It is found by rendering short conversations with thoughts, a system prompt and tool calls.
        Conversations that the template refuses do not count. A template with {% generation %} is
        made for one rendering.
        """
        if self._writer.has_marks:
            return "kept"
        found: set[Contexts] = {self._contexts_of(messages) for messages in PROBES}
        # The worst of all probes. Most templates differ for one kind of conversation only.
        return next((one for one in ("unknown", "differ") if one in found), "kept")  # type: ignore[return-value]

    def _contexts_of(self, messages: Sequence[Message]) -> Contexts:
        conversation = self._writer.as_needed(Conversation(list(messages)))
        try:
            turns = self.render_turns(conversation)
            whole = self._prompts["{}"].with_end(
                self._writer.write(conversation, as_released=True), conversation.messages
            )
        except ContextError:
            return "unknown"
        except SampleError:
            return "kept"
        is_kept = all(whole.text.startswith(turn.prompt + turn.answer) for turn in turns)
        return "kept" if is_kept else "differ"

    def _answer(self, written: Written, number: int, around: AroundAnswers) -> Place:
        """Returns the place of the answer in message `number` of a rendering."""
        places = written.turns.get(number, ())
        if len(places) != 1:
            raise ValueError(
                f"the chat template writes message {number} in {len(places)} places, not one; "
                f"{WAY_OUT}"
            )
        start, end = places[0]
        turn = written.text[start:end]
        if not turn.startswith(around.prompt):
            raise SampleError(
                f"the chat template begins turn {number} with {turn[:40]!r}, not as it prompts for "
                f"it, {shown(around.prompt)}{self._or_served()}"
            )
        place = around.place(written.text, start, end)
        if place is None:
            raise SampleError(f"{_other_end(number, turn, around)}{self._or_served()}")
        return place

    def _check_turns(
        self, conversation: Conversation, written: Written, around: AroundAnswers
    ) -> None:
        """Raises ValueError unless each answer follows the text that generation would start from.

        Each check takes two renderings, so that of many answers only the first and the last few are
        checked.
        """
        messages = conversation.messages
        answers = [
            number
            for number, one in enumerate(messages)
            if one.role == "assistant" and one.weight and number
        ]
        for number in sorted({*answers[:_CHECKED_AT_EACH_END], *answers[-_CHECKED_AT_EACH_END:]}):
            before, until = (
                conversation._replace(messages=messages[:end]) for end in (number, number + 1)
            )
            start, end, _ = self._answer(written, number, around)
            prompted, answered = (
                self._writer.write(before, add_generation_prompt=True),
                self._writer.write(until),
            )
            if prompted.text != written.text[:start] or answered.text[:end] != written.text[:end]:
                raise ValueError(
                    f"the chat template renders turns up to number {number} again as more follow, "
                    f"so that it would not be trained as it is generated; {WAY_OUT}"
                    f"{self._or_served()}"
                )

    def _or_served(self) -> str:
        return ", or --train-turns served" if self.contexts == "differ" else ""


def _other_end(number: int, turn: str, around: AroundAnswers) -> str:
    ends = " or ".join(map(repr, around.ends))
    return f"the chat template ends turn {number} with {turn[-20:]!r}, not with {ends}"


def _marked_spans(messages: Sequence[Message], written: Written) -> list[Span]:
    spans = []
    for start, end, number in written.generated:
        if number is None and any(message.weight != 1 for message in messages):
            raise SampleError(
                "the chat template marks what is trained outside of turns, so they cannot have "
                "weights"
            )
        spans.append(Span(start, end, 1.0 if number is None else messages[number].weight))
    return spans
