"""pure. Messages -> text by a chat template, and which of its characters the assistant must
produce: one rendering.

A template with {% generation %} says itself what is trained. In any other, the turn of each message
is what the template writes while its loop is at that message; an assistant's turn is trained from
the end of the generation prompt to the end of the turn, white space after the end-of-turn token
left out. `marked_template` tells these places.

Invariants:
- each trained turn stands behind what generation would start from, and reads as if it were the
  last. Checked by rendering the turns before it, and up to it, for one conversation of each kind
  (which roles follow one another, with tools, calls, thoughts);
- every message's text is in its turn, or the conversation is refused;
- each trained turn ends in the template's end of turn.

A template that asks for today's date gets the one of --template-date: a sample is the same on every
day.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import cached_property
from typing import Any, NamedTuple

from jinja2 import TemplateError

from megatron.sft.data.content import Conversation
from megatron.sft.data.marked_template import MarkedTemplate, Written
from megatron.sft.data.messages import (
    REASONING_NAMES,
    Message,
    SampleError,
    is_thinking,
    texts_of,
    with_call_ids,
)
from megatron.sft.data.template_sandbox import EndlessTemplateError
from megatron.sft.data.turn_ends import AroundAnswers, Place, end_behind, find_ends
from megatron.sft.data.turns import Contexts

_CHECKED_AT_EACH_END = 4
"""Answers of a conversation that are compared with how they would be generated."""
_WAY_OUT = (
    "pass --chat-template FILE, with {% generation %} ... {% endgeneration %} around what "
    "is to be trained"
)

TRAINING_VARIANTS: Mapping[str, str] = {
    # Qwen3 leaves out the thoughts of all turns but the last ones, and writes an empty thought only
    # into the last.
    "loop.index0 > ns.last_query_index": "true",
    "loop.last or (not loop.last and reasoning_content)": "true",
    # Mistral 0.3 and Nemo write the system prompt into the user's turn that is the last message: in
    # training, none is.
    "loop.last and system_message is defined": "loop.first and system_message is defined",
}
"""Conditions of released templates under which a conversation cannot be trained -> what they are in
training.

They are recognised by their text, whatever else a release changed. The template that is exported
stays as released.
"""
_NEEDS_CALL_IDS = re.compile(r"\.id\s*\|\s*length\s*\)?\s*!=\s*9")
"""In templates that refuse calls without an id of nine characters: Mistral 0.3, Nemo and later."""

_UNSAFE_FORM = re.compile(r"%(?!-?[A-Za-z%])")
"""Parts of a date's format with a width, which could be any."""


_CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}, "id": "abcdefghi"}
_QUESTION, _ANSWER = Message("user", "q"), Message("assistant", "a")
_PROBES: Sequence[Sequence[Message]] = (
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
"""Conversations that templates may render again as more follows."""


class Span(NamedTuple):
    """Characters [start, end) of a rendering, and the weight of their loss."""

    start: int
    end: int
    weight: float


class Rendering(NamedTuple):
    """A conversation as text, and what of it is trained."""

    text: str
    spans: list[Span]


class ContextError(ValueError):
    """A template that does not write an answer behind what it prompts with for it."""


class SlowTemplateError(SampleError):
    """A template that takes too long with one conversation: no other need be tried."""


class Turn(NamedTuple):
    """An answer and its context, as text."""

    prompt: str
    """Text that generation starts from."""
    answer: str
    """The rest up to the end of the turn, which is trained."""
    weight: float


@dataclass(eq=False)
class ChatTemplate:
    """A compiled chat template. `render` remembers the kinds of conversations that it has
    checked."""

    source: str
    special_tokens: Mapping[str, str]
    """Variables such as bos_token."""
    today: date | None = None
    """The date that the template is given; None for none."""
    _prompts: dict[str, AroundAnswers] = field(default_factory=dict, init=False, repr=False)
    """Contexts by the options of the template, as JSON."""
    _checked: set[Any] = field(default_factory=set, init=False, repr=False)

    def __getstate__(self) -> tuple[str, Mapping[str, str], date | None]:
        return self.source, self.special_tokens, self.today  # what is compiled cannot be pickled

    def __setstate__(self, state: tuple[str, Mapping[str, str], date | None]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def render(self, conversation: Conversation) -> Rendering:
        """Render once, and find what is trained.

        SampleError for a conversation that does not fit; ValueError for a template under which none
        can be trained.
        """
        if _NEEDS_CALL_IDS.search(self.source):
            conversation = conversation._replace(messages=with_call_ids(conversation.messages))
        options = json.dumps(conversation.template_options, sort_keys=True, default=str)
        if options not in self._prompts:
            self._prompts[options] = self._prompt(conversation.template_options)
        prompt = self._prompts[options]
        written = prompt.with_end(self._write(conversation), conversation.messages)
        try:
            _check_nothing_lost(conversation, written)
        except SampleError as error:
            raise SampleError(f"{error}{self._or_served()}") from None
        if self._has_marks:
            return Rendering(written.text, _marked_spans(conversation.messages, written))
        spans = []
        for number, message in enumerate(conversation.messages):
            if message.role == "assistant":
                place = self._answer(written, number, prompt)
                spans.append(Span(place.start, place.end, message.weight))
        kind = (options, *_kind_of(conversation))
        if kind not in self._checked:
            self._check_turns(conversation, written, prompt)
            self._checked.add(kind)
        return Rendering(written.text, spans)

    def render_turns(self, conversation: Conversation) -> list[Turn]:
        """Returns each of the assistant's turns that has a weight, as the released template writes
        it behind what it prompts with for it.

        SampleError for a conversation that does not fit; ContextError for a template that writes an
        answer behind something else.
        """
        if _NEEDS_CALL_IDS.search(self.source):
            conversation = conversation._replace(messages=with_call_ids(conversation.messages))
        options = json.dumps(conversation.template_options, sort_keys=True, default=str)
        if options not in self._prompts:
            self._prompts[options] = self._prompt(conversation.template_options)
        return [
            self._turn(conversation, number, self._prompts[options])
            for number, message in enumerate(conversation.messages)
            if message.role == "assistant" and message.weight and number
        ]

    def _turn(self, conversation: Conversation, number: int, around: AroundAnswers) -> Turn:
        """Returns the answer that is message `number`, behind what it would be generated from."""
        before, until = (
            conversation._replace(messages=conversation.messages[:size])
            for size in (number, number + 1)
        )
        prompt = self._write(before, add_generation_prompt=True, as_released=True).text
        written = around.with_end(self._write(until, as_released=True), until.messages)
        # Some templates write the end of the text behind the last turn, where no turn is.
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
                'template think, such as "chat_template_kwargs": {"enable_thinking": true} in the '
                "record"
            )
        else:
            raise ContextError(
                f"the chat template prompts for answer {number} with ...{prompt[-40:]!r}, but "
                "writes the answer behind something else, so that it cannot be trained as it is "
                f"generated; {_WAY_OUT}, or --train-turns all"
            )
        _check_nothing_lost(_without_earlier_thoughts(until), written)
        answer = written.text[start:end]
        ended = around.last_answer(answer)
        if ended is None:
            raise SampleError(_other_end(number, answer, around))
        return Turn(prompt, ended, conversation.messages[number].weight)

    @cached_property
    def contexts(self) -> Contexts:
        """Relation of the contexts of answers to one rendering of the conversation.

        Asked of short conversations with thoughts, a system prompt and tool calls; those that the
        template refuses say nothing. A template that marks what is trained is made for one
        rendering.
        """
        if self._has_marks:
            return "kept"
        found: set[Contexts] = {self._contexts_of(messages) for messages in _PROBES}
        return next((one for one in ("unknown", "differ") if one in found), "kept")  # type: ignore[return-value]

    def _contexts_of(self, messages: Sequence[Message]) -> Contexts:
        conversation = Conversation(list(messages))
        if _NEEDS_CALL_IDS.search(self.source):
            conversation = conversation._replace(messages=with_call_ids(conversation.messages))
        try:
            turns = self.render_turns(conversation)
            whole = self._prompts["{}"].with_end(
                self._write(conversation, as_released=True), conversation.messages
            )
        except ContextError:
            return "unknown"
        except SampleError:
            return "kept"
        is_kept = all(whole.text.startswith(turn.prompt + turn.answer) for turn in turns)
        return "kept" if is_kept else "differ"

    @cached_property
    def _has_marks(self) -> bool:
        return re.search(r"{%-?\s*generation\s*-?%}", self.source) is not None

    @cached_property
    def _template(self) -> MarkedTemplate:
        source = self.source
        for released, in_training in TRAINING_VARIANTS.items():
            source = source.replace(released, in_training)
        return self._compiled(source)

    def _compiled(self, source: str) -> MarkedTemplate:
        try:
            return MarkedTemplate(source)
        except Exception as error:  # nested too deep, among others
            raise ValueError(
                f"the chat template cannot be read: {error!s:.300}; {_WAY_OUT}"
            ) from None

    def _prompt(self, options: Mapping[str, Any]) -> AroundAnswers:
        """Returns what stands around an answer; ValueError for a template that trains no end of a
        turn.
        """

        def write(*messages: Message, prompts: bool = False) -> Written:
            return self._write(Conversation(list(messages), None, options), prompts)

        question, texts = Message("user", "?"), ("yes", "no")
        answers = [Message("assistant", text) for text in texts]
        try:
            asked, prompted = write(question), write(question, prompts=True)
            lasts = [_pieces(write(question, answer), 1) for answer in answers]
        except SlowTemplateError:
            raise
        except SampleError as error:
            told = f"{error}, although it is a question and an answer; {_WAY_OUT}"
            raise ValueError(str(error) if "--template-date" in str(error) else told) from None
        if self._has_marks:
            around = find_ends(self.source, "", end_behind(texts, lasts), "")
        else:
            try:
                chat = write(question, answers[0], question, answers[1], question)
                earlier = end_behind(texts, [_pieces(chat, 1), _pieces(chat, 3)])
            except SampleError:  # of several turns: said where one comes
                earlier = ""
            before = _generation_prompt(asked, prompted)
            around = find_ends(self.source, before, end_behind(texts, lasts), earlier)
        if around is None:
            raise ValueError(
                "under the chat template no end of a turn would be trained, so no answer ends; "
                f"{_WAY_OUT}"
            )
        return around

    def _answer(self, written: Written, number: int, around: AroundAnswers) -> Place:
        """Returns the spans of the assistant's message that are trained."""
        places = written.turns.get(number, ())
        if len(places) != 1:
            raise ValueError(
                f"the chat template writes message {number} in {len(places)} places, not one; "
                f"{_WAY_OUT}"
            )
        start, end = places[0]
        turn = written.text[start:end]
        if not turn.startswith(around.prompt):
            raise SampleError(
                f"the chat template begins turn {number} with {turn[:40]!r}, not as it prompts for "
                f"it, {around.prompt!r:.60}"
            )
        place = around.place(written.text, start, end)
        if place is None:
            raise SampleError(_other_end(number, turn, around))
        return place

    def _check_turns(
        self, conversation: Conversation, written: Written, around: AroundAnswers
    ) -> None:
        """Raise ValueError unless each answer stands behind what generation would start from.

        Of many answers only the first and the last few are looked at, as each takes two renderings.
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
            prompted, answered = self._write(before, add_generation_prompt=True), self._write(until)
            if prompted.text != written.text[:start] or answered.text[:end] != written.text[:end]:
                raise ValueError(
                    f"the chat template renders turns up to number {number} again as more follow, "
                    f"so that it would not be trained as it is generated; {_WAY_OUT}"
                    f"{self._or_served()}"
                )

    def _or_served(self) -> str:
        return ", or --train-turns served" if self.contexts == "differ" else ""

    @cached_property
    def _released(self) -> MarkedTemplate:
        return self._compiled(self.source)

    def _write(
        self,
        conversation: Conversation,
        add_generation_prompt: bool = False,
        as_released: bool = False,
    ) -> Written:
        template = self._released if as_released else self._template
        variables = {**self.special_tokens, **conversation.template_options}
        if self.today is not None:
            variables.setdefault("strftime_now", self._strftime_now)
        try:
            return template.write(
                [self._as_dict(message) for message in conversation.messages],
                **variables,
                tools=conversation.tools,
                documents=None,
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
        except Exception as error:  # a program of others
            said = f"{type(error).__name__}: {error}"
            raise SampleError(f"the chat template fails on the conversation: {said:.300}") from None

    def _as_dict(self, message: Message) -> dict[str, Any]:
        """Returns a message as the template reads it: its thoughts stand under each of the names
        that templates know, also those that the data have in <think> tags and the template expects
        apart (gpt-oss).
        """
        thoughts = message.fields.get("reasoning_content")
        if thoughts is None and self._reads_thoughts_apart and message.role == "assistant":
            before, is_thinking, answer = message.content.partition("</think>")
            if is_thinking:
                thoughts = before.strip().removeprefix("<think>").strip()
                message = message._replace(content=answer.strip())
        if thoughts is None:
            return message.as_dict()
        return {**dict.fromkeys(REASONING_NAMES, thoughts), **message.as_dict()}

    @cached_property
    def _reads_thoughts_apart(self) -> bool:
        is_reading = any(name in self.source for name in REASONING_NAMES)
        return is_reading and "</think>" not in self.source

    def _strftime_now(self, form: object) -> str:
        assert self.today is not None
        if not isinstance(form, str) or len(form) > 100 or _UNSAFE_FORM.search(form):
            raise TemplateError(f"the chat template asks for the date as {form!r:.60}")
        return self.today.strftime(form)


def _pieces(written: Written, number: int) -> list[str]:
    """Returns what is trained of a rendering, or else what is written of a message."""
    spans = [(start, end) for start, end, _ in written.generated] or written.turns.get(number, ())
    return [written.text[start:end] for start, end in spans]


def _other_end(number: int, turn: str, around: AroundAnswers) -> str:
    ends = " or ".join(map(repr, around.ends))
    return f"the chat template ends turn {number} with {turn[-20:]!r}, not with {ends}"


def _generation_prompt(asked: Written, prompted: Written) -> str:
    """Returns what the template adds for the assistant to continue."""
    if asked.text[: asked.loop_end] == prompted.text[: prompted.loop_end]:
        return prompted.text[prompted.loop_end :]
    if prompted.text.startswith(asked.text):  # written in the loop, at its last message
        return prompted.text[len(asked.text) :]
    raise ValueError(
        f"the chat template writes a question otherwise where it prompts for an answer; {_WAY_OUT}"
    )


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


def _check_nothing_lost(conversation: Conversation, written: Written) -> None:
    """Raise SampleError for a text that the template leaves out."""
    for number, message in enumerate(conversation.messages):
        places = written.turns.get(number) or [(0, len(written.text))]
        turn = "".join(written.text[start:end] for start, end in places)
        wanted = [
            part.strip() for text in texts_of([message]) for part in re.split("</?think>", text)
        ]
        wanted += [call["function"]["name"] for call in message.fields.get("tool_calls", ())]
        for text in wanted:
            if text not in turn and json.dumps(text, ensure_ascii=False)[1:-1] not in turn:
                raise SampleError(
                    f"message {number}, of the {message.role}, holds {text!r:.40}, which the chat "
                    f"template leaves out; remove it, or {_WAY_OUT}"
                )
    for tool in conversation.tools or ():
        name = tool["function"].get("name", "") if isinstance(tool["function"], Mapping) else ""
        if name not in written.text:
            raise SampleError(
                f"the chat template leaves out the tool {name!r:.40}; remove tools, or {_WAY_OUT}"
            )


def _without_earlier_thoughts(conversation: Conversation) -> Conversation:
    """Returns the conversation without the thoughts that templates leave out of a context: those
    before its last message.
    """
    messages = []
    for message in conversation.messages[:-1]:
        fields = {k: v for k, v in message.fields.items() if k not in REASONING_NAMES}
        content = message.content
        if message.role == "assistant":
            content = content.rpartition("</think>")[2]
        messages.append(message._replace(content=content, fields=fields))
    return conversation._replace(messages=[*messages, conversation.messages[-1]])


def _kind_of(conversation: Conversation) -> tuple[Any, ...]:
    """Returns a key that is equal for conversations that a template may not treat differently."""
    before, steps = "", set()
    for message in conversation.messages:
        calls, is_trained = "tool_calls" in message.fields, message.weight > 0
        thinks = is_thinking(message)
        steps.add((before, message.role, thinks, calls, bool(message.content), is_trained))
        before = message.role
    return frozenset(steps), bool(conversation.tools)
