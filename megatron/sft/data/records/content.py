"""pure. Content of a record: a conversation, a passage of text, several of them, or token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from megatron.sft.data.records.messages import Message, texts_of


class Conversation(NamedTuple):
    """Turns, of which the assistant's are trained."""

    messages: list[Message]
    tools: list[Any] | None = None
    template_options: Mapping[str, Any] = {}
    """Further variables of the chat template, such as enable_thinking."""


class Passage(NamedTuple):
    """Text, of which what follows the prompt is trained."""

    prompt: str
    completion: str


class Answers(NamedTuple):
    """Conversations or passages that begin alike, each trained as if it were alone.

    Turns that they share have a weight in the first of them only.
    """

    paths: Sequence[Conversation | Passage]
    weights: Sequence[float]
    """Factor of each one's loss."""


class TokenIds(NamedTuple):
    """Ids, all of them trained."""

    ids: Any


Content = Conversation | Passage | Answers | TokenIds


def messages_of(content: Content) -> list[Message]:
    """Returns the turns of all conversations."""
    paths = content.paths if isinstance(content, Answers) else [content]
    return [one for path in paths if isinstance(path, Conversation) for one in path.messages]


def said_in(content: Content) -> list[str]:
    """Returns all texts, thoughts included, without white space around."""
    paths = content.paths if isinstance(content, Answers) else [content]
    parts = [part for path in paths if isinstance(path, Passage) for part in path]
    return texts_of(messages_of(content)) + [part.strip() for part in parts if part.strip()]
