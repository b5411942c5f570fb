"""pure. Trees as a layout trains them: cut where they do not fit, joined where padding costs more
than sharing saves, or as separate sequences.

All of it copies nodes: a path stays what it was, and computes again what it shares no longer. The
first copy of a token keeps its loss and its count, further copies have none, so that sums stay the
same whatever the shape.

    trunk 2, branches 3 1    ->    sequences 5 and 3; the loss of the trunk's tokens is in the first
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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
    Form,
    IntArray,
    expand_ranges,
)
from megatron.packing.batch.layout import Alignment
from megatron.packing.batch.nodes import Nodes
from megatron.packing.batch.paths import with_path_tokens
from megatron.packing.batch.samples import Samples
from megatron.packing.batch.tree import checked_trees

MAX_KEYS_PER_TOKEN = 32
"""Attention gathers the keys of each node's path. A tree with more keys than this per token is cut,
so that a pack's keys take no more memory than this many times those of sequences."""


@dataclass(frozen=True, kw_only=True)
class TreeRules:
    """Rules by which the trees of a run are trained."""

    alignment: Alignment
    capacity: int
    """Tokens that a pack may hold; at least those of each path."""
    linear: float
    quadratic: float
    """Cost of a token, and of a squared length."""
    keeps_trees: bool = True
    """True if prefixes are shared; otherwise each path becomes a sequence."""

    def cost(self, length: int, depth: int) -> float:
        """Returns the cost of a node of so many tokens below so many, padding included."""
        padded = -(-length // self.alignment.sequence) * self.alignment.sequence
        return padded * (self.linear + self.quadratic * (padded + 2 * depth))

    def tokens(self, length: int) -> int:
        """Returns the tokens that a node occupies."""
        return -(-length // self.alignment.sequence) * self.alignment.sequence


class ShapedTrees(NamedTuple):
    """Samples as they are trained, and the number of the sample that each is a part of, rising."""

    samples: Samples
    part_of: IntArray

    def parts(self) -> IntArray | None:
        """Returns 0 for a whole sample, 1, 2, ... for the parts of one; None where all are whole.

        part_of 0 1 1 2    ->    0 1 2 0
        """
        num_parts = np.bincount(self.part_of, minlength=1)
        if num_parts.max() < 2:
            return None
        firsts = np.cumsum(num_parts) - num_parts
        number = np.arange(self.part_of.size) - firsts[self.part_of] + 1
        return np.where(num_parts[self.part_of] > 1, number, 0)


class _Node(NamedTuple):
    """A node of a new tree: a run of old nodes."""

    pieces: tuple[int, ...]
    """Numbers of the old nodes, in the order of the path."""
    length: int
    depth: int
    parent: int
    """Number of the parent in the new tree; -1 for none."""


_Tree = list[_Node]


def shaped(samples: Samples, rules: TreeRules) -> ShapedTrees:
    """Returns the samples, of which trees are cut, joined or taken apart by `rules`.

    A tree over capacity becomes several whose nodes are those of neighbouring paths, as many as
    fit. Where paths have fields, a tree that fits stays one, so that they can be compared in its
    pack. Deterministic; sequences are left as they are.
    """
    num_samples = samples.lengths.size
    if PARENTS not in samples.columns:
        return ShapedTrees(samples, np.arange(num_samples))
    nodes = Nodes.of(samples)
    bounds = np.searchsorted(nodes.sample, np.arange(num_samples + 1))
    has_paths = PATH in samples.sizes.ragged
    trees: list[_Tree] = []
    part_of: list[int] = []
    for number, (start, end) in enumerate(zip(bounds.tolist(), bounds[1:].tolist())):
        made = _shapes(_tree_of(nodes, start, end), rules, has_paths)
        trees += made
        part_of += [number] * len(made)
    owner = np.array(part_of, np.int64)
    return ShapedTrees(_copied(samples, nodes, trees, owner), owner)


def truncated(samples: Samples, limit: int) -> Samples:
    """Returns all samples, each path truncated to `limit` tokens."""
    if PARENTS not in samples.columns:
        return with_path_tokens(samples.first(limit))
    nodes = Nodes.of(samples)
    lengths = np.clip(limit - nodes.depths, 0, nodes.lengths)
    kept = np.flatnonzero(lengths)
    starts = (np.cumsum(nodes.lengths) - nodes.lengths)[kept]
    place = np.cumsum(lengths > 0) - 1
    parents = np.where(nodes.parents[kept] < 0, -1, place[nodes.parents[kept]])
    ids = np.arange(samples.lengths.size)
    index = expand_ranges(starts, lengths[kept])
    cut = _rebuilt(samples, ids, index, np.zeros(index.size, np.bool_), lengths[kept], parents)
    return with_path_tokens(cut)


def _tree_of(nodes: Nodes, start: int, end: int) -> _Tree:
    """Returns the tree of nodes start to end."""
    return [
        _Node((node,), length, depth, parent - start if parent >= 0 else -1)
        for node, length, depth, parent in zip(
            range(start, end),
            nodes.lengths[start:end].tolist(),
            nodes.depths[start:end].tolist(),
            nodes.parents[start:end].tolist(),
        )
    ]


def _shapes(tree: _Tree, rules: TreeRules, has_paths: bool) -> list[_Tree]:
    if len(tree) == 1:
        return [tree]
    if not rules.keeps_trees:
        return [[_as_sequence(tree, leaf)] for leaf in _leaves(tree)]
    if rules.alignment.sequence > 1:
        tree = _with_joined_nodes(tree, rules, keeps_root=has_paths)
    return list(_cut(tree, rules))


def _leaves(tree: _Tree) -> list[int]:
    parents = {node.parent for node in tree}
    return [number for number in range(len(tree)) if number not in parents]


def _path(tree: _Tree, number: int) -> list[int]:
    """Returns the nodes from the root to a node."""
    path = []
    while number >= 0:
        path.append(number)
        number = tree[number].parent
    return path[::-1]


def _as_sequence(tree: _Tree, leaf: int) -> _Node:
    pieces = tuple(piece for number in _path(tree, leaf) for piece in tree[number].pieces)
    return _Node(pieces, tree[leaf].depth + tree[leaf].length, 0, -1)


def _with_joined_nodes(tree: _Tree, rules: TreeRules, keeps_root: bool) -> _Tree:
    """Returns the tree, of which nodes are copied into their children where that costs less; with
    its root, whose children then are roots, unless it is kept.

    Children come before their parents, as joining them changes what the parent's children are.

        8 tokens per segment: trunk 2, branches 5 6    ->    7, 8: 16 tokens instead of 24
    """
    children: list[list[int]] = [[] for _ in tree]
    for number, node in enumerate(tree):
        if node.parent >= 0:
            children[node.parent].append(number)
    new = list(tree)
    gone: set[int] = set()
    for number in reversed(range(len(tree))):
        node = new[number]
        below = children[number]
        if not below or (keeps_root and node.parent < 0):
            continue
        kept = rules.cost(node.length, node.depth)
        kept += sum(rules.cost(new[child].length, new[child].depth) for child in below)
        joined = sum(rules.cost(node.length + new[child].length, node.depth) for child in below)
        if joined > kept:
            continue
        for child in below:
            pieces = node.pieces + new[child].pieces
            length = node.length + new[child].length
            new[child] = _Node(pieces, length, node.depth, node.parent)
        if node.parent >= 0:
            place = children[node.parent].index(number)
            children[node.parent][place : place + 1] = below
        gone.add(number)
    return _renumbered(new, [number for number in range(len(tree)) if number not in gone])


def _renumbered(tree: _Tree, kept: Sequence[int]) -> _Tree:
    """Returns the nodes `kept`, all of whose parents are."""
    place = {number: new for new, number in enumerate(kept)}
    return [tree[number]._replace(parent=place.get(tree[number].parent, -1)) for number in kept]


def _cut(tree: _Tree, rules: TreeRules) -> Iterator[_Tree]:
    """Yields trees of neighbouring leaves, as many as fit; one tree where all do. Roots, of which
    joining may leave several, are apart.
    """
    taken: set[int] = set()
    num_tokens = num_keys = root = 0
    for leaf in _leaves(tree):
        path = _path(tree, leaf)
        fresh = [number for number in path if number not in taken]
        more = sum(rules.tokens(tree[number].length) for number in fresh)
        keys = sum(tree[number].depth + tree[number].length for number in fresh)
        is_over = num_tokens + more > rules.capacity
        is_over |= num_keys + keys > MAX_KEYS_PER_TOKEN * (num_tokens + more)
        if taken and (is_over or path[0] != root):
            yield _part(tree, taken)
            taken, num_tokens, num_keys, fresh = set(), 0, 0, path
            more = sum(rules.tokens(tree[number].length) for number in fresh)
            keys = sum(tree[number].depth + tree[number].length for number in fresh)
        taken.update(fresh)
        num_tokens, num_keys, root = num_tokens + more, num_keys + keys, path[0]
    yield _part(tree, taken)


def _part(tree: _Tree, taken: set[int]) -> _Tree:
    """Returns the nodes `taken`, those joined that have one child left."""
    num_children = dict.fromkeys(taken, 0)
    for number in taken:
        if tree[number].parent >= 0:
            num_children[tree[number].parent] += 1
    new: dict[int, _Node] = {}
    at: dict[int, int] = {}  # number of the run that a node is in
    for number in sorted(taken):
        node = tree[number]
        if node.parent >= 0 and num_children[node.parent] == 1:
            run = at[number] = at[node.parent]
            new[run] = new[run]._replace(
                pieces=new[run].pieces + node.pieces, length=new[run].length + node.length
            )
        else:
            at[number] = number
            new[number] = node._replace(parent=at.get(node.parent, -1))
    place = {number: index for index, number in enumerate(new)}
    return [node._replace(parent=place.get(node.parent, -1)) for node in new.values()]


def _copied(samples: Samples, nodes: Nodes, trees: Sequence[_Tree], owner: IntArray) -> Samples:
    """Returns samples of new trees, whose nodes are runs of `nodes`."""
    pieces = np.array([piece for tree in trees for node in tree for piece in node.pieces], np.int64)
    is_same = owner.size == samples.lengths.size and pieces.size == sum(map(len, trees))
    if is_same and np.array_equal(pieces, np.arange(nodes.lengths.size)):
        return samples
    starts, sizes = np.cumsum(nodes.lengths) - nodes.lengths, nodes.lengths[pieces]
    is_copy = np.ones(pieces.size, np.bool_)
    is_copy[np.unique(pieces, return_index=True)[1]] = False
    lengths = np.array([node.length for tree in trees for node in tree], np.int64)
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
    return _rebuilt(samples, owner, index, is_copy.repeat(sizes), lengths, parents)


def _rebuilt(
    samples: Samples,
    ids: IntArray,
    index: IntArray,
    is_copy: npt.NDArray[np.bool_],
    lengths: IntArray,
    parents: IntArray,
) -> Samples:
    """Returns trees whose tokens stand at `index`, of nodes in order; sample by sample of `ids`."""
    whole = samples.in_form(_WHOLE)
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


_WHOLE: Form = (LABELS, LOSS_MASK, NUM_PATHS)
"""Columns that do not follow from others after tokens were copied. Positions do, along the path."""
