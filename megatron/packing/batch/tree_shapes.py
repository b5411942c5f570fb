"""pure. Trees as a layout trains them: cut where they do not fit, joined where padding costs more
than sharing saves, or as separate sequences.

All of it copies nodes: a path stays what it was, and computes again what it shares no longer. The
first copy of a token keeps its loss and its count, further copies have none, so that sums stay the
same whatever the shape.

    trunk 2, branches 3 1    ->    sequences 5 and 3; the loss of the trunk's tokens is in the first
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.packing.batch.columns import (
    FLAGS,
    LABELS,
    LAST_LABELS,
    LOSS_MASK,
    NODE,
    NODE_LENGTHS,
    NUM_PATHS,
    PARENTS,
    PATH,
    SEQUENCE,
    TOKEN,
    WEIGHTS,
    IntArray,
    Schema,
    expand_ranges,
)
from megatron.packing.batch.nodes import Nodes
from megatron.packing.batch.paths import with_path_tokens
from megatron.packing.batch.samples import Samples
from megatron.packing.batch.tree import checked_trees
from megatron.packing.batch.tree_cuts import Tree, TreeRules, parts_of, tree_of


class ShapedSamples(NamedTuple):
    """Samples as they are trained: sequences as they were, and trees in their layout's shape.

    A tree that is cut becomes several samples:

        samples 0 1 2, of which 1 is cut in two    ->    original_index 0 1 1 2
    """

    samples: Samples
    original_index: IntArray
    """int64 [n]: index of the sample that each was or is a part of, ascending."""

    def parts(self) -> IntArray | None:
        """Returns 0 for a whole sample, 1, 2, ... for the parts of one; None where all are whole.

        original_index 0 1 1 2    ->    0 1 2 0
        """
        num_parts = np.bincount(self.original_index, minlength=1)
        if num_parts.max() < 2:
            return None
        firsts = np.cumsum(num_parts) - num_parts
        original = self.original_index
        part = np.arange(original.size) - firsts[original] + 1
        return np.where(num_parts[original] > 1, part, 0)


def shaped(samples: Samples, rules: TreeRules) -> ShapedSamples:
    """Returns the samples, of which trees are cut, joined or taken apart by `rules`.

    A tree over capacity becomes several whose nodes are those of neighbouring paths, as many as
    fit. Where paths have fields, a tree that fits stays one, so that they can be compared in its
    pack. Deterministic; sequences are left as they are.
    """
    num_samples = samples.lengths.size
    if PARENTS not in samples.columns:
        return ShapedSamples(samples, np.arange(num_samples))
    nodes = Nodes.of(samples)
    bounds = np.searchsorted(nodes.sample, np.arange(num_samples + 1))
    has_paths = PATH in samples.sizes.ragged
    trees: list[Tree] = []
    original_index: list[int] = []
    for number, (start, end) in enumerate(zip(bounds.tolist(), bounds[1:].tolist())):
        made = parts_of(tree_of(nodes, start, end), rules, keeps_root=has_paths)
        trees += made
        original_index += [number] * len(made)
    ids = np.array(original_index, np.int64)
    return ShapedSamples(_copied(samples, nodes, trees, ids), ids)


def truncated(samples: Samples, limit: int) -> Samples:
    """Returns all samples, each path truncated to `limit` tokens."""
    if PARENTS not in samples.columns:
        return with_path_tokens(samples.truncated(limit))
    nodes = Nodes.of(samples)
    lengths = np.clip(limit - nodes.depths, 0, nodes.lengths)
    kept = np.flatnonzero(lengths)
    starts = (np.cumsum(nodes.lengths) - nodes.lengths)[kept]
    # Number of each node among those kept: lengths 3 0 2    ->    0 0 1. A kept node's parent is
    # kept, as it begins earlier.
    new_number = np.cumsum(lengths > 0) - 1
    parents = np.where(nodes.parents[kept] < 0, -1, new_number[nodes.parents[kept]])
    ids = np.arange(samples.lengths.size)
    index = expand_ranges(starts, lengths[kept])
    cut = _rebuilt(samples, ids, index, np.zeros(index.size, np.bool_), lengths[kept], parents)
    return with_path_tokens(cut)


def _copied(samples: Samples, nodes: Nodes, trees: Sequence[Tree], ids: IntArray) -> Samples:
    """Returns samples of new trees, whose nodes are runs of `nodes`; tree i is of sample ids[i]."""
    pieces = np.array([piece for tree in trees for node in tree for piece in node.pieces], np.int64)
    is_same = ids.size == samples.lengths.size and pieces.size == sum(map(len, trees))
    if is_same and np.array_equal(pieces, np.arange(nodes.lengths.size)):
        return samples
    starts, sizes = np.cumsum(nodes.lengths) - nodes.lengths, nodes.lengths[pieces]
    # The first of equal pieces is the original: pieces 0 1 0 2    ->    F F T F
    is_copy = np.ones(pieces.size, np.bool_)
    is_copy[np.unique(pieces, return_index=True)[1]] = False
    lengths = np.array([node.length for tree in trees for node in tree], np.int64)
    # Parents count within their tree: trees of 3 and 2 nodes begin at nodes 0 and 3.
    firsts = np.cumsum([0, *(len(tree) for tree in trees)])
    parents = np.array(
        [
            -1 if node.parent < 0 else node.parent + first
            for tree, first in zip(trees, firsts.tolist())
            for node in tree
        ],
        np.int64,
    )
    index = expand_ranges(starts[pieces], sizes)
    return _rebuilt(samples, ids, index, is_copy.repeat(sizes), lengths, parents)


def _rebuilt(
    samples: Samples,
    ids: IntArray,
    index: IntArray,
    is_copy: npt.NDArray[np.bool_],
    lengths: IntArray,
    parents: IntArray,
) -> Samples:
    """Returns trees whose tokens stand at `index`, of nodes in order; sample by sample of `ids`."""
    whole = samples.with_schema(_WHOLE)
    trees = checked_trees(lengths, parents)
    rows_at = {TOKEN: index, SEQUENCE: ids}
    for scope in {column.scope for column in whole.columns} - {TOKEN, SEQUENCE, NODE}:
        rows = whole.sizes.rows(scope)
        rows_at[scope] = expand_ranges((np.cumsum(rows) - rows)[ids], rows[ids])
    columns = {
        column: values[rows_at[column.scope]]
        for column, values in whole.columns.items()
        if column.scope != NODE
    }
    for column in (LOSS_MASK, NUM_PATHS):
        columns[column] = np.where(is_copy, 0, columns[column]).astype(column.dtype)
    columns[LAST_LABELS] = columns[LABELS][np.cumsum(trees.lengths) - 1]
    columns[WEIGHTS] = np.ones(ids.size, np.float32)
    columns[FLAGS] = (columns[LOSS_MASK] != 0).view(np.uint8)
    sizes = replace(whole.sizes.take(ids), lengths=trees.lengths)
    if trees.parents.size == ids.size:  # sequences only
        sizes = replace(sizes, ragged={k: v for k, v in sizes.ragged.items() if k != NODE})
        return Samples(sizes=sizes, columns=columns)
    columns |= {PARENTS: trees.parents, NODE_LENGTHS: trees.node_lengths}
    return Samples(sizes=replace(sizes, ragged={**sizes.ragged, NODE: trees.rows}), columns=columns)


_WHOLE: Schema = (LABELS, LOSS_MASK, NUM_PATHS)
"""Columns that do not follow from others after tokens were copied. Positions do, along the path."""
