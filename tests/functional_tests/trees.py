"""Random trees of each kind, and the sequences that they stand for.

A batch of `TreeSample`s goes to `train_packed`, and `apart` of it, its paths as samples, to
`train_one_by_one`: both must come to the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from megatron.packing.batch.tree import Path, merge
from tests.functional_tests.oracle import VOCAB_SIZE, Sample

KINDS: dict[str, dict[str, Any]] = {
    "sequence": {"depth": 0},
    "star": {"depth": 1, "children": 6},
    "deep": {"depth": 9, "children": 2, "lengths": (1, 3), "thin": True},
    "tokens": {"depth": 5, "children": 2, "lengths": (1, 1)},
    "wide": {"depth": 2, "children": 3},
    "masked trunk": {"depth": 2, "children": 2, "masked": True},
    "equal": {"depth": 1, "children": 3, "repeat": 2},
    "weights": {"depth": 2, "children": 2, "weights": (1.0, 0.5, -0.25, 2.0)},
    "forest": {"depth": 1, "children": 2, "roots": 3},
    "prefixes": {"depth": 3, "children": 2, "inner": True, "thin": True},
}


class TreeSample(NamedTuple):
    """A record of several sequences."""

    paths: list[Sample]

    def fields(self) -> dict[str, Any]:
        """As an iterator gives it."""
        return merge([Path(one.tokens, one.labels, one.loss_mask) for one in self.paths])._asdict()


def tree(random: np.random.Generator, kind: str) -> TreeSample:
    """Return a random tree of a kind of KINDS."""
    how: dict[str, Any] = {
        "children": 2,
        "lengths": (1, 9),
        "weights": (1.0,),
        "roots": 1,
        "repeat": 1,
    }
    how |= KINDS[kind]
    runs: list[list[int]] = []

    def grow(before: list[int], level: int) -> None:
        low, high = how["lengths"]
        run = [*before, *random.integers(0, VOCAB_SIZE, random.integers(low, high + 1)).tolist()]
        if level == how["depth"]:
            runs.append(run)
            return
        if how.get("inner") and random.random() < 0.5:
            runs.append(run)  # a path that others continue
        num_children = how["children"]
        for child in range(num_children):
            deeper = level + 1 if not (how.get("thin") and child) else how["depth"]
            grow(run, deeper)

    for _ in range(how["roots"]):
        grow([], 0)
    paths = []
    trunk = min(map(len, runs)) if how.get("masked") else 0
    for run in runs:
        for _ in range(how["repeat"]):
            weight = random.choice(how["weights"])
            labels = np.array([*run[1:], random.integers(VOCAB_SIZE)])
            mask = (random.random(len(run)) < 0.7) * weight
            mask[: max(trunk - 1, 0)] = 0
            paths.append(
                Sample(np.array(run), labels, mask.astype(np.float32), np.arange(len(run)))
            )
    return TreeSample(paths)


def batches_of_trees(seed: int, kinds: Sequence[str], num_steps: int) -> list[list[TreeSample]]:
    """Return batches with a tree of each kind."""
    random = np.random.default_rng(seed)
    return [[tree(random, kind) for kind in kinds] for _ in range(num_steps)]


def apart(batches: Sequence[Sequence[TreeSample]]) -> list[list[Sample]]:
    """Return the paths of all trees, each a sample of its own."""
    return [[path for one in batch for path in one.paths] for batch in batches]
