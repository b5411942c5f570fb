"""Trees that are cut, joined or taken apart keep their paths, weights and counts."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.packing.batch.columns import NUM_PATHS, PARENTS
from megatron.packing.batch.layout import Alignment
from megatron.packing.batch.nodes import Nodes, SampleSizes
from megatron.packing.batch.reading import read_samples
from megatron.packing.batch.samples import Samples
from megatron.packing.batch.tree import Path, merge
from megatron.packing.batch.tree_cuts import TreeRules
from megatron.packing.batch.tree_shapes import shaped, truncated

EXACT = Alignment()


def rules(**changes: Any) -> TreeRules:
    plain: dict[str, Any] = {
        "alignment": EXACT,
        "capacity": 1000,
        "linear": 1.0,
        "quadratic": 0.001,
        "keys_per_token": 32,
    }
    return TreeRules(**(plain | changes))


def sample_of(paths: list[list[int]], **extra: Any) -> dict[str, Any]:
    """Tokens of paths, of which each place counts in each path."""
    merged = merge(
        [
            Path(np.array(path), np.array([*path[1:], 9]), np.ones(len(path), np.float32))
            for path in paths
        ]
    )
    return {**merged._asdict(), **extra}


def trained(samples: Samples) -> tuple[Counter[Any], dict[Any, float], dict[Any, int]]:
    """Paths from root to leaf; by path up to a token and label, the sum of weights and counts."""
    nodes, fields = Nodes.of(samples), samples.fields()
    (counts,) = (samples.with_schema((NUM_PATHS,)).columns[NUM_PATHS],)
    starts = np.cumsum(nodes.lengths) - nodes.lengths
    paths: list[tuple[Any, ...]] = []
    weights: dict[Any, float] = {}
    numbers: dict[Any, int] = {}
    for node, parent in enumerate(nodes.parents.tolist()):
        path = paths[parent] if parent >= 0 else ()
        for place in range(starts[node], starts[node] + nodes.lengths[node]):
            assert fields.position_ids[place] == len(path)
            path = (*path, (int(fields.tokens[place]), int(fields.labels[place])))
            weights[path] = weights.get(path, 0.0) + float(fields.loss_mask[place])
            numbers[path] = numbers.get(path, 0) + int(counts[place])
        paths.append(path)
    inner = set(nodes.parents.tolist())
    leaves = Counter(path for node, path in enumerate(paths) if node not in inner)
    return leaves, weights, numbers


PATHS = st.lists(
    st.lists(st.integers(1, 2), min_size=1, max_size=7), min_size=1, max_size=6, unique_by=tuple
)


@pytest.mark.slow
@given(
    st.lists(PATHS, min_size=1, max_size=3),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([8, 16, 1000]),
    st.booleans(),
)
def test_any_shape_trains_the_same(
    records: list[list[list[int]]], multiple: int, capacity: int, keeps: bool
) -> None:
    """A node copied with its loss counts twice, one left out of a part trains another context."""
    before = read_samples([sample_of(paths) for paths in records])
    alignment = Alignment(sequence=multiple, pack=multiple)
    after, part_of = shaped(
        before, rules(alignment=alignment, capacity=capacity, keeps_trees=keeps)
    )
    assert trained(after) == trained(before)
    num_samples = after.lengths.size
    assert Nodes.of(after).tokens(num_samples, alignment).max() <= capacity
    assert keeps or PARENTS not in after.columns
    assert (np.diff(part_of) >= 0).all()
    assert set(part_of.tolist()) == set(range(before.lengths.size))


def test_what_fits_is_left_as_it_is() -> None:
    """Copies of whole batches would be made in each step."""
    samples = read_samples([sample_of([[1, 2, 3], [1, 2, 4]]), {"tokens": [5, 6]}])
    after, part_of = shaped(samples, rules())
    assert after is samples
    assert part_of.tolist() == [0, 1]


def test_a_tree_over_capacity_becomes_parts_of_neighbouring_paths() -> None:
    """Literal: a trunk of 4 with 3 branches of 2 in packs of 8 is cut after two of them."""
    trunk = [1, 1, 1, 1, 1]
    record = sample_of([[*trunk, 2], [*trunk, 3], [*trunk, 4]])
    samples = read_samples([record, {"tokens": [5]}])
    assert samples.lengths.tolist() == [4 + 2 + 2 + 2, 1]
    result = shaped(samples, rules(capacity=8))
    assert result.samples.lengths.tolist() == [8, 6, 1]
    assert result.original_index.tolist() == [0, 0, 1]
    parts = result.parts()
    assert parts is not None
    assert parts.tolist() == [1, 2, 0]
    assert result.samples.columns[NUM_PATHS].tolist()[8:12] == [0] * 4, "the copy counts not again"


def test_padding_that_costs_more_than_sharing_saves_is_left_out() -> None:
    """Literal: nodes of 1, 3 and 3 tokens in units of 8 take 24, two sequences of 4 take 16."""
    samples = read_samples([sample_of([[1, 1, 2, 3], [1, 1, 4, 5]])])
    alignment = Alignment(sequence=8, pack=8)
    assert Nodes.of(samples).tokens(1, alignment).tolist() == [24]
    after, _ = shaped(samples, rules(alignment=alignment))
    assert after.lengths.tolist() == [4, 4]


@pytest.mark.parametrize("bound", [4, 8, 32])
def test_keys_bound_a_tree(bound: int) -> None:
    """A trunk of 100,000 tokens with 40 branches would gather 4 million keys in each layer."""
    trunk = [1] * 100_001
    record = sample_of([[*trunk, 2, branch] for branch in range(3, 43)])
    samples = read_samples([record])
    after, part_of = shaped(samples, rules(capacity=10**6, keys_per_token=bound))
    nodes = Nodes.of(after)
    keys = np.zeros(part_of.size)
    np.add.at(keys, nodes.sample, nodes.depths + nodes.lengths)
    assert (keys <= bound * after.lengths).all()
    assert keys.max() < bound * 100_200
    sizes = SampleSizes.of_trees(samples, EXACT)
    assert sizes is not None
    num_parts = -(-40 // (bound - 1))  # the trunk itself, then once for each branch
    assert part_of.size == num_parts
    assert after.lengths.sum() < 1.01 * num_parts / 40 * sizes.path_tokens.sum()


def test_keys_of_a_part_are_those_of_its_joined_nodes() -> None:
    """A later turn's path alone, counted node by node, would be over the bound: each of those turns
    would be computed apart, with its whole context.
    """
    turns = [[1] * 100 * turn + [2] * 50 for turn in range(1, 41)]
    samples = read_samples([sample_of(turns)])
    after, part_of = shaped(samples, rules(capacity=10**6, keys_per_token=8))
    nodes = Nodes.of(after)
    keys = np.zeros(part_of.size)
    np.add.at(keys, nodes.sample, nodes.depths + nodes.lengths)
    assert (keys <= 8 * after.lengths).all()
    assert part_of.size == 7  # node by node: 30, of 13 times the tokens of the tree
    assert after.lengths.sum() < 3.5 * samples.lengths.sum()


@given(PATHS, st.integers(1, 8))
def test_truncated_trees_are_trees_of_truncated_paths(paths: list[list[int]], limit: int) -> None:
    """Cut by the tokens of the tree, later branches would be lost whole."""
    found = trained(truncated(read_samples([sample_of(paths)]), limit))
    labelled = [np.array(list(zip(path, [*path[1:], 9]))[:limit]) for path in paths]
    merged = merge([Path(one[:, 0], one[:, 1], np.ones(len(one), np.float32)) for one in labelled])
    assert found[1:] == trained(read_samples([merged._asdict()]))[1:]


def test_extra_columns_go_with_their_rows() -> None:
    """A number of the record's goes to each part, one of a token's to each copy."""
    record = sample_of([[1, 1, 2], [1, 1, 3]], sample_id=7)
    record["advantages"] = np.arange(len(record["tokens"])) / 2
    after, _ = shaped(read_samples([record]), rules(keeps_trees=False))
    extra = {column.name: values.tolist() for column, values in after.extra().items()}
    assert extra == {"advantages": [0, 0.5, 1, 0, 1.5, 2], "sample_id": [7, 7]}


@pytest.mark.parametrize(
    ("alignment", "tokens", "squares"),
    [(EXACT, 7, 9 + 2 * (4 + 12)), (Alignment(sequence=4, pack=4), 12, 16 + 2 * (16 + 24))],
)
def test_sizes(alignment: Alignment, tokens: int, squares: int) -> None:
    """Literal: a trunk of 3 and branches of 2: 9 + 2 (4 + 2 * 2 * 3) = 41 squares, not 49."""
    samples = read_samples([sample_of([[1, 1, 1, 1, 2], [1, 1, 1, 1, 3]])])
    found = SampleSizes.of_trees(samples, alignment)
    assert found is not None
    assert found.squares.tolist() == [41]
    assert found.padded.tolist() == [tokens]
    assert found.padded_squares.tolist() == [squares]
    assert found.path_tokens.tolist() == [10]
