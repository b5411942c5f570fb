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
    texts_of,
    with_call_ids,
)
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


class Turn(NamedTuple):
    """An answer and its context, as text."""

    prompt: str
    """What generation starts from."""
    answer: str
    """The rest up to the end of the turn, which is trained."""
    weight: float


class _Prompt(NamedTuple):
    """What a template writes around an answer."""

    before: str
    """The generation prompt."""
    end: str
    """The end of the turn, without white space around it unless it is nothing else."""


@dataclass(eq=False)
class ChatTemplate:
    """A compiled chat template. `render` remembers the kinds of conversations that it has
    checked."""

    source: str
    special_tokens: Mapping[str, str]
    """Variables such as bos_token."""
    today: date | None = None
    """The date that the template is given; None for none."""
    _prompts: dict[str, _Prompt] = field(default_factory=dict, init=False, repr=False)
    """By the options of the template, as JSON."""
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
        written = self._write(conversation)
        _check_nothing_lost(conversation, written)
        if self._has_marks:
            return Rendering(written.text, _marked_spans(conversation.messages, written))
        spans = []
        for number, message in enumerate(conversation.messages):
            if message.role == "assistant":
                start, end = self._answer(written, number, prompt)
                spans.append(Span(start, end, message.weight))
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
        end = self._prompts[options].end
        return [
            self._turn(conversation, number, end)
            for number, message in enumerate(conversation.messages)
            if message.role == "assistant" and message.weight and number
        ]

    def _turn(self, conversation: Conversation, number: int, end_of_turn: str) -> Turn:
        """Returns the answer that is message `number`, behind what it would be generated from."""
        before, until = (
            conversation._replace(messages=conversation.messages[:size])
            for size in (number, number + 1)
        )
        prompt = self._write(before, add_generation_prompt=True, as_released=True).text
        written = self._write(until, as_released=True)
        if not written.text.startswith(prompt):
            raise ContextError(
                f"the chat template prompts for answer {number} with ...{prompt[-40:]!r}, but "
                "writes the answer behind something else, so that it cannot be trained as it is "
                f"generated; {_WAY_OUT}, or --train-turns all"
            )
        _check_nothing_lost(_without_earlier_thoughts(until), written)
        # Some templates write the end of the text behind the last turn, where no turn is.
        places = written.turns.get(number) or [(0, len(written.text))]
        answer = written.text[len(prompt) : places[-1][1]]
        answer = answer.rstrip() if end_of_turn.strip() else answer
        if not answer.endswith(end_of_turn):
            raise SampleError(
                f"the chat template ends turn {number} with {answer[-20:]!r}, not with "
                f"{end_of_turn!r}"
            )
        return Turn(prompt, answer, conversation.messages[number].weight)

    @cached_property
    def contexts(self) -> Contexts:
        """How the contexts of answers relate to one rendering of the conversation.

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
            whole = self._write(conversation, as_released=True).text
            turns = self.render_turns(conversation)
        except ContextError:
            return "unknown"
        except SampleError:
            return "kept"
        is_kept = all(whole.startswith(turn.prompt + turn.answer) for turn in turns)
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

    def _prompt(self, options: Mapping[str, Any]) -> _Prompt:
        """What stands around an answer; ValueError for a template that trains no end of a turn."""
        question, before = Message("user", "?"), ""
        try:
            asked = self._write(Conversation([question], None, options))
            prompted = self._write(
                Conversation([question], None, options), add_generation_prompt=True
            )
            chats = [[question, Message("assistant", text)] for text in ("yes", "no")]
            answers = [self._write(Conversation(messages, None, options)) for messages in chats]
        except SampleError as error:
            raise ValueError(
                f"{error}, although it is a question and an answer; {_WAY_OUT}"
            ) from None
        if not self._has_marks:
            before = _generation_prompt(asked, prompted)
        ends = []
        for answered, text in zip(answers, ("yes", "no")):
            spans = [(start, end) for start, end, _ in answered.generated] or answered.turns.get(
                1, ()
            )
            trained = [answered.text[start:end] for start, end in spans]
            # The last span that holds the answer: TRL's Phi 3 marks the end of the text behind it,
            # apart.
            ends.append(
                next((part.rpartition(text)[2] for part in reversed(trained) if text in part), "")
            )
        if ends[0] != ends[1] or not ends[0]:
            raise ValueError(
                "under the chat template no end of a turn would be trained, so no answer ends; "
                f"{_WAY_OUT}"
            )
        return _Prompt(before, ends[0].strip() or ends[0])

    def _answer(self, written: Written, number: int, prompt: _Prompt) -> tuple[int, int]:
        """Where the assistant's message is trained, [start, end)."""
        places = written.turns.get(number, ())
        if len(places) != 1:
            raise ValueError(
                f"the chat template writes message {number} in {len(places)} places, not one; "
                f"{_WAY_OUT}"
            )
        start, end = places[0]
        turn = written.text[start:end]
        if not turn.startswith(prompt.before):
            raise SampleError(
                f"the chat template begins turn {number} with {turn[:40]!r}, not as it prompts for "
                "it"
            )
        if prompt.end.strip():
            turn = turn.rstrip()
        if not turn.endswith(prompt.end):
            raise SampleError(
                f"the chat template ends turn {number} with {turn[-20:]!r}, not with {prompt.end!r}"
            )
        return start + len(prompt.before), start + len(turn)

    def _check_turns(self, conversation: Conversation, written: Written, prompt: _Prompt) -> None:
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
            start, end = self._answer(written, number, prompt)
            prompted, answered = self._write(before, add_generation_prompt=True), self._write(until)
            if prompted.text != written.text[:start] or answered.text[:end] != written.text[:end]:
                raise ValueError(
                    f"the chat template renders turns up to number {number} again as more follow, "
                    f"so that it would not be trained as it is generated; {_WAY_OUT}"
                )

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
                [_with_thoughts(message.as_dict()) for message in conversation.messages],
                **variables,
                tools=conversation.tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
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

    def _strftime_now(self, form: object) -> str:
        assert self.today is not None
        if not isinstance(form, str) or len(form) > 100 or _UNSAFE_FORM.search(form):
            raise TemplateError(f"the chat template asks for the date as {form!r:.60}")
        return self.today.strftime(form)


def _with_thoughts(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose thoughts stand under each of the names that templates read."""
    if "reasoning_content" not in message:
        return message
    return {**dict.fromkeys(REASONING_NAMES, message["reasoning_content"]), **message}


def _generation_prompt(asked: Written, prompted: Written) -> str:
    """What the template adds for the assistant to go on from."""
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
    """What a template may make a difference by: equal for conversations of one kind."""
    before, steps = "", set()
    for message in conversation.messages:
        thinks = "</think>" in message.content or "reasoning_content" in message.fields
        calls, is_trained = "tool_calls" in message.fields, message.weight > 0
        steps.add((before, message.role, thinks, calls, bool(message.content), is_trained))
        before = message.role
    return frozenset(steps), bool(conversation.tools)
