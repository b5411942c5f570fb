"""A preference loss of trees trains like one of sequences: answers to a prompt compared by their
log-probabilities, each computed alone for the reference.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from megatron.core import parallel_state
from torch import Tensor
from torch.nn.functional import logsigmoid

from megatron.packing.batch.paths import merge_with_fields
from megatron.packing.batch.tree import Path
from megatron.packing.model.get_batch import Batch, get_batch_on_this_rank_for_sequence_packing
from megatron.packing.model.path_log_probs import path_log_probs
from tests.functional_tests.layouts import MODELS, Layout
from tests.functional_tests.oracle import (
    VOCAB_SIZE,
    Sample,
    assemble,
    assert_same,
    train_one_by_one,
    train_packed,
)
from tests.functional_tests.ranks import run_ranks

BETA = 0.3
LAYOUTS = [Layout(tensor=2, sequence=True, pipeline=2, context=2, model="grouped")]
if os.environ.get("LAYOUTS") == "all":
    LAYOUTS += [
        Layout(model="learned"),
        Layout(context=3, data=2, model="tied", scheduler="dp_balanced"),
        Layout(pipeline=2, interleaved=True, data=2, model="tied", optimizer="sharded"),
        Layout(context=2, data=2, model="experts"),
        Layout(tensor=2, context=2, data=2, model="grouped", optimizer="overlapped"),
    ]


class Pair(NamedTuple):
    """Two answers to a prompt, the better one first, and their log-probabilities elsewhere."""

    paths: list[Sample]
    reference: list[float]

    def fields(self) -> dict[str, Any]:
        """As an iterator gives it; the order of paths is the tree's."""
        paths = [Path(one.tokens, one.labels, one.loss_mask) for one in self.paths]
        return merge_with_fields(paths, sign=[1.0, -1.0], reference=self.reference)


def pairs(random: np.random.Generator, count: int) -> list[Pair]:
    """Answers that begin alike, one of which the other continues at times."""

    def some(low: int, high: int) -> list[int]:
        return random.integers(0, VOCAB_SIZE, random.integers(low, high)).tolist()

    made = []
    for number in range(count):
        prompt, shared = some(2, 9), some(0, 5)
        paths = []
        for answer in (some(1, 9), some(0 if number % 3 == 0 else 1, 9)):
            ids = np.array([*prompt, *shared, *answer, 0])
            mask = (np.arange(1, ids.size) >= len(prompt)).astype(np.float32)
            paths.append(Sample(ids[:-1], ids[1:], mask, np.arange(ids.size - 1)))
        if number % 2:
            paths.reverse()
        made.append(Pair(paths, random.normal(-20, 5, 2).tolist()))
    return made


def preference_loss(log_probs: Tensor, reference: Tensor, signs: Tensor) -> Tensor:
    """Sum over pairs, whose paths are neighbours (DPO, arXiv 2305.18290, equation 7)."""
    margins = (signs * (log_probs - reference)).view(-1, 2).sum(1)
    return -logsigmoid(BETA * margins).sum()


def each_alone(batch: Sequence[Pair], losses_of: Callable[[Sample], Tensor]) -> Iterator[Tensor]:
    """The objective of the reference."""
    for pair in batch:
        sums = [
            -(losses_of(one)[0] * torch.from_numpy(one.loss_mask != 0)).sum() for one in pair.paths
        ]
        rows = torch.stack(sums), torch.tensor(pair.reference), torch.tensor([1.0, -1.0])
        yield preference_loss(*rows) / len(batch)


def step(data_iterator: Iterator[Any], model: Any) -> tuple[Tensor, Any]:
    batch = get_batch_on_this_rank_for_sequence_packing(
        data_iterator,
        vpp_size=model.config.virtual_pipeline_model_parallel_size,
        vp_stage=getattr(model.module, "vp_stage", None),
    )
    names = ("position_ids", "labels", "loss_mask", "packed_seq_params")
    fields = {name: getattr(batch, name) for name in names}
    output = model(batch.tokens, attention_mask=None, **fields)
    return output, partial(loss_of, batch)


def loss_of(batch: Batch, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
    cp_group = parallel_state.get_context_parallel_group()
    log_probs = path_log_probs(batch, losses, cp_group)
    reference, sign = (batch.extra[f"path_{name}"] for name in ("reference", "sign"))
    total = preference_loss(log_probs, reference.to(log_probs), sign)
    counts = cp_group.rank() == 0  # all of the ranks have the whole sum
    num_pairs = torch.tensor(len(sign) // 2 * counts)
    return total, num_pairs.int(), {"lm loss": (total.detach() * counts, num_pairs)}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_preference_loss_of_trees_is_that_of_their_paths(layout: Layout) -> None:
    """Log-probabilities that lack the tokens of another rank, or of a shared node, would still
    rise and fall with the answers.
    """
    random = np.random.default_rng(5)
    batches = [pairs(random, 12) for _ in range(2)]
    model = f"{MODELS[layout.model]} {layout.depth}"
    reference = run_ranks(partial(train_one_by_one, objective=each_alone), 1, model, batches)
    flags = f"{layout.flags} {layout.depth}"
    ranks = run_ranks(partial(train_packed, step=step), layout.world_size, flags, batches)
    assert_same(assemble(ranks), reference[0], relative=1e-12)
