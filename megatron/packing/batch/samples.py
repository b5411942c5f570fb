"""pure. The sequences that one rank holds, as flat arrays; also as they travel.

Nothing here is done sequence by sequence. Nearly always the labels are the next tokens, the mask is one weight or zero
in each sequence, and positions count from zero: then none of the three is kept, and a token takes 5 bytes (its id and
one flag) in memory and on the wire. `form` says which of the three are kept in full.

    [7 8 9] [5 6]    tokens   7 8 9 5 6     lengths      3 2
                     flags    0 1 1 1 0     last_labels  2 4     labels would be 8 9 2 6 4
                                            weights      1 .5    the mask would be 0 1 1 .5 0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

LABELS, MASK, POSITIONS = 1, 2, 4
"""Bits of a form: what is kept in full."""


class Fields(NamedTuple):
    """What a model is trained on, in full; one entry per token each."""

    tokens: npt.NDArray[np.int32]
    labels: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.float32]
    position_ids: npt.NDArray[np.int32]


@dataclass(frozen=True, kw_only=True, eq=False)
class Samples:
    """n sequences of T tokens in all, one after the other, without padding."""

    lengths: IntArray
    """int64 [n]"""
    sources: npt.NDArray[np.int32]
    """int32 [n]: a number of the user's, by which losses may be told apart."""
    tokens: npt.NDArray[np.int32]
    """int32 [T]"""
    last_labels: npt.NDArray[np.int32]
    """int32 [n]: the label of each sequence's last token."""
    weights: npt.NDArray[np.float32]
    """float32 [n]: of the tokens that count, in the loss's sum."""
    flags: npt.NDArray[np.uint8]
    """uint8 [T]: 1 where a token's label counts."""
    labels: npt.NDArray[np.int32] | None = None
    """int32 [T], where they are not the next tokens."""
    loss_mask: npt.NDArray[np.float32] | None = None
    """float32 [T], where a sequence has several weights."""
    position_ids: npt.NDArray[np.int32] | None = None
    """int32 [T], where they do not count from zero."""

    @classmethod
    def none(cls) -> Samples:
        """Return no sequences at all."""
        ids = np.empty(0, np.int32)
        return cls(
            lengths=np.empty(0, np.int64),
            sources=ids,
            tokens=ids,
            last_labels=ids,
            weights=np.empty(0, np.float32),
            flags=np.empty(0, np.uint8),
        )

    @classmethod
    def of(
        cls,
        lengths: IntArray,
        sources: npt.NDArray[np.int32],
        tokens: npt.NDArray[Any],
        labels: npt.NDArray[Any],
        loss_mask: npt.NDArray[np.float32],
        position_ids: npt.NDArray[Any] | None = None,
    ) -> Samples:
        """Return the sequences in the smallest form that holds all of them.

        Ids are integers of any type, one entry per token each; position_ids None: they count from zero.
        """
        if not lengths.size:
            return cls.none()
        ends = np.cumsum(lengths)
        tokens, labels = (ids.astype(np.int32, copy=False) for ids in (tokens, labels))
        if position_ids is not None and np.array_equal(position_ids, counted(lengths)):
            position_ids = None
        last_labels = labels[ends - 1]
        flags = loss_mask != 0
        weights = np.ones(lengths.size, np.float32)
        is_weighted = not np.array_equal(loss_mask, flags)
        if is_weighted:
            weights = np.maximum.reduceat(loss_mask, ends - lengths)
            is_weighted = not np.array_equal(loss_mask, flags * np.repeat(weights, lengths))
        return cls(
            lengths=lengths,
            sources=sources,
            tokens=tokens,
            last_labels=last_labels,
            weights=weights,
            flags=flags.view(np.uint8),
            labels=None if _are_next_tokens(labels, tokens, ends) else labels,
            loss_mask=loss_mask if is_weighted else None,
            position_ids=None if position_ids is None else position_ids.astype(np.int32),
        )

    @property
    def form(self) -> int:
        """What is kept in full: a sum of LABELS, MASK and POSITIONS."""
        kept = ((self.labels, LABELS), (self.loss_mask, MASK), (self.position_ids, POSITIONS))
        return sum(bit for field, bit in kept if field is not None)

    @property
    def num_loss_tokens(self) -> IntArray:
        """int64 [n]: how many tokens of each sequence count."""
        if not self.lengths.size:
            return np.empty(0, np.int64)
        return np.add.reduceat(self.flags, np.cumsum(self.lengths) - self.lengths, dtype=np.int64)

    def fields(self) -> Fields:
        """Return all of it in full."""
        full = self.in_form(LABELS | MASK | POSITIONS)
        assert full.labels is not None
        assert full.loss_mask is not None
        assert full.position_ids is not None
        return Fields(full.tokens, full.labels, full.loss_mask, full.position_ids)

    def in_form(self, form: int) -> Samples:
        """Return the same sequences with at least what `form` says kept in full."""
        labels, loss_mask, position_ids = self.labels, self.loss_mask, self.position_ids
        if form & LABELS and labels is None:
            labels = next_tokens(self.tokens, self.last_labels, np.cumsum(self.lengths))
        if form & MASK and loss_mask is None:
            loss_mask = np.repeat(self.weights, self.lengths)
            loss_mask *= self.flags
        if form & POSITIONS and position_ids is None:
            position_ids = counted(self.lengths)
        return replace(self, labels=labels, loss_mask=loss_mask, position_ids=position_ids)

    def take(self, ids: IntArray) -> Samples:
        """Return the sequences of these numbers, in this order."""
        if np.array_equal(ids, np.arange(self.lengths.size)):
            return self
        starts = np.cumsum(self.lengths) - self.lengths
        return self._gathered(ids, spread(starts[ids], self.lengths[ids]))

    def first(self, limit: int) -> Samples:
        """Return all sequences, each cut after `limit` tokens."""
        lengths = np.minimum(self.lengths, limit)
        starts, ends = np.cumsum(self.lengths) - self.lengths, np.cumsum(lengths)
        index = spread(starts, lengths)
        labels = self.in_form(LABELS).labels
        assert labels is not None
        cut = self._gathered(np.arange(lengths.size), index)
        return replace(cut, lengths=lengths, last_labels=labels[index[ends - 1]] if lengths.size else cut.last_labels)

    def split(self, counts: IntArray) -> list[Samples]:
        """Return the first counts[0] sequences, the next counts[1] ..., as views."""
        ends = np.cumsum(counts)[:-1]
        token_ends = np.concatenate(([0], np.cumsum(self.lengths)))[ends]
        per_token = ("tokens", "flags", "labels", "loss_mask", "position_ids")
        columns = {
            name: np.split(values, token_ends if name in per_token else ends)
            for name in self.__dataclass_fields__
            if (values := getattr(self, name)) is not None
        }
        return [Samples(**{name: parts[i] for name, parts in columns.items()}) for i in range(len(counts))]

    def _gathered(self, ids: IntArray, index: IntArray) -> Samples:
        return Samples(
            lengths=self.lengths[ids],
            sources=self.sources[ids],
            tokens=self.tokens[index],
            last_labels=self.last_labels[ids],
            weights=self.weights[ids],
            flags=self.flags[index],
            labels=None if self.labels is None else self.labels[index],
            loss_mask=None if self.loss_mask is None else self.loss_mask[index],
            position_ids=None if self.position_ids is None else self.position_ids[index],
        )

    def to_words(self) -> npt.NDArray[np.int32]:
        """Return everything but the lengths as int32 [num_words(n, T, form)]."""
        parts = [self.sources, self.last_labels, self.tokens]
        parts += [ids for ids in (self.labels, self.position_ids) if ids is not None]
        if self.loss_mask is not None:
            parts.append(self.loss_mask.view(np.int32))
        else:
            padded = np.zeros(-(-self.flags.size // 4) * 4, np.uint8)
            padded[: self.flags.size] = self.flags
            parts += [self.weights.view(np.int32), padded.view(np.int32)]
        return np.concatenate(parts)

    @classmethod
    def from_words(cls, words: npt.NDArray[np.int32], lengths: IntArray, form: int) -> Samples:
        """Return what `to_words` was called on; views of `words` where they can be."""
        num_sequences, num_tokens = lengths.size, int(lengths.sum())
        sizes = [num_sequences, num_sequences, num_tokens]
        sizes += [num_tokens] * bool(form & LABELS) + [num_tokens] * bool(form & POSITIONS)
        sources, last_labels, tokens, *others = np.split(words, np.cumsum(sizes))
        loss_mask = others[-1].view(np.float32) if form & MASK else None
        if loss_mask is not None:
            weights, flags = np.ones(num_sequences, np.float32), (loss_mask != 0).view(np.uint8)
        else:
            weights = others[-1][:num_sequences].view(np.float32)
            flags = others[-1][num_sequences:].view(np.uint8)[:num_tokens]
        return cls(
            lengths=lengths,
            sources=sources,
            tokens=tokens,
            last_labels=last_labels,
            weights=weights,
            flags=flags,
            labels=others[0] if form & LABELS else None,
            loss_mask=loss_mask,
            position_ids=others[-2] if form & POSITIONS else None,
        )


def num_words(num_sequences: int, num_tokens: int, form: int) -> int:
    """Return how many int32 words `Samples.to_words` makes of so many sequences and tokens."""
    kept = 1 + bool(form & LABELS) + bool(form & POSITIONS)
    mask = num_tokens if form & MASK else num_sequences - (-num_tokens // 4)
    return 2 * num_sequences + kept * num_tokens + mask


def joined(parts: Sequence[Samples]) -> Samples:
    """Return all sequences, one part after the other, in the smallest form that holds all of them."""
    parts = [part for part in parts if part.lengths.size]
    if len(parts) < 2:
        return parts[0] if parts else Samples.none()
    form = reduce(or_, (part.form for part in parts))
    parts = [part.in_form(form) for part in parts]
    columns = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in Samples.__dataclass_fields__
        if getattr(parts[0], name) is not None
    }
    return Samples(**columns)


def spread(starts: IntArray, lengths: IntArray) -> npt.NDArray[np.int64]:
    """Return start, start + 1, ... for each length, at least 1: [5, 0], [2, 3] -> [5, 6, 0, 1, 2]."""
    ends = np.cumsum(lengths)
    steps = np.ones(ends[-1] if ends.size else 0, np.int64)
    steps[ends[:-1]] = starts[1:] - starts[:-1] - lengths[:-1] + 1
    steps[:1] = starts[:1]
    return np.cumsum(steps, out=steps)


def counted(lengths: IntArray) -> npt.NDArray[np.int32]:
    """Return positions that count from zero, lengths at least 1: [2, 3] -> [0, 1, 0, 1, 2]."""
    ends = np.cumsum(lengths)
    steps = np.ones(ends[-1] if ends.size else 0, np.int32)
    steps[ends[:-1]] = 1 - lengths[:-1]
    steps[:1] = 0
    return np.cumsum(steps, out=steps)


def next_tokens(
    tokens: npt.NDArray[np.int32], last_labels: npt.NDArray[np.int32], ends: IntArray
) -> npt.NDArray[np.int32]:
    """Return the tokens that follow, in sequences that end at `ends` with `last_labels`."""
    labels = np.empty_like(tokens)
    labels[:-1] = tokens[1:]
    labels[ends - 1] = last_labels
    return labels


def _are_next_tokens(labels: npt.NDArray[np.int32], tokens: npt.NDArray[np.int32], ends: IntArray) -> bool:
    """Whether that is so but at the ends, which are kept in any case."""
    differ = labels[:-1] != tokens[1:]
    differ[ends[:-1] - 1] = False
    return not differ.any()
