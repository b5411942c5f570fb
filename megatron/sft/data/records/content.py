"""pure. Content of a record, free of its format: a conversation, a passage of text, several of
them, or token ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from megatron.sft.data.records.messages import Message, texts_of


class Conversation(NamedTuple):
    """A conversation. The assistant's turns are trained."""

    messages: list[Message]
    tools: list[Any] | None = None
    template_options: Mapping[str, Any] = {}
    """Further variables of the chat template, such as enable_thinking."""
    placeholder: str = ""
    """Text that the template writes for each image, to be counted in each turn; "" to count none.
    """


class Passage(NamedTuple):
    """A text with a prompt, which may be empty. Only the completion is trained."""

    prompt: str
    completion: str


class Answers(NamedTuple):
    """Conversations or passages with a common beginning, each trained as if it were alone.

    A turn that several of them share has a weight in the first of them only, so that it is trained
    once.
    """

    paths: Sequence[Conversation | Passage]
    weights: Sequence[float]
    """Factor of the loss of each path."""


class TokenIds(NamedTuple):
    """Token ids."""

    ids: Any
    is_trained: Any = None
    """Whether each id is trained, as an array of bool; None if all are."""
    where: str = "tokens"
    """Name of their field."""


Content = Conversation | Passage | Answers | TokenIds


def messages_of(content: Content) -> list[Message]:
    """Returns the turns of all conversations in `content`."""
    paths = content.paths if isinstance(content, Answers) else [content]
    return [one for path in paths if isinstance(path, Conversation) for one in path.messages]


def said_in(content: Content) -> list[str]:
    """Returns all texts in `content`, thoughts included, without white space around them."""
    paths = content.paths if isinstance(content, Answers) else [content]
    parts = [part for path in paths if isinstance(path, Passage) for part in path]
    return texts_of(messages_of(content)) + [part.strip() for part in parts if part.strip()]
