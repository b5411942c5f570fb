"""pure. Turns a record of preference data into one tree: the prompt once, its answers as branches.

    prompt 7 8, answers 1 2 and 3 2     ->      tokens 7 8 | 1 | 8 3, of paths 0 and 1

A pair cannot be torn. Its paths have one root, and the tree fits into a pack: what is longer is cut
or dropped as --over-length-policy says, both answers alike, and counted. Of several rejected
answers, one that is empty or that equals the chosen one is dropped alone, and counted.

The fields of a tree have a row per path: its place among the record's answers (`path_rank`, 0 for
the chosen one), its weight and its number of answer tokens; the stream adds the position of the
record in the data, which is the pair's id (`path_position`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from megatron.packing.batch.paths import merge_with_fields
from megatron.packing.batch.tree import MergedPaths, Path, TreeError
from megatron.sft.data.chat_encoder import (
    ChatEncoder,
    ChatTokens,
    Dropped,
    DropReason,
    EncodedSample,
)
from megatron.sft.data.preference.records import (
    Preference,
    PreferenceReading,
    read_preference,
)
from megatron.sft.data.preference.score_file import key_of
from megatron.sft.data.preference.sides import (
    Side,
    are_same,
    common,
    cut,
    first_trained,
    is_blank,
    plain_sides,
    rendered,
    scored_side,
    side_of,
    tokens_of,
)
from megatron.sft.data.records.content import Answers, Conversation, Passage
from megatron.sft.data.records.formats import Reading
from megatron.sft.data.records.turns import within
from megatron.sft.data.records.values import SampleError

RANK, WEIGHT, GOOD = "path_rank", "path_weight", "path_good"
ANSWER_TOKENS, HEAD_TOKENS = "path_answer_tokens", "path_head_tokens"
REFERENCE, REFERENCE_HEAD = "path_reference", "path_reference_head"
MARGIN = "path_margin"
PLAIN = -1
"""Rank of the paths of a chat to imitate, which are no answers to compare."""
ANSWER_INDEX = "answer_index"
KEYS = ("path_key_low", "path_key_high", "path_head_key_low", "path_head_key_high")
"""Keys of `score_file`, in what `megatron-sft score` reads: of the answer, and of its head."""
MAX_KEYS_PER_TOKEN = 8
"""Keys that attention may gather per token of a tree in any layout, before it cuts the tree."""
_NO_INDEX = -1
_OF_ONE_PAIR: Mapping[str, DropReason] = {
    "empty answer": "empty answer in one of several pairs",
    "equal answers": "equal answers in one of several pairs",
}
"""Reason why a record is dropped -> reason why one of its pairs is."""
_Answer = TypeVar("_Answer")


class Lookup(Protocol):
    """Log-probabilities of paths under the reference (`score_file.ScoreFile`)."""

    def of(self, path: Path, is_answer: npt.NDArray[np.bool_]) -> float:
        """Returns the sum over the answer's tokens. Raises SampleError if it is not known."""

    def head(self, path: Path, is_answer: npt.NDArray[np.bool_], count: int) -> float:
        """Returns the sum over the first `count` of them."""


@dataclass(frozen=True, kw_only=True)
class PairEncoder:
    """Turns records into trees; see `encode`."""

    is_marked: bool = False
    """True for answers that are marked as good or bad (KTO); False for pairs."""
    answer_tokens: Literal["turn", "trl"] = "turn"
    trains_prompt: bool = False
    """True if the loss has the cross entropy of the prompt, too (ORPO)."""
    has_head: bool = False
    """True if tokens behind the length of the shorter answer count apart (--ld-alpha)."""
    capacity: int | None = None
    """Tokens of a pack; None for no limit."""
    unit: int = 1
    """Tokens to whose multiple each node is padded."""
    scores: Lookup | None = None
    """Log-probabilities of the reference, by the tokens of a path."""
    has_keys: bool = False
    """True to give each path the key of its log-probability."""
    scores_last: bool = False
    """True if the last token of each path is scored (reward models), which then alone counts."""
    takes_plain: bool = False
    """True to take chats to imitate among the records (--sft-weight)."""

    def read(self, record: Mapping[str, Any], columns: Mapping[str, str]) -> Reading:
        """Returns the content of a record."""
        content, weight, unread = self._read(record, columns)
        return Reading(Answers(content.paths, [1.0] * len(content.paths)), weight, unread)

    def encode(
        self, chat: ChatEncoder, record: Mapping[str, Any], weight: float
    ) -> EncodedSample | Dropped:
        """Returns the tree of a record's answers, each of which counts `weight` times the record's
        weight in the loss.
        """
        content, own_weight, unread = self._read(record, chat.columns)
        chat.log_unread(unread)
        dropped: list[DropReason] = []
        sides = self._sides_left(content, chat, dropped)
        if isinstance(sides, Dropped):
            return sides
        cut_sides = self._within(list(sides.values()), chat)
        if isinstance(cut_sides, Dropped):
            return cut_sides
        is_cut = any(len(a.is_answer) < len(b.is_answer) for a, b in zip(cut_sides, sides.values()))
        sides = dict(zip(sides, cut_sides))
        if is_cut and not content.is_plain:  # a cut can make answers equal
            unequal = self._unequal(sides, dropped)
            if isinstance(unequal, Dropped):
                return unequal
            sides = unequal
        sample = self._merged(sides, chat, weight * own_weight, content, is_cut)
        return replace(sample, dropped=tuple(dropped)) if dropped else sample

    def _read(self, record: Mapping[str, Any], columns: Mapping[str, str]) -> PreferenceReading:
        return read_preference(
            record,
            columns,
            is_marked=self.is_marked,
            has_margin=self.scores_last,
            takes_plain=self.takes_plain,
        )

    def _sides_left(
        self, content: Preference, chat: ChatEncoder, dropped: list[DropReason]
    ) -> dict[int, Side] | Dropped:
        """Returns the answers that can be compared, by rank; of a chat to imitate its turns.
        Reasons of those dropped alone are added to `dropped`.
        """
        if content.is_plain:
            turns = plain_sides(content.paths[0], chat)
            counted = dict(enumerate(side for side in turns if side.is_answer.any()))
            return counted or Dropped("no loss token")
        paths = dict(enumerate(content.paths))
        blank = {rank for rank, path in paths.items() if is_blank(path)}
        left = self._without(blank, paths, "empty answer", dropped)
        if isinstance(left, Dropped):
            return left
        sides = dict(zip(left, self._sides_of(list(left.values()), chat)))
        empty = {rank for rank, side in sides.items() if not side.is_answer.any()}
        counted_sides = self._without(empty, sides, "empty answer", dropped)
        if isinstance(counted_sides, Dropped):
            return counted_sides
        return self._unequal(counted_sides, dropped)

    def _unequal(
        self, sides: dict[int, Side], dropped: list[DropReason]
    ) -> dict[int, Side] | Dropped:
        """Returns the answers without those that equal the chosen one."""
        equal = {rank for rank, side in sides.items() if rank and are_same(sides[0], side)}
        return self._without(equal, sides, "equal answers", dropped)

    def _without(
        self,
        ranks: set[int],
        answers: dict[int, _Answer],
        reason: Literal["empty answer", "equal answers"],
        dropped: list[DropReason],
    ) -> dict[int, _Answer] | Dropped:
        """Returns the answers of other ranks; `Dropped` if there is nothing to compare then."""
        left = {rank: answer for rank, answer in answers.items() if rank not in ranks}
        if 0 not in left or (len(left) == 1 and not self.is_marked):
            return Dropped(reason)
        dropped += [_OF_ONE_PAIR[reason]] * len(ranks)
        return left

    def _sides_of(self, paths: Sequence[Conversation | Passage], chat: ChatEncoder) -> list[Side]:
        if self.scores_last:
            return [scored_side(rendered(path, chat), chat.tokenizer.pad) for path in paths]
        return self._sides([tokens_of(path, chat) for path in paths])

    def _sides(self, tokens: Sequence[ChatTokens]) -> list[Side]:
        first = None
        if self.answer_tokens == "trl":  # all behind the prompt, also the user's later turns
            first = min(first_trained(each) for each in tokens)
        return [side_of(each, first, trains_prompt=self.trains_prompt) for each in tokens]

    def _within(self, sides: Sequence[Side], chat: ChatEncoder) -> list[Side] | Dropped:
        """Returns the paths, within --seq-length and together within a pack, or why not."""
        limit, policy = chat.seq_length, chat.over_length_policy
        longest = max(len(side.is_answer) for side in sides)
        if longest > limit:
            ids = np.zeros(longest + 1, np.int32)  # for the error alone
            mask = np.zeros(longest, np.float32)
            if within(ids, mask, limit, policy, "an answer and its prompt are") is None:
                return Dropped("over length")
        while True:
            kept = [cut(side, limit) for side in sides]
            if not all(side.is_answer.any() for side in kept):
                return Dropped("no loss token left after truncation")
            over = self._num_over(kept)
            if over <= 0:
                return kept
            if policy == "error":
                raise SampleError(
                    f"the prompt and its {len(sides)} answers are {over} tokens more than a pack "
                    "holds; raise --max-seqlen-per-dp-cp-rank, or pass --over-length-policy "
                    "truncate|drop"
                )
            if policy == "drop":
                return Dropped("over length")
            # All answers are cut alike: the longest give way first.
            limit = max(len(side.is_answer) for side in kept) - max(1, over // len(sides))

    def _num_over(self, sides: Sequence[Side]) -> int:
        """Returns how many tokens the paths together have over a pack's capacity, padding included;
        at most 0 if they fit.
        """
        if self.capacity is None:
            return 0
        shared = common([side.path for side in sides])
        lengths = [shared, *(len(side.is_answer) - shared for side in sides)]
        return sum(-(-length // self.unit) * self.unit for length in lengths) - self.capacity

    def _merged(
        self,
        sides_by_rank: Mapping[int, Side],
        chat: ChatEncoder,
        weight: float,
        content: Preference,
        is_cut: bool,
    ) -> EncodedSample:
        sides = list(sides_by_rank.values())
        try:
            fields = merge_with_fields(
                [side.path for side in sides], **self._fields(sides_by_rank, weight, content)
            )
        except TreeError:
            raise SampleError(
                "has a prompt of less than two tokens, so that its answers have no common "
                "beginning to be compared behind; give a longer prompt"
            ) from None
        tree = MergedPaths(*(fields.pop(name) for name in MergedPaths._fields))
        order = fields.pop("path_number")
        if self.trains_prompt or self.has_head:
            fields[ANSWER_INDEX] = _answer_index(tree, fields["first_path"], sides, order)
        _check_keys(tree, len(sides))
        chat.check_rows(tree.tokens)
        chat.check_rows(tree.labels)
        return EncodedSample(
            tree.tokens.astype(np.int32),
            tree.labels.astype(np.int32),
            tree.loss_mask,
            is_cut,
            tree,
            fields,
        )

    def _fields(
        self, sides_by_rank: Mapping[int, Side], weight: float, content: Preference
    ) -> dict[str, npt.NDArray[Any]]:
        """Returns the fields per path, without their prefix, in the order of the sides."""
        ranks, sides = list(sides_by_rank), list(sides_by_rank.values())
        counts = np.array([np.count_nonzero(side.is_answer) for side in sides], np.int32)
        if self.scores_last:  # tokens of each branch, though one alone is scored
            shared = common([side.path for side in sides])
            counts = np.array([len(side.is_answer) - shared for side in sides], np.int32)
        fields: dict[str, npt.NDArray[Any]] = {
            "number": np.arange(len(sides)),
            "rank": np.full(len(sides), PLAIN, np.int32)
            if content.is_plain
            else np.array(ranks, np.int32),
            "weight": np.full(len(sides), weight, np.float32),
            "answer_tokens": counts,
        }
        if self.is_marked:
            fields["good"] = np.full(len(sides), bool(content.is_good), np.int32)
        if self.scores_last:
            fields["margin"] = np.array([0.0, *content.margins], np.float64)[ranks]
        if self.has_head:
            if len(sides) != 2 and not content.is_plain:
                raise SampleError(
                    "has several rejected answers, which --ld-alpha does not take; give each pair "
                    "as a record"
                )
            fields["head_tokens"] = np.full(len(sides), counts.min(), np.int32)
        if self.has_keys:
            keys = [key_of(*side) for side in sides]
            heads_of = [key.of_head(int(counts.min())) for key in keys]
            for name, of_sides in (("key", keys), ("head_key", heads_of)):
                fields[f"{name}_low"], fields[f"{name}_high"] = np.array(of_sides, np.int64).T
        if self.scores is not None:
            # Chats to imitate are not compared.
            known = [] if content.is_plain else sides
            totals, heads = np.zeros((2, len(sides)))
            totals[: len(known)] = [self.scores.of(*side) for side in known]
            fields["reference"] = totals
            if self.has_head:
                least = int(counts.min())
                heads[: len(known)] = [self.scores.head(*side, least) for side in known]
                fields["reference_head"] = heads
        return fields


def _answer_index(
    tree: MergedPaths,
    first_path: npt.NDArray[np.int32],
    sides: Sequence[Side],
    order: npt.NDArray[Any],
) -> npt.NDArray[np.int32]:
    """Returns for each token how many of its path's answer come before it; -1 where its label is
    not of the answer. It is one number although paths share tokens, as they share all before.

    order: number of the side that each path of the tree is.
    """
    of_sides = [
        np.where(side.is_answer, np.cumsum(side.is_answer) - 1, _NO_INDEX) for side in sides
    ]
    index = np.empty(tree.tokens.size, np.int32)
    ends: list[int] = []
    for start, stop, parent in zip(
        tree.cu_seqlens[:-1].tolist(), tree.cu_seqlens[1:].tolist(), tree.parents.tolist()
    ):
        depth = ends[parent] if parent >= 0 else 0
        ends.append(depth + stop - start)
        firsts = first_path[start:stop]
        for first in np.unique(firsts):  # several where paths end within a node
            values = of_sides[order[first]][depth : depth + stop - start]
            own = np.flatnonzero(firsts == first)
            index[start + own] = values[own]
    return index


def _check_keys(tree: MergedPaths, num_paths: int) -> None:
    """Raises SampleError for a tree that some layouts would cut: its keys take much memory."""
    if num_paths < 3:
        return
    lengths = np.diff(tree.cu_seqlens).tolist()
    ends: list[int] = []
    for length, parent in zip(lengths, tree.parents.tolist()):
        ends.append(length + (ends[parent] if parent >= 0 else 0))
    if sum(ends) > MAX_KEYS_PER_TOKEN * tree.tokens.size:
        raise SampleError(
            f"has {num_paths} answers, so short beside their prompt that attention would gather "
            f"more than {MAX_KEYS_PER_TOKEN} keys per token; give each pair as a record"
        )
