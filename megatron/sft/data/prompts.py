"""pure. Reads the prompts of --sample-prompts. They are records in any format of the training data;
answers in them are ignored.

    {"prompt": "Name a bird."}                                         asked as text
    {"messages": [{"role": "user", "content": "Name a bird."}]}        asked through the template
    {"instruction": "Name a bird.", "output": "A wren."}               the answer is not read
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from megatron.blending.metadatasets.metadataset import load_metadataset
from megatron.blending.metadatasets.tree import source_entries
from megatron.sft.data.chat_encoder import ChatEncoder, Tokenizer
from megatron.sft.data.chats import ChatLoad, open_chats
from megatron.sft.data.records.content import Answers, Conversation, Passage
from megatron.sft.data.records.formats import read_record
from megatron.sft.data.records.messages import Message
from megatron.sft.data.records.turns import only_last
from megatron.sft.data.records.values import SampleError

MAX_PROMPTS = 64
_ANSWER = "?"
"""Placeholder for the model's answer. The prompt is everything before the first trained token of a
record with this answer.
"""


class Prompt(NamedTuple):
    """A prompt to the model."""

    text: str
    """Last message of the prompt, for a person to read."""
    ids: tuple[int, ...]
    """All tokens of the prompt."""


def read_prompts(path: str, encoder: ChatEncoder) -> list[Prompt]:
    """Returns the prompts of a file. Raises ValueError, one line with its name, if a record is not
    a prompt.
    """
    flag = f"--sample-prompts {path}"
    try:
        entries = source_entries(load_metadataset(path, "train"))
        opened = [open_chats(entry, encoder) for entry in entries]
    except ValueError as failure:
        raise ValueError(f"{flag}: {failure}") from None
    count = sum(len(one.source) for one in opened)
    if not 0 < count <= MAX_PROMPTS:
        raise ValueError(
            f"{flag} must have 1 to {MAX_PROMPTS} prompts, but has {count:,}; each is answered at "
            "each evaluation"
        )
    found: list[Prompt] = []
    for one in opened:
        assert isinstance(one.load, ChatLoad)
        for number in range(len(one.source)):
            try:
                found.append(_prompt(one.load.content(one.source[number]), encoder))
            except ValueError as failure:
                raise ValueError(f"{flag}: prompt {len(found) + 1}: {failure}") from None
    return found


def _prompt(record: Mapping[str, Any], encoder: ChatEncoder) -> Prompt:
    content = read_record(_with_answer(record), encoder.columns).content
    if isinstance(content, Answers):
        content = content.paths[0]
    if isinstance(content, Conversation):
        text, ids = _asked(content, encoder.tokenizer)
    elif isinstance(content, Passage) and content.prompt:
        tokens = encoder.tokenizer.encode_passage(content._replace(completion=_ANSWER))
        text, ids = content.prompt, tokens.ids[: int((tokens.weights > 0).argmax())].tolist()
    else:
        raise SampleError("has nothing to answer; give messages, or prompt")
    encoder.check_rows(np.array(ids))
    if len(ids) >= encoder.seq_length:
        raise SampleError(
            f"is {len(ids)} tokens long, which leaves no room for an answer in --seq-length "
            f"{encoder.seq_length}; raise it or shorten the prompt"
        )
    return Prompt(text, tuple(ids))


def _with_answer(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a record with an answer, as the formats of training data demand one. A record that
    has an answer is returned as it is.
    """
    prompt = record.get("prompt")
    if isinstance(prompt, str) and "completion" not in record:
        return {**record, "completion": _ANSWER}
    if isinstance(prompt, Sequence) and "completion" not in record:
        others = {name: value for name, value in record.items() if name != "prompt"}
        return {**others, "messages": prompt}
    if "instruction" in record and not record.keys() & {"output", "response", "answer"}:
        return {**record, "output": _ANSWER}
    return record


def _asked(conversation: Conversation, tokenizer: Tokenizer) -> tuple[str, list[int]]:
    """Returns the last message, and the tokens of the prompt that the assistant answers."""
    messages = list(conversation.messages)
    if messages[-1].role == "assistant":
        messages.pop()
    if not messages:
        raise SampleError("has nothing to answer; give a user's turn")
    asked = conversation._replace(messages=[*messages, Message("assistant", _ANSWER)])
    last = only_last(asked)
    # Some templates do not write an answer behind their own generation prompt. Only a rendering of
    # the whole conversation works for them.
    is_prompted = tokenizer.contexts != "unknown"
    turn = tokenizer.encode_turns(last)[-1] if is_prompted else tokenizer.encode_chat(last)
    return messages[-1].content, turn.ids[: int((turn.weights > 0).argmax())].tolist()
