"""pure. A conversation's turns, each in the context in which it is generated: paths of a tree.

Templates of models that think leave out the thoughts of earlier turns when the next one is
generated. So a turn's context is not what one rendering of the whole conversation has before it.
Here each trained turn is a sequence: what `apply_chat_template(..., add_generation_prompt=True)`
gives for the turns before it, to the token, and the answer behind it. Sequences are merged where
they share a prefix (see `megatron.packing.batch.tree`).

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
from megatron.sft.data.records.messages import SampleError

Ids = npt.NDArray[Any]
Mask = npt.NDArray[np.float32]
Contexts = Literal["kept", "differ", "unknown"]
"""Kinds of templates: one rendering has each answer behind what it is generated from; the contexts
are others than in one rendering; they are not to be had, as an answer is not written behind its
prompt.
"""


class EncodedTurns(NamedTuple):
    """A conversation as merged paths, and what became of over-long ones."""

    merged: MergedPaths | None
    """None where no path is left."""
    num_over: int
    is_cut: bool
    """True if a path was truncated, or left out for its length."""


class Tokens(Protocol):
    """N tokens, as `ChatTokens`."""

    @property
    def ids(self) -> npt.NDArray[np.int32]:
        """[N]"""

    @property
    def weights(self) -> npt.NDArray[np.float32]:
        """[N]"""


def only_last(conversation: Conversation) -> Conversation:
    """Returns the conversation of which only the assistant's last turn is trained."""
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
    """Returns [L + 1] ids and their mask [L], of at most `seq_length` tokens; None where `policy`
    drops them.

    what: begins the error, "sample is".
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
    # Copies, as views would keep all that is truncated.
    return ids[: seq_length + 1].copy(), loss_mask[:seq_length].copy()


def merged_turns(
    turns: Sequence[Tokens], weight: float, seq_length: int, policy: OverLengthPolicy
) -> EncodedTurns:
    """Returns turns as paths, merged; each path over `seq_length` is treated by `policy` alone.

    Args:
        weight: of the record.
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
