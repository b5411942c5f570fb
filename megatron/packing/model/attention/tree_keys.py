"""tensor. Keys that the tokens of a tree attend to.

In a pack of trees each segment is a node, and attention takes any list of keys whose last belongs
to the last query: for a node, the tokens of the nodes before it in its path, then its own. Padding
stands at the end of nodes and is nobody's key but its own node's. Under context parallel each node
is cut as `zigzag` cuts sequences; a piece's keys are its path's tokens and its node's up to the
piece's last.

Price: keys and values are gathered once more for each node that continues others, as many as its
path has tokens. Separate sequences would compute and hold no fewer.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from megatron.packing.batch.columns import expand_ranges
from megatron.packing.model.attention.zigzag import (
    Lengths,
    PlacesSeen,
    Zigzag,
    gathered_places,
)


class PackTree(NamedTuple):
    """The nodes of a pack's trees, one per segment."""

    padded_lengths: Lengths
    lengths: Lengths
    """Real tokens."""
    parents: Lengths
    """Number of the segment that each continues; -1 for none."""
    depths: Lengths
    """Real tokens of the path before each."""


def tree_of(packed_seq_params: Any) -> PackTree | None:
    """Returns the nodes of a pack; None where it holds sequences only."""
    return getattr(packed_seq_params, "tree", None)


def depths_of(packed_seq_params: Any) -> Lengths:
    """Returns the depth of each segment of a pack; () where all are zero."""
    tree = tree_of(packed_seq_params)
    return () if tree is None else tree.depths


@lru_cache(maxsize=32)
def tree_keys(
    tree: PackTree, size: int, rank: int, device: torch.device, window: int | None = None
) -> Zigzag:
    """Returns what context-parallel rank `rank` of `size` attends to, where keys were gathered from
    all ranks in rank order; keys before the window of a piece's first token are left out.

        lengths 3 2, parents -1 0, padded to 4 4, size 1    ->    keys 0 1 2 3 and 0 1 2 4 5 6 7
    """
    return tree_places(tree, size, rank, window).on(device)


def tree_places(tree: PackTree, size: int, rank: int, window: int | None = None) -> PlacesSeen:
    """Returns `tree_keys` on the host."""
    padded = np.array(tree.padded_lengths, np.int64)
    starts = padded.cumsum() - padded
    # Start and length of the ranges of keys before a node: its parent's, and the parent itself.
    before: list[list[tuple[int, int]]] = []
    for parent in tree.parents:
        before.append(
            [*before[parent], (int(starts[parent]), tree.lengths[parent])] if parent >= 0 else []
        )
    pieces = (1,) if size == 1 else (rank + 1, 2 * size - rank)
    num_pieces = 1 if size == 1 else 2 * size
    ranges: list[tuple[int, int]] = []
    query_lengths, key_lengths = [], []
    for node, length in enumerate(tree.padded_lengths):
        num_queries = length // num_pieces
        for last in pieces if length else ():
            own = [*before[node], (int(starts[node]), last * num_queries)]
            if window is not None:
                own = _last(own, num_queries + window - 1)
            ranges += own
            query_lengths.append(num_queries)
            key_lengths.append(sum(count for _, count in own))
    index = expand_ranges(*np.array(ranges, np.int64).T)
    if size > 1:
        index = gathered_places(tree.padded_lengths, size)[index]
    return PlacesSeen(tuple(query_lengths), tuple(key_lengths), index)


def _last(ranges: list[tuple[int, int]], count: int) -> list[tuple[int, int]]:
    """Returns the last `count` of all: [(0, 3), (8, 2)], 3 -> [(2, 1), (8, 2)]."""
    kept: list[tuple[int, int]] = []
    for start, length in reversed(ranges):
        taken = min(length, count)
        if taken:
            kept.append((start + length - taken, taken))
        count -= taken
    return kept[::-1]
