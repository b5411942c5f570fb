"""pure. Trees: sequences that share prefixes, merged so that each prefix is computed once.

A tree is one sample. Its nodes are runs of tokens, parents before children; a path leads from the
root to the end of a node, and is what one sequence would be. A token sees the tokens of its path up
to itself, and its position is its depth there. The definition of right: loss, gradients and counts
equal those of each path trained as a sequence of its own. A sequence is a tree of one node.

    paths  7 8 9 | 7 8 5 6    ->    tokens     7 8 | 9 | 5 6    node_lengths  2  1  2
                                    positions  0 1   2   2 3    parents      -1  0  0

Paths are merged from the first token on, while token and label agree. So a token has one label, and
each branch computes the last common token again. A token of several paths has the sum of their
weights, and counts as often as paths train it (`num_paths`). Sums of weights are float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.packing.batch.columns import IntArray
from megatron.packing.batch.grammar import IGNORED_LABEL

MAX_LEVELS = 1000
"""Nodes of a path, at most."""


class TreeError(ValueError):
    """Nodes that are no tree."""


class Trees(NamedTuple):
    """Nodes as samples: each root begins one, which its descendants belong to."""

    order: IntArray
    """int64 [m']: number of each given node, sample by sample, parents first."""
    rows: IntArray
    """int64 [n]: nodes of each sample, after runs of nodes were joined."""
    parents: npt.NDArray[np.int32]
    """int32 [m]: number of each node's parent within its sample; -1 for a root."""
    node_lengths: npt.NDArray[np.int32]
    """int32 [m]: tokens of each node."""

    @property
    def lengths(self) -> IntArray:
        """int64 [n]: tokens of each sample."""
        firsts = np.cumsum(self.rows) - self.rows
        return np.add.reduceat(self.node_lengths, firsts, dtype=np.int64)


def checked_trees(lengths: IntArray, parents: IntArray) -> Trees:
    """Returns the samples of nodes given by their lengths and their parents' numbers (-1: none).

    A node that is its parent's only child, and follows it, becomes one run with it.

        parents -1 -1 0 1 1, lengths 2 3 4 1 1    ->    order 0 2 1 3 4, rows 1 3,
                                                        parents -1 -1 0 0, node_lengths 6 3 1 1

    Raises TreeError for what is no tree: a parent that does not come before its child (a cycle
    among them), an empty node, more than MAX_LEVELS nodes in a path.
    """
    if parents.shape != lengths.shape:
        raise TreeError(
            f"'parents' must have one entry per node ({lengths.size}), but has {parents.size}"
        )
    not_before = np.flatnonzero((parents < -1) | (parents >= np.arange(parents.size)))
    if not_before.size:
        node = not_before[0]
        raise TreeError(
            "'parents' must hold for each node the number of a node before it, or -1 for none, "
            f"but is {parents[node]} for node {node}"
        )
    empty = np.flatnonzero(lengths < 1)
    if empty.size:
        raise TreeError(f"each node must have at least one token, but node {empty[0]} has none")
    roots = np.arange(parents.size)
    for node in np.flatnonzero(parents >= 0):
        roots[node] = roots[parents[node]]
    order = np.argsort(roots, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(order.size)
    moved = np.where(parents[order] >= 0, place[parents[order]], -1)
    trees = _joined_runs(order, lengths[order], moved)
    levels = np.ones(trees.parents.size, np.int64)
    firsts = np.repeat(np.cumsum(trees.rows) - trees.rows, trees.rows)
    for node in np.flatnonzero(trees.parents >= 0):
        levels[node] += levels[firsts[node] + trees.parents[node]]
    if levels.max() > MAX_LEVELS:
        raise TreeError(
            f"a path must have at most {MAX_LEVELS} nodes, but one has {levels.max()}; merge less, "
            "or train its paths as sequences"
        )
    return trees


def _joined_runs(order: IntArray, lengths: IntArray, parents: IntArray) -> Trees:
    """Returns nodes in order, those joined that are one run."""
    has_parent = parents >= 0
    num_children = np.bincount(parents[has_parent], minlength=parents.size)
    follows = (parents == np.arange(parents.size) - 1) & has_parent
    follows &= num_children[parents] == 1
    kept = np.flatnonzero(~follows)
    run = np.cumsum(~follows) - 1  # of each node
    roots = np.flatnonzero(parents[kept] < 0)
    of_sample = np.cumsum(parents[kept] < 0) - 1
    in_sample = np.where(parents[kept] < 0, -1, run[parents[kept]] - roots[of_sample])
    return Trees(
        order=order,
        rows=np.diff(np.append(roots, kept.size)),
        parents=in_sample.astype(np.int32),
        node_lengths=np.add.reduceat(lengths, kept).astype(np.int32),
    )


class Path(NamedTuple):
    """A sequence of L tokens, as it would be trained alone."""

    tokens: npt.NDArray[Any]
    """[L], integers"""
    labels: npt.NDArray[Any]
    """[L], integers"""
    loss_mask: npt.NDArray[np.float32]
    """[L]: weight of each label's loss, 0 for none."""

    @property
    def weights(self) -> npt.NDArray[np.float32]:
        """[L]: `loss_mask`, and 0 for labels of -100."""
        is_masked = np.asarray(self.labels) == IGNORED_LABEL
        return np.where(is_masked, np.float32(0), np.asarray(self.loss_mask, np.float32))


class MergedPaths(NamedTuple):
    """Paths as one or more trees, m nodes of T tokens: fields that an iterator may give."""

    tokens: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    loss_mask: npt.NDArray[np.float32]
    num_paths: npt.NDArray[np.int32]
    """[T]: how many paths train each token."""
    cu_seqlens: IntArray
    """[m + 1]: where nodes begin."""
    parents: IntArray
    """[m]: -1 for a root; there is one for each first token (and label) that paths begin with."""


@dataclass(eq=False)
class _Run:
    """A node while paths are merged."""

    pairs: npt.NDArray[np.int64]
    """[l, 2]: token and label."""
    weights: npt.NDArray[np.float32]
    counts: npt.NDArray[np.int32]
    children: list[_Run] = field(default_factory=list)

    def add(self, path: _Run, size: int) -> None:
        """Counts the first `size` tokens of a path, which begins as this run does."""
        self.weights[:size] += path.weights[:size]
        self.counts[:size] += path.counts[:size]

    def tail(self, start: int) -> _Run:
        """Returns what follows the first `start` tokens, with the children."""
        return _Run(self.pairs[start:], self.weights[start:], self.counts[start:], self.children)

    def split(self, size: int) -> None:
        """Leaves the first `size` tokens here, and makes one child of the others."""
        rest = self.tail(size)
        self.pairs = self.pairs[:size]
        self.weights = self.weights[:size]
        self.counts = self.counts[:size]
        self.children = [rest]


def merge(paths: Sequence[Path]) -> MergedPaths:
    """Merges paths at their prefixes of equal tokens and labels.

    A path that another one continues ends within that one's nodes; equal paths become one, with
    their weights added. O(tokens of the paths), plus the children of each node for each path.
    """
    roots: list[_Run] = []
    for path in paths:
        if not len(path.tokens):
            raise TreeError("each path must have at least one token, but one is empty")
        pairs = np.column_stack((path.tokens, path.labels)).astype(np.int64)
        weights = path.weights
        _insert(roots, _Run(pairs, weights, (weights != 0).astype(np.int32)))
    runs: list[_Run] = []
    parents: list[int] = []
    stack = [(root, -1) for root in reversed(roots)]
    while stack:  # in preorder: a first child follows its parent
        run, parent = stack.pop()
        stack += [(child, len(runs)) for child in reversed(run.children)]
        runs.append(run)
        parents.append(parent)
    pairs = np.concatenate([run.pairs for run in runs])
    return MergedPaths(
        tokens=pairs[:, 0],
        labels=pairs[:, 1],
        loss_mask=np.concatenate([run.weights for run in runs]),
        num_paths=np.concatenate([run.counts for run in runs]),
        cu_seqlens=np.cumsum([0, *(len(run.weights) for run in runs)]),
        parents=np.array(parents, np.int64),
    )


def _insert(siblings: list[_Run], rest: _Run) -> None:
    while True:
        run = next((one for one in siblings if (one.pairs[0] == rest.pairs[0]).all()), None)
        if run is None:
            siblings.append(rest)
            return
        size = min(len(run.weights), len(rest.weights))
        differs = (run.pairs[:size] != rest.pairs[:size]).any(1)
        common = int(differs.argmax()) if differs.any() else size
        run.add(rest, common)
        if common == len(rest.weights):
            return  # the path ends within this run
        if common < len(run.weights):
            run.split(common)
        rest = rest.tail(common)
        if not run.children:  # continues where a shorter path ended: one run
            run.pairs = np.concatenate((run.pairs, rest.pairs))
            run.weights = np.concatenate((run.weights, rest.weights))
            run.counts = np.concatenate((run.counts, rest.counts))
            return
        siblings = run.children
