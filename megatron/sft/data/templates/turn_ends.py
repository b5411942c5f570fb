"""pure. Finds the text that a chat template writes around an answer: the generation prompt before
it, and the end of turn behind it.

    most        one end behind every answer
    gpt-oss     <|return|> behind the last answer and <|call|> behind a call, which the model
                generates; <|end|> behind earlier answers, which it never generates
    GLM         no end: generation stops where the next message begins, with <|user|>, or with
                <|observation|> after a call
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from megatron.sft.data.records.content import Conversation
from megatron.sft.data.records.messages import Message
from megatron.sft.data.records.values import SampleError
from megatron.sft.data.templates.marked import Written
from megatron.sft.data.templates.writer import WAY_OUT, SlowTemplateError, TemplateWriter

_CALL_END = "<|call|>"
_NEXT_MESSAGE, _AFTER_ANSWER, _AFTER_CALL = "[gMASK]<sop>", "<|user|>", "<|observation|>"
"""Text that only GLM's templates have, and their two ends of an answer."""


class Place(NamedTuple):
    """Characters of a rendering: the answer is [start, end_of_text), its end of turn [end_of_text,
    end). Both are trained.
    """

    start: int
    end_of_text: int
    end: int


class AroundAnswers(NamedTuple):
    """Text that a template writes around an answer. White space around an end is removed, unless
    the end is white space.
    """

    prompt: str
    """Generation prompt, right before the answer."""
    ends: tuple[str, ...]
    """Ends of turn that the model generates."""
    end_of_earlier: str | None = None
    """Another end, behind answers that are not the last; None if it is the same."""
    is_of_next: bool = False
    """True if the end is the beginning of the next message (GLM)."""
    end_of_call: str = ""
    """End of an answer that the template leaves out behind a single call (DeepSeek R1 and V3)."""

    def place(self, text: str, start: int, end: int) -> Place | None:
        """Returns the place of the answer in the turn [start, end) of a rendering; None if the turn
        has none of the ends.
        """
        begin = start + len(self.prompt)
        if self.is_of_next:
            found = next((one for one in self.ends if text.startswith(one, end)), None)
            return None if found is None else Place(begin, end, end + len(found))
        if self.ends[0].strip():
            end = start + len(text[start:end].rstrip())
        found = next((one for one in self.ends if text[start:end].endswith(one)), None)
        if found is not None:
            return Place(begin, end - len(found), end)
        if self.end_of_earlier is None or not text[start:end].endswith(self.end_of_earlier):
            return None
        # This end is not trained: the model would generate it, and would not stop there.
        body = end - len(self.end_of_earlier)
        return Place(begin, body, body)

    def is_prompt_of(self, context: str, turn: str) -> bool:
        """Returns whether a turn begins with the generation prompt, and a context ends with it."""
        return bool(self.prompt) and turn.startswith(self.prompt) and context.endswith(self.prompt)

    def with_end(self, written: Written, messages: Sequence[Message]) -> Written:
        """Returns a rendering with an end of its last answer. GLM's templates would write it with
        the next message, so it is added.
        """
        if not self.is_of_next or messages[-1].role != "assistant":
            return written
        end = _AFTER_CALL if messages[-1].fields.get("tool_calls") else _AFTER_ANSWER
        return written._replace(text=written.text + end)

    def last_answer(self, text: str, has_calls: bool) -> str | None:
        """Returns the last answer of a conversation without white space behind it, and with the end
        of a single call if the template leaves it out; None if it has none of the ends, or several.
        """
        text = text.rstrip() if self.ends[0].strip() and not self.is_of_next else text
        if not self.end_of_call or not has_calls:
            return text if text.endswith(self.ends) else None
        # From the third call on, these templates write the end several times.
        num_ends = text.count(self.end_of_call)
        return None if num_ends > 1 else text if num_ends else text + self.end_of_call


def around_answers(writer: TemplateWriter, options: Mapping[str, Any]) -> AroundAnswers:
    """Returns the text around an answer, found by rendering two short conversations that differ in
    the answer alone. Raises ValueError if no end of a turn would be trained.
    """

    def write(*messages: Message, prompts: bool = False) -> Written:
        return writer.write(Conversation(list(messages), None, options), prompts)

    question, texts = Message("user", "?"), ("yes", "no")
    answers = [Message("assistant", text) for text in texts]
    try:
        asked, prompted = write(question), write(question, prompts=True)
        lasts = [_pieces(write(question, answer), 1) for answer in answers]
    except SlowTemplateError:
        raise
    except SampleError as error:
        message = f"{error}, although it is a question and an answer; {WAY_OUT}"
        raise ValueError(str(error) if "--template-date" in str(error) else message) from None
    if writer.has_marks:
        around = find_ends(writer.source, "", end_behind(texts, lasts), "")
    else:
        try:
            chat = write(question, answers[0], question, answers[1], question)
            earlier = end_behind(texts, [_pieces(chat, 1), _pieces(chat, 3)])
        except SampleError:  # the template allows one turn only: an error when a longer chat comes
            earlier = ""
        before = _generation_prompt(asked, prompted)
        around = find_ends(writer.source, before, end_behind(texts, lasts), earlier)
        if around is not None and not around.is_of_next:
            around = around._replace(end_of_call=_end_left_out(write, around.ends))
    if around is None:
        raise ValueError(
            "under the chat template no end of a turn would be trained, so no answer ends; "
            f"{WAY_OUT}"
        )
    return around


def _end_left_out(write: Callable[..., Written], ends: tuple[str, ...]) -> str:
    """Returns the end that a template writes behind two calls, but not behind one; "" if it writes
    both or none.

    `<call>f(1)</call>` and `<call>f(1)</call><call>f(2)</call></calls><end>` -> `</calls><end>`
    """
    tails = []
    for words in (["word1word"], ["word1word", "word2word"]):
        calls = [
            {"type": "function", "function": {"name": "f", "arguments": {"x": word}}, "id": word}
            for word in words
        ]
        answer = Message("assistant", "", fields={"tool_calls": calls}, is_null=True)
        try:
            written = write(Message("user", "?"), answer)
        except SlowTemplateError:
            raise
        except SampleError:  # the template takes no calls, or one at a time
            return ""
        tails.append("".join(_pieces(written, 1)).rpartition(words[-1])[2].rstrip())
    is_left_out = tails[1].startswith(tails[0]) and not tails[0].endswith(ends)
    return tails[1].removeprefix(tails[0]) if is_left_out and tails[1].endswith(ends) else ""


def _pieces(written: Written, number: int) -> list[str]:
    """Returns the parts of a rendering that the template marks as trained, or without marks the
    text of message `number`.
    """
    spans = [(start, end) for start, end, _ in written.generated] or written.turns.get(number, ())
    return [written.text[start:end] for start, end in spans]


def _generation_prompt(asked: Written, prompted: Written) -> str:
    """Returns the generation prompt: the text that `add_generation_prompt=True` adds."""
    if asked.text[: asked.loop_end] == prompted.text[: prompted.loop_end]:
        return prompted.text[prompted.loop_end :]
    if prompted.text.startswith(asked.text):  # written in the loop, at its last message
        return prompted.text[len(asked.text) :]
    raise ValueError(
        f"the chat template writes a question otherwise where it prompts for an answer; {WAY_OUT}"
    )


def find_ends(source: str, prompt: str, last: str, earlier: str) -> AroundAnswers | None:
    """Returns the text around answers; None for a template that writes no end of turn.

    Args:
        source: the template.
        prompt: its generation prompt.
        last, earlier: text behind the last answer of a conversation, and behind an earlier one;
            empty if there is none.
    """
    if _NEXT_MESSAGE in source and not last:
        return AroundAnswers(prompt, (_AFTER_ANSWER, _AFTER_CALL), is_of_next=True)
    if not last:
        return None
    ends = (last.strip() or last, *([_CALL_END] if _CALL_END in source else []))
    other = earlier.strip()
    return AroundAnswers(prompt, ends, None if not other or other.endswith(ends) else other)


def end_behind(texts: Sequence[str], written: Sequence[Sequence[str]]) -> str:
    """Returns the text that follows each of two answers; "" if it is not the same for both.

    `["yes", "no"], [["yes<end>"], ["no<end>"]] -> "<end>"`

    Args:
        texts: the two answers.
        written: the parts of each rendering that may have the answer. The last one that has it
            counts: TRL's template of Phi 3 marks the end of the text as a part of its own.
    """
    ends = [
        next((piece.rpartition(text)[2] for piece in reversed(pieces) if text in piece), "")
        for text, pieces in zip(texts, written)
    ]
    return ends[0] if ends[0] == ends[1] else ""
