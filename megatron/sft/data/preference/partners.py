"""pure. Gives each marked answer a second one, of another prompt, for KTO's divergence.

KTO compares policy and reference on answers that do not belong to their prompts: the answer of the
record before, in the order of the data, turned round within a global batch. So no layout and no
packing changes it.

    global batch of 4, positions    4  5  6  7
    answer of the record at         7  4  5  6

The second answer is a branch of the record's tree, of rank 1. It never counts in the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from megatron.blending.streams.node import Ints, Plan, PlanBatch, SavableDataset
from megatron.packing.batch.paths import merge_with_fields
from megatron.packing.batch.tree import MergedPaths, Path
from megatron.sft.data.chat_encoder import EncodedSample
from megatron.sft.data.preference.encode import (
    ANSWER_TOKENS,
    GOOD,
    PLAIN,
    RANK,
    REFERENCE,
    WEIGHT,
)

Made = tuple[int, EncodedSample]


class PartnersDataset(SavableDataset[Made]):
    """Each sample of the child, with the answer of the one before it in the global batch. A chat to
    imitate has no second answer, and gives none.
    """

    preserves_outputs = True

    def __init__(self, dataset: SavableDataset[Any], global_batch_size: int, limit: int) -> None:
        """limit: most tokens of a path."""
        self.children = (dataset,)
        self.size = dataset.size
        self.continues_across_epochs = dataset.continues_across_epochs
        self.batch, self.limit = global_batch_size, limit

    def plan(self, positions: Ints, plan_batch: PlanBatch) -> Plan:
        begins = positions // self.batch * self.batch
        partners = begins + (positions - begins - 1) % self.batch
        both = np.concatenate((positions, partners))
        return _Plan(len(positions), self.children[0].plan(both, plan_batch), self.limit)


class _Plan:
    """Plan of some positions, and behind them of their partners."""

    def __init__(self, length: int, child: Plan, limit: int) -> None:
        self.length = length
        self._child, self._limit = child, limit

    def values(self, start: int, end: int) -> list[Any]:
        own = self._child.values(start, end)
        # A partner that makes no sample is reported at its own position.
        others = [self._partner(index) for index in range(start, end)]
        with_other = partial(with_answer_of, limit=self._limit)
        return [
            (one[0], with_other(one[1], other[1])) if _is_made(one) and _is_made(other) else one
            for one, other in zip(own, others)
        ]

    def _partner(self, index: int) -> Any:
        try:
            return self._child.values(self.length + index, self.length + index + 1)[0]
        except Exception:
            return None

    def entries(self, start: int, end: int) -> list[tuple[Any, int]]:
        return self._child.entries(start, end)


def with_partners_in_order(samples: Sequence[EncodedSample], limit: int) -> list[EncodedSample]:
    """Returns samples as a step with all of them has them: each with the answer of the one before.

    limit: most tokens of a path.
    """
    marked = [number for number, one in enumerate(samples) if one.fields[RANK][0] != PLAIN]
    found = list(samples)
    for place, number in enumerate(marked):
        found[number] = with_answer_of(samples[number], samples[marked[place - 1]], limit)
    return found


def _is_made(value: Any) -> bool:
    is_made = type(value) is tuple and len(value) == 2 and isinstance(value[1], EncodedSample)
    return is_made and value[1].fields[RANK][0] != PLAIN


def with_answer_of(own: EncodedSample, other: EncodedSample, limit: int) -> EncodedSample:
    """Returns a sample of one path with the answer of another one as a second path, cut to `limit`
    tokens. Of two copies of one record, and of a prompt that fills all, there is no second path.
    """
    if np.array_equal(own.tokens, other.tokens) and np.array_equal(own.labels, other.labels):
        return own
    first, start = (int((one.loss_mask != 0).argmax()) for one in (own, other))
    # Tokens of the prompt stand at 0 to first, as the label at `first` is the answer's first one.
    answer = other.labels[start:]
    ids = np.concatenate((own.tokens[: first + 1], answer))[: limit + 1]
    mask = np.concatenate((own.loss_mask[:first] * 0, np.ones(len(ids) - 1 - first, np.float32)))
    if len(ids) < first + 2:
        return own
    paths = [
        Path(own.tokens, own.labels, own.loss_mask),
        Path(ids[:-1], ids[1:], mask.astype(np.float32)),
    ]
    columns = {name: own.fields[name] for name in (WEIGHT, GOOD)}
    fields = {name.removeprefix("path_"): np.repeat(rows, 2) for name, rows in columns.items()}
    counts = [int(own.fields[ANSWER_TOKENS][0]), int(np.count_nonzero(mask))]
    if REFERENCE in own.fields:
        raise ValueError("--reference-file has no log-probabilities of answers to other prompts")
    merged = merge_with_fields(
        paths,
        **fields,
        rank=np.arange(2, dtype=np.int32),
        answer_tokens=np.array(counts, np.int32),
    )
    tree = MergedPaths(*(merged.pop(name) for name in MergedPaths._fields))
    return replace(
        own,
        tokens=tree.tokens.astype(np.int32),
        labels=tree.labels.astype(np.int32),
        loss_mask=tree.loss_mask,
        tree=tree,
        fields=merged,
    )
