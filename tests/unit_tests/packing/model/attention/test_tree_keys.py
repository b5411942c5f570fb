"""A tree's attention is that of its paths, each alone: with windows, sinks, groups of heads,
padding and context parallel.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from megatron.packing.batch.layout import Alignment, PackLayout
from megatron.packing.batch.microbatches import layout_microbatches
from megatron.packing.model.attention.blocks import Scores, Segments
from megatron.packing.model.attention.kernels import causal_attention
from megatron.packing.model.attention.tree_keys import PackTree, tree_keys, tree_of
from megatron.packing.model.attention.zigzag import positions_of_tokens, shard_index
from megatron.packing.model.get_batch import packed_seq_params

CPU = torch.device("cpu")
LENGTHS = [5, 3, 1, 4, 6, 2]
PARENTS = [-1, 0, 0, 2, -1, 2]
"""Two trees: 0 with branches 1 and 2, of which 2 branches into 3 and 5; and a sequence, 4."""
PATHS = [[0, 1], [0, 2, 3], [0, 2, 5], [4]]


def tree_with(multiple: int) -> PackTree:
    depths = np.array([0, 5, 5, 6, 0, 6])
    alignment = Alignment(sequence=multiple, pack=4 * multiple)
    layout = PackLayout.of(LENGTHS, alignment, np.array(PARENTS), depths)
    tree = tree_of(packed_seq_params(layout_microbatches([layout])[0], CPU))
    assert tree is not None
    return tree


def test_literal_keys() -> None:
    """Padding of a parent is nobody else's key."""
    tree = PackTree((4, 4), (3, 2), (-1, 0), (0, 3))
    seen = tree_keys(tree, 1, 0, CPU)
    assert seen.query_lengths == (4, 4)
    assert seen.key_lengths == (4, 7)
    assert seen.key_index.tolist() == [0, 1, 2, 3, 0, 1, 2, 4, 5, 6, 7]
    windowed = tree_keys(tree, 1, 0, CPU, 2)
    assert windowed.key_lengths == (4, 5)
    assert windowed.key_index.tolist() == [0, 1, 2, 3, 2, 4, 5, 6, 7]
    assert positions_of_tokens((4, 4), 1, 0, (0, 3)).tolist() == [0, 1, 2, 3, 3, 4, 5, 6]


def test_packs_of_sequences_have_no_tree() -> None:
    """They would gather all their keys for nothing."""
    layout = PackLayout.of([3, 4], Alignment(), np.array([-1, -1]), np.array([0, 0]))
    (microbatch,) = layout_microbatches([layout])
    assert tree_of(packed_seq_params(microbatch, CPU)) is None
    assert microbatch.keys() == layout_microbatches([PackLayout.of([3, 4], Alignment())])[0].keys()


@pytest.mark.parametrize(
    ("size", "window", "has_sinks"), [*product((1, 2, 3), (None, 3), (False, True))]
)
def test_tree_attends_like_its_paths(size: int, window: int | None, has_sinks: bool) -> None:
    """A key of another branch, or of padding, would leak what is not there when a model serves."""
    heads, groups, width = 4, 2, 8
    generator = torch.Generator().manual_seed(1)
    tree = tree_with(2 * size)
    total = sum(tree.padded_lengths)
    query, key, value, gradient = (
        torch.randn(total, n, width, generator=generator, dtype=torch.float64)
        for n in (heads, groups, groups, heads)
    )
    sinks = torch.randn(heads, generator=generator, dtype=torch.float64) if has_sinks else None
    inputs = [x.requires_grad_() for x in (query, key, value)]
    scores = Scores(scale=0.3, window=window)
    starts = np.cumsum(tree.padded_lengths) - tree.padded_lengths
    real = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, tree.lengths)])
    out = torch.zeros(total, heads, width, dtype=torch.float64)
    found_shards = [shard_index(tree.padded_lengths, size, rank) for rank in range(size)]
    shards = [torch.arange(total) if shard is None else shard for shard in found_shards]
    order = torch.cat(shards)
    for rank, mine in enumerate(shards):
        seen = tree_keys(tree, size, rank, CPU, window)
        keys, values = (x[order][seen.key_index] for x in (key, value))
        segments = Segments(seen.query_lengths, seen.key_lengths)
        attended = causal_attention(query[mine], keys, values, segments, scores, sinks)
        out = out.index_copy(0, mine, attended)
    found = torch.autograd.grad((out * gradient)[real].sum(), inputs)

    expected = torch.zeros_like(out)
    for path in PATHS:
        index = torch.cat([torch.arange(starts[n], starts[n] + tree.lengths[n]) for n in path])
        segments = Segments.square((len(index),))
        alone = causal_attention(query[index], key[index], value[index], segments, scores, sinks)
        expected = expected.index_copy(0, index, alone)  # what paths share is equal in each
    wanted = torch.autograd.grad((expected * gradient)[real].sum(), inputs)
    torch.testing.assert_close(out[real], expected[real], rtol=0, atol=1e-13)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
