"""Figures of a step, from the batches that a rank trains."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from megatron.packing.batch.layout import Alignment
from megatron.packing.batch.microbatches import layouts_of_samples, pack
from megatron.packing.batch.reading import read_samples
from megatron.packing.batch.tree import Path, merge
from megatron.sft.data.counts import Counts


def sample_of(*paths: list[int]) -> dict[str, Any]:
    """One sample, whose paths are merged where tokens and labels agree."""
    merged = merge(
        [
            Path(np.array(path), np.array([*path[1:], 9]), np.ones(len(path), np.float32))
            for path in paths
        ]
    )
    return merged._asdict()


def test_lengths_of_trees_are_those_of_their_paths() -> None:
    """The longest sequence of a step was the longest node of a tree: a long conversation whose
    turns branch had the length of one of its turns.
    """
    from megatron.sft.training.figures import FIGURES
    from megatron.sft.training.step_batches import StepBatch

    # Nodes of 3, 2 and 3 tokens, so paths of 5 and 6; then a sequence of 4, alone in its pack.
    tree = sample_of([1, 1, 1, 1, 2], [1, 1, 1, 1, 3, 3])
    samples = read_samples([tree, {"tokens": [5, 6]}, {"tokens": [7, 7, 7, 7]}])
    num_sequences = np.array([2, 0, 1])
    layouts = layouts_of_samples(samples, num_sequences, Alignment(sequence=4, pack=32))
    assert layouts[0].lengths.tolist() == [3, 2, 3, 2, 0]
    packed: Any = SimpleNamespace(microbatches=pack(samples, num_sequences, layouts))
    batch = StepBatch(packed, [], Counts.none(1))
    assert batch.lengths == [5, 6, 2, 4]
    assert FIGURES["longest_sequence"].of(batch) == 6
