"""pure. The path of one answer of preference data, and which of its tokens count.

prompt 7 8, answer 1 2    ->    tokens 7 8 1, labels 8 1 2, of the answer 0 1 1
of a reward model         ->    tokens 7 8 1 2, scored 0 0 0 1
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.packing.batch.tree import Path
from megatron.sft.data.chat_encoder import ChatEncoder, ChatTokens
from megatron.sft.data.records.content import Conversation, Passage
from megatron.sft.data.records.messages import texts_of
from megatron.sft.data.records.values import SampleError


class Side(NamedTuple):
    """A path, and which of its labels belong to the answer."""

    path: Path
    is_answer: npt.NDArray[np.bool_]
    """[L]"""


def is_blank(path: Conversation | Passage) -> bool:
    """Returns whether the answer of a path has no text, thought, call or image. It would train the
    end of the turn alone.
    """
    if isinstance(path, Passage):
        return not path.completion.strip()
    turns = [one for one in path.messages if one.role == "assistant" and one.weight]
    has_more = any(one.images or one.fields.get("tool_calls") for one in turns)
    return bool(turns) and not has_more and not texts_of(turns)


def side_of(tokens: ChatTokens, first: int | None = None, *, trains_prompt: bool = False) -> Side:
    """Returns a path that ends with its answer's last token.

    first: number of the token from which on all count; None for those with a weight alone.
    trains_prompt: True to train all tokens of the path.
    """
    counts = tokens.weights > 0
    if first is not None and counts.any():
        counts = np.arange(len(counts)) >= first
    # What a template writes behind the answer's last token predicts nothing that counts.
    end = int(np.flatnonzero(counts)[-1]) + 1 if counts.any() else len(counts)
    is_answer = counts[1:end]
    trained = np.ones_like(is_answer) if trains_prompt else is_answer
    path = Path(tokens.ids[: end - 1], tokens.ids[1:end], trained.astype(np.float32))
    return Side(path, is_answer)


def tokens_of(path: Conversation | Passage, chat: ChatEncoder) -> ChatTokens:
    """Returns the tokens of one path, with weights on its answer.

    An answer of one turn stands behind what it is generated from. One of several turns is rendered
    once with its prompt.
    """
    if isinstance(path, Passage):
        return chat.tokenizer.encode_passage(path)
    if chat.tokenizer.contexts == "differ":
        turns = chat.tokenizer.encode_turns(path)
        if len(turns) == 1:
            return turns[0]
    return chat.tokenizer.encode_chat(path)


def rendered(path: Conversation | Passage, chat: ChatEncoder) -> ChatTokens:
    """Returns the tokens of one path in one rendering, which a reward model is given later."""
    if isinstance(path, Passage):
        return chat.tokenizer.encode_passage(path)
    return chat.tokenizer.encode_chat(path)


def scored_side(tokens: ChatTokens, pad: int) -> Side:
    """Returns a path with all tokens up to the last one that is not padding, which transformers
    scores: where padding is the end token, the one before it.

    Labels are the tokens themselves. They predict nothing, and paths that begin alike share all of
    their prompt.
    """
    real = np.flatnonzero(tokens.ids != pad)
    end = int(real[-1]) + 1 if real.size else len(tokens.ids)
    ids = tokens.ids[:end]
    is_scored = np.zeros(end, np.bool_)
    is_scored[-1] = tokens.weights.any()
    return Side(Path(ids, ids, is_scored.astype(np.float32)), is_scored)


def first_trained(tokens: ChatTokens) -> int:
    return int((tokens.weights > 0).argmax()) if tokens.weights.any() else len(tokens.ids)


def cut(side: Side, limit: int) -> Side:
    path = Path(*(values[:limit] for values in side.path))
    return Side(path, side.is_answer[:limit])


def are_same(chosen: Side, rejected: Side) -> bool:
    return np.array_equal(chosen.path.tokens, rejected.path.tokens) and np.array_equal(
        chosen.path.labels, rejected.path.labels
    )


def common(paths: Sequence[Path]) -> int:
    """Returns how many tokens, with their labels, all paths begin with."""
    if len(paths) == 1:
        return 0
    size = min(len(path.tokens) for path in paths)
    differs = np.zeros(size, np.bool_)
    for path in paths[1:]:
        differs |= path.tokens[:size] != paths[0].tokens[:size]
        differs |= path.labels[:size] != paths[0].labels[:size]
    return int(differs.argmax()) if differs.any() else size


def plain_sides(path: Conversation | Passage, chat: ChatEncoder) -> list[Side]:
    """Returns the paths of a chat to imitate: all of the assistant's turns in one rendering, or
    each behind the prompt that it is generated from where that differs.
    """
    if isinstance(path, Passage):
        tokens = [chat.tokenizer.encode_passage(path)]
    elif chat.tokenizer.contexts == "differ":
        tokens = chat.tokenizer.encode_turns(path)
    else:
        tokens = [chat.tokenizer.encode_chat(path)]
    if any(set(each.weights.tolist()) - {0.0, 1.0} for each in tokens):
        raise SampleError(
            "has turns with weights other than 0 and 1, which are not read beside pairs; give the "
            "record a weight"
        )
    return [side_of(each) for each in tokens]
