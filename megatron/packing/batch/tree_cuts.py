"""pure. Cuts, joins and takes apart one tree: nodes alone, no tokens (see `tree_shapes`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron.packing.batch.layout import Alignment
from megatron.packing.batch.nodes import Nodes


@dataclass(frozen=True, kw_only=True)
class TreeRules:
    """Rules by which the trees of a run are trained."""

    alignment: Alignment
    capacity: int
    """Tokens that a pack may hold; at least those of each path."""
    linear: float
    quadratic: float
    """Cost of a token, and of a squared length."""
    keys_per_token: float
    """Attention gathers the keys of each node's path. A tree with more of them than this per token
    is cut, so that a pack's keys take no more memory than this many times those of sequences.
    """
    keeps_trees: bool = True
    """True if prefixes are shared; otherwise each path becomes a sequence."""

    def cost(self, length: int, depth: int) -> float:
        """Returns the cost of a node of so many tokens below so many, padding included."""
        padded = -(-length // self.alignment.sequence) * self.alignment.sequence
        return padded * (self.linear + self.quadratic * (padded + 2 * depth))

    def tokens(self, length: int) -> int:
        """Returns the tokens that a node occupies."""
        return -(-length // self.alignment.sequence) * self.alignment.sequence


class Node(NamedTuple):
    """A node of a new tree: a run of old nodes."""

    pieces: tuple[int, ...]
    """Numbers of the old nodes, in the order of the path."""
    length: int
    depth: int
    parent: int
    """Number of the parent in the new tree; -1 for none."""


Tree = list[Node]


def tree_of(nodes: Nodes, start: int, end: int) -> Tree:
    """Returns the tree of nodes start to end."""
    return [
        Node((node,), length, depth, parent - start if parent >= 0 else -1)
        for node, length, depth, parent in zip(
            range(start, end),
            nodes.lengths[start:end].tolist(),
            nodes.depths[start:end].tolist(),
            nodes.parents[start:end].tolist(),
        )
    ]


def parts_of(tree: Tree, rules: TreeRules, keeps_root: bool = False) -> list[Tree]:
    """Returns the trees that a tree is trained as.

    Args:
        keeps_root: leaves one tree where it fits, also where padding costs more than sharing
            saves at its root.
    """
    if len(tree) == 1:
        return [tree]
    if not rules.keeps_trees:
        return [[_as_sequence(tree, leaf)] for leaf in _leaves(tree)]
    if rules.alignment.sequence > 1:
        tree = _with_joined_nodes(tree, rules, keeps_root)
    return list(_cut(tree, rules))


def _leaves(tree: Tree) -> list[int]:
    parents = {node.parent for node in tree}
    return [number for number in range(len(tree)) if number not in parents]


def _path(tree: Tree, number: int) -> list[int]:
    """Returns the nodes from the root to a node."""
    path = []
    while number >= 0:
        path.append(number)
        number = tree[number].parent
    return path[::-1]


def _as_sequence(tree: Tree, leaf: int) -> Node:
    pieces = tuple(piece for number in _path(tree, leaf) for piece in tree[number].pieces)
    return Node(pieces, tree[leaf].depth + tree[leaf].length, 0, -1)


def _with_joined_nodes(tree: Tree, rules: TreeRules, keeps_root: bool) -> Tree:
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
        # The node apart, and its children; or a copy of it at the start of each child.
        kept = rules.cost(node.length, node.depth)
        kept += sum(rules.cost(new[child].length, new[child].depth) for child in below)
        joined = sum(rules.cost(node.length + new[child].length, node.depth) for child in below)
        if joined > kept:
            continue
        for child in below:
            pieces = node.pieces + new[child].pieces
            length = node.length + new[child].length
            new[child] = Node(pieces, length, node.depth, node.parent)
        if node.parent >= 0:  # its children take its place among its parent's
            place = children[node.parent].index(number)
            children[node.parent][place : place + 1] = below
        gone.add(number)
    return _renumbered(new, [number for number in range(len(tree)) if number not in gone])


def _renumbered(tree: Tree, kept: Sequence[int]) -> Tree:
    """Returns the nodes `kept`, all of whose parents are."""
    # kept 1 3: the parent 1 of node 3 becomes 0
    new_number = {number: new for new, number in enumerate(kept)}
    return [
        tree[number]._replace(parent=new_number.get(tree[number].parent, -1)) for number in kept
    ]


def _cut(tree: Tree, rules: TreeRules) -> Iterator[Tree]:
    """Yields trees of neighbouring leaves, as many as fit; one tree where all do. Roots, of which
    joining may leave several, are apart.
    """
    taken: set[int] = set()  # nodes of the part so far
    branching: set[int] = set()  # those of them below which it has several branches
    num_tokens = num_keys = root = 0
    for leaf in _leaves(tree):
        path = _path(tree, leaf)
        fresh = [number for number in path if number not in taken]
        more, keys = _tokens(tree, fresh, rules), _keys(tree, path, fresh, branching)
        is_over = num_tokens + more > rules.capacity
        is_over |= num_keys + keys > rules.keys_per_token * (num_tokens + more)
        if taken and (is_over or path[0] != root):
            # A new part begins with all of this leaf's path: prefixes are computed in each part.
            yield _part(tree, taken)
            taken, branching, num_tokens, num_keys, fresh = set(), set(), 0, 0, path
            more, keys = _tokens(tree, fresh, rules), _keys(tree, path, fresh, branching)
        # The node at which this path leaves the part's other paths branches now.
        branching.update(path[: len(path) - len(fresh)][-1:])
        taken.update(fresh)
        num_tokens, num_keys, root = num_tokens + more, num_keys + keys, path[0]
    yield _part(tree, taken)


def _tokens(tree: Tree, fresh: Sequence[int], rules: TreeRules) -> int:
    return sum(rules.tokens(tree[number].length) for number in fresh)


def _keys(tree: Tree, path: Sequence[int], fresh: Sequence[int], branching: set[int]) -> int:
    """Returns the keys that a part gathers more with a path, of which the nodes `fresh` are new.

    A part joins nodes that have one child left, so its keys are those of the leaves and of the
    nodes that branch:

        a chain of 2, 3, 4 tokens    ->    9 keys; with a branch of 5 tokens below the first
                                           node, 2 + 7 more
    """
    ends = [path[-1]]
    above = path[: len(path) - len(fresh)][-1:]
    ends += [number for number in above if number not in branching]
    return sum(tree[number].depth + tree[number].length for number in ends)


def _part(tree: Tree, taken: set[int]) -> Tree:
    """Returns the nodes `taken`, those joined that have one child left."""
    num_children = dict.fromkeys(taken, 0)
    for number in taken:
        if tree[number].parent >= 0:
            num_children[tree[number].parent] += 1
    new: dict[int, Node] = {}
    at: dict[int, int] = {}  # number of the run that a node is in
    for number in sorted(taken):  # parents have lower numbers than their children
        node = tree[number]
        if node.parent >= 0 and num_children[node.parent] == 1:
            run = at[number] = at[node.parent]
            new[run] = new[run]._replace(
                pieces=new[run].pieces + node.pieces, length=new[run].length + node.length
            )
        else:
            at[number] = number
            new[number] = node._replace(parent=at.get(node.parent, -1))
    # Runs are named by their first node; runs 0 3 4 become 0 1 2.
    new_number = {number: index for index, number in enumerate(new)}
    return [node._replace(parent=new_number.get(node.parent, -1)) for node in new.values()]
