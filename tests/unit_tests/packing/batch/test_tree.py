"""Merging of paths, and nodes as samples."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.packing.batch.tree import (
    MAX_LEVELS,
    MergedPaths,
    Path,
    TreeError,
    checked_trees,
    merge,
)

Weighted = list[tuple[int, int, float]]
"""Token, label and weight of each place of a path."""


def path_of(places: Weighted) -> Path:
    tokens, labels, weights = zip(*places)
    return Path(np.array(tokens), np.array(labels), np.array(weights, np.float32))


def test_literal_paths() -> None:
    """The last common token is computed in each branch, as its labels differ."""
    merged = merge(
        [
            path_of([(7, 8, 0), (8, 9, 1), (9, 0, 1)]),
            path_of([(7, 8, 0), (8, 5, 1), (5, 6, 0.5)]),
            path_of([(7, 8, 1)]),
        ]
    )
    assert merged.tokens.tolist() == [7, 8, 9, 8, 5]
    assert merged.labels.tolist() == [8, 9, 0, 5, 6]
    assert merged.loss_mask.tolist() == [1, 1, 1, 1, 0.5]
    assert merged.num_paths.tolist() == [1, 1, 1, 1, 1]
    assert merged.cu_seqlens.tolist() == [0, 1, 3, 5]
    assert merged.parents.tolist() == [-1, 0, 0]


def test_a_path_that_another_continues_is_in_one_node() -> None:
    """In either order: a node for each end would be padded and gathered for nothing."""
    short, long = [(1, 2, 1.0)], [(1, 2, 0.5), (2, 3, 0.5)]
    for paths in ([short, long], [long, short]):
        merged = merge([path_of(path) for path in paths])
        assert merged.parents.tolist() == [-1]
        assert merged.loss_mask.tolist() == [1.5, 0.5]
        assert merged.num_paths.tolist() == [2, 1]


def seen_by_token(merged: MergedPaths) -> dict[tuple[tuple[int, int], ...], tuple[float, int]]:
    """By the pairs of its path up to a token: its weight, and how often it counts."""
    found = {}
    ends: list[tuple[tuple[int, int], ...]] = []
    for node, parent in enumerate(merged.parents.tolist()):
        path = ends[parent] if parent >= 0 else ()
        for place in range(merged.cu_seqlens[node], merged.cu_seqlens[node + 1]):
            path = (*path, (int(merged.tokens[place]), int(merged.labels[place])))
            assert path not in found, "a prefix is computed twice"
            found[path] = (float(merged.loss_mask[place]), int(merged.num_paths[place]))
        ends.append(path)
    return found


@given(
    st.lists(
        st.lists(
            st.tuples(st.integers(0, 1), st.integers(0, 1), st.sampled_from([0.0, 1.0, 0.5, -1.0])),
            min_size=1,
            max_size=6,
        ),
        min_size=1,
        max_size=8,
    )
)
def test_weights_and_counts_are_those_of_all_paths(paths: list[Weighted]) -> None:
    """A weight lost or taken twice would train another loss, whatever the layout."""
    expected: dict[tuple[tuple[int, int], ...], tuple[float, int]] = {}
    for path in paths:
        for size in range(1, len(path) + 1):
            prefix = tuple((token, label) for token, label, _ in path[:size])
            weight, count = expected.get(prefix, (0.0, 0))
            own = path[size - 1][2]
            expected[prefix] = weight + own, count + (own != 0)
    assert seen_by_token(merge([path_of(path) for path in paths])) == expected


def test_each_root_begins_a_sample_and_runs_are_joined() -> None:
    """Nodes of two trees may be given in any order; the second tree's trunk and its only child are
    one run, were they neighbours.
    """
    trees = checked_trees(np.array([2, 3, 4, 1, 1]), np.array([-1, -1, 0, 1, 1]))
    assert trees.order.tolist() == [0, 2, 1, 3, 4]
    assert trees.rows.tolist() == [1, 3]
    assert trees.parents.tolist() == [-1, -1, 0, 0]
    assert trees.node_lengths.tolist() == [6, 3, 1, 1]
    assert trees.lengths.tolist() == [6, 5]


@pytest.mark.parametrize(
    ("lengths", "parents", "words"),
    [
        ([1, 1], [-1], "one entry per node (2), but has 1"),
        ([1, 1], [1, -1], "a node before it, or -1 for none, but is 1 for node 0"),
        ([1, 1], [-1, 1], "but is 1 for node 1"),
        ([1, 1], [-1, -2], "but is -2 for node 1"),
        ([1, 0], [-1, 0], "node 1 has none"),
    ],
    ids=["short", "behind", "itself", "negative", "empty"],
)
def test_nodes_that_are_no_tree_are_refused(
    lengths: list[int], parents: list[int], words: str
) -> None:
    """A cycle would never end, an empty node is a branch to nowhere."""
    with pytest.raises(TreeError) as failure:
        checked_trees(np.array(lengths), np.array(parents))
    assert words in str(failure.value)


def test_a_path_of_too_many_nodes_is_refused() -> None:
    """The keys of each node are listed range by range: a comb takes the square of its depth."""
    teeth = MAX_LEVELS  # every second node is a leaf beside the next one's parent
    parents = np.array([-1, *(2 * (node // 2) for node in range(2 * teeth))])
    with pytest.raises(
        TreeError, match=f"at most {MAX_LEVELS} nodes, but one has {MAX_LEVELS + 1}"
    ):
        checked_trees(np.ones(parents.size, np.int64), parents)


def test_an_empty_path_is_refused() -> None:
    """It has no first token to merge by."""
    empty = np.empty(0, np.int64)
    with pytest.raises(TreeError, match="at least one token"):
        merge([Path(empty, empty, np.empty(0, np.float32))])
