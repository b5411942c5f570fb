"""pure. The turns of a conversation as paths of a tree, each in the context that it is generated
in.

Chat templates of thinking models remove the thoughts of earlier turns when the next turn is
generated. Then one rendering of the whole conversation does not have the right context before each
turn:

    one rendering    user 1, answer 1, user 2, thoughts 2, answer 2
    turn 1           user 1, | thoughts 1, answer 1
    turn 2           user 1, answer 1, user 2, | thoughts 2, answer 2

Here each trained turn is a sequence of its own: its context, exactly the tokens of
`apply_chat_template(..., add_generation_prompt=True)` for the turns before it, then the turn
(behind the bar). Sequences are merged at their common prefixes (see `megatron.packing.batch.tree`).

    --train-turns served    each of the assistant's turns, in its own context
                  all       one rendering of the conversation, all of the assistant's turns
                  last      the assistant's last turn, in its context
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from megatron.packing.batch.layout import OverLengthPolicy
from megatron.packing.batch.tree import MergedPaths, Path, merge
from megatron.sft.data.records.content import Conversation
from megatron.sft.data.records.values import SampleError

Ids = npt.NDArray[Any]
Mask = npt.NDArray[np.float32]
Contexts = Literal["kept", "differ", "unknown"]
"""Kinds of chat templates:

kept       one rendering of the conversation has each answer behind the prompt it is generated from
differ     the prompt of some answer differs from what one rendering has before that answer
unknown    the template does not write an answer behind its own prompt, so contexts are not known
"""


class EncodedTurns(NamedTuple):
    """A conversation as merged paths, with counts of those that were too long."""

    merged: MergedPaths | None
    """None if no path is left."""
    num_over: int
    """Number of paths over the sequence length."""
    is_cut: bool
    """True if a path was truncated or dropped for its length."""


class Tokens(Protocol):
    """N tokens with weights; see `ChatTokens`, which this module cannot import."""

    @property
    def ids(self) -> npt.NDArray[np.int32]:
        """[N]"""

    @property
    def weights(self) -> npt.NDArray[np.float32]:
        """[N]"""


def only_last(conversation: Conversation) -> Conversation:
    """Returns the conversation with weight 0 on all assistant turns but the last."""
    messages = list(conversation.messages)
    last = max(
        (number for number, one in enumerate(messages) if one.role == "assistant"), default=-1
    )
    return conversation._replace(
        messages=[
            one if number == last or one.role != "assistant" else one._replace(weight=0.0)
            for number, one in enumerate(messages)
        ]
    )


def within(
    ids: Ids, loss_mask: Mask, seq_length: int, policy: OverLengthPolicy, what: str
) -> tuple[Ids, Mask] | None:
    """Returns ids [L + 1] and their loss mask [L], with L at most `seq_length`; None if `policy` is
    "drop" and L is larger.

    what: first words of the error, "sample is".
    """
    if len(loss_mask) <= seq_length:
        return ids, loss_mask
    if policy == "error":
        raise SampleError(
            f"{what} {len(loss_mask)} tokens long, but --seq-length is {seq_length}; raise it or "
            "pass --over-length-policy truncate|drop"
        )
    if policy == "drop":
        return None
    # Copies: a view would keep the whole array in memory.
    return ids[: seq_length + 1].copy(), loss_mask[:seq_length].copy()


def merged_turns(
    turns: Sequence[Tokens], weight: float, seq_length: int, policy: OverLengthPolicy
) -> EncodedTurns:
    """Returns the paths of the turns, merged. Each path over `seq_length` is truncated or dropped
    by itself; with the policy "error" it raises SampleError.

    weight: factor of the loss of all paths, that of the record.
    """
    paths: list[Path] = []
    num_over, is_cut = 0, False
    for turn in turns:
        ids, loss_mask = turn.ids, turn.weights[1:] * np.float32(weight)
        if len(loss_mask) > seq_length and loss_mask.any():
            num_over, is_cut = num_over + 1, True
            kept = within(ids, loss_mask, seq_length, policy, "a turn and what it follows are")
            if kept is None:
                continue
            ids, loss_mask = kept
        if loss_mask.any():
            paths.append(Path(ids[:-1], ids[1:], loss_mask))
    return EncodedTurns(merge(paths) if paths else None, num_over, is_cut)
