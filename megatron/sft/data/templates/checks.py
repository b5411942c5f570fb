"""pure. Checks of renderings: text that a template leaves out, and kinds of conversations."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from megatron.packing.quoting import shown
from megatron.sft.data.records.content import Conversation
from megatron.sft.data.records.messages import REASONING_NAMES, is_thinking, texts_of
from megatron.sft.data.records.values import SampleError
from megatron.sft.data.templates.marked import Written
from megatron.sft.data.templates.writer import WAY_OUT


def check_nothing_lost(conversation: Conversation, written: Written) -> None:
    """Raises SampleError if the rendering lacks a message's text, image, a call or a tool.

    A text is searched for as it is, and as the template may have escaped it in JSON.
    """
    if conversation.placeholder:
        _check_images(conversation, written)
    for number, message in enumerate(conversation.messages):
        places = written.turns.get(number) or [(0, len(written.text))]
        is_plain = not message.fields and not message.images and len(places) == 1
        if is_plain and written.text.find(message.content.strip(), *places[0]) >= 0:
            continue  # most messages; the steps below find the same
        turn = "".join([written.text[start:end] for start, end in places])
        wanted = texts_of([message])
        if any("think>" in text for text in wanted):
            wanted = [part.strip() for text in wanted for part in re.split("</?think>", text)]
        if message.fields:
            wanted += [call["function"]["name"] for call in message.fields.get("tool_calls", ())]
        for text in wanted:
            if text not in turn and json.dumps(text, ensure_ascii=False)[1:-1] not in turn:
                raise SampleError(
                    f"message {number}, of the {message.role}, holds {shown(text)}, which the chat "
                    f"template leaves out; remove it, or {WAY_OUT}"
                )
    for tool in conversation.tools or ():
        name = tool["function"].get("name", "") if isinstance(tool["function"], Mapping) else ""
        if name not in written.text:
            raise SampleError(
                f"the chat template leaves out the tool {shown(name)}; remove tools, or {WAY_OUT}"
            )


def _check_images(conversation: Conversation, written: Written) -> None:
    """Raises SampleError if a turn has fewer placeholders than images. Where the whole rendering
    has as many as there are images, no turn has more, either: each is in the turn of its image.
    """
    for number, message in enumerate(conversation.messages):
        # A message without a span of its own, as a system prompt may be, is between the others.
        places = written.turns.get(number) or _between_turns(written)
        texts = [written.text[start:end] for start, end in places]
        num_written = sum(text.count(conversation.placeholder) for text in texts)
        if num_written < len(message.images):
            move = "move them to a turn of the user, or "
            raise SampleError(
                f"message {number}, of the {message.role}, has {len(message.images)} images, of "
                f"which the chat template writes {num_written}; "
                f"{move * (message.role in ('system', 'assistant'))}pass --chat-template FILE that "
                f"writes {conversation.placeholder} for each"
            )


def _between_turns(written: Written) -> list[tuple[int, int]]:
    """Returns the spans of a rendering that belong to no message."""
    spans = sorted(span for places in written.turns.values() for span in places)
    starts = [0, *(end for _, end in spans)]
    ends = [*(start for start, _ in spans), len(written.text)]
    return list(zip(starts, ends))


def without_earlier_thoughts(conversation: Conversation) -> Conversation:
    """Returns the conversation with thoughts in its last message only. Templates of thinking models
    remove earlier thoughts from a context, so that their absence is no loss.
    """
    messages = []
    for message in conversation.messages[:-1]:
        fields = {k: v for k, v in message.fields.items() if k not in REASONING_NAMES}
        if message.role == "assistant":
            content = message.content.rpartition("</think>")[2]
            message = message._replace(content=content, images=())
        messages.append(message._replace(fields=fields))
    return conversation._replace(messages=[*messages, conversation.messages[-1]])


def opens_thought(prompt: str) -> bool:
    """Returns whether a generation prompt ends with an opened thought (<think>)."""
    return re.search(r"<[\w:]*think>\s*$", prompt) is not None


def kind_of(conversation: Conversation) -> tuple[Any, ...]:
    """Returns a key of the structure of a conversation. A template treats conversations with equal
    keys alike, so that one of each kind is checked.
    """
    before, steps = "", set()
    for message in conversation.messages:
        calls, is_trained = "tool_calls" in message.fields, message.weight > 0
        thinks = is_thinking(message)
        content = bool(message.content), bool(message.images)
        steps.add((before, message.role, thinks, calls, *content, is_trained))
        before = message.role
    return frozenset(steps), bool(conversation.tools)
