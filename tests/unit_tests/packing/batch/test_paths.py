"""Paths with ids: each trained token is in the sums of the paths that train it, whatever the tree's
shape.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.packing.batch.layout import Alignment
from megatron.packing.batch.microbatches import Microbatch, layouts_of_samples, pack
from megatron.packing.batch.paths import merge_with_fields, trained_by
from megatron.packing.batch.reading import read_samples
from megatron.packing.batch.samples import Samples
from megatron.packing.batch.tree import Path, TreeError
from megatron.packing.batch.tree_cuts import TreeRules
from megatron.packing.batch.tree_shapes import shaped, truncated


def path_of(tokens: list[int], mask: list[float], last: int = 0) -> Path:
    labels = np.array([*tokens[1:], last])
    return Path(np.array(tokens), labels, np.array(mask, np.float32))


def test_literal_paths() -> None:
    """A path that ends within a node comes before those that go on, whatever the order given."""
    sample = merge_with_fields(
        [
            path_of([7, 8, 9], [0, 1, 1], last=3),
            path_of([7, 8, 5], [0, 1, 1]),
            path_of([7, 8, 9, 3], [0, 1, 1, 1]),
        ],
        ids=[10, 11, 12],
        reward=[[0.5], [1], [2]],
    )
    assert sample["tokens"].tolist() == [7, 8, 9, 3, 8, 5]
    assert sample["labels"].tolist() == [8, 9, 3, 0, 5, 0]
    assert sample["num_paths"].tolist() == [0, 2, 2, 1, 1, 1]
    assert sample["first_path"].tolist() == [0, 0, 0, 1, 2, 2]
    assert sample["path_ids"].tolist() == [10, 12, 11]
    assert sample["path_reward"].tolist() == [[0.5], [2], [1]]


def test_a_token_that_only_one_path_trains_is_computed_for_each() -> None:
    """Neighbours in the order of paths could not say which of them train it."""
    masks: list[list[float]] = [[0, 1, 1], [0, 0, 1], [0, 1, 1]]
    sample = merge_with_fields([path_of([6, 7, 8], mask) for mask in masks], ids=[1, 2, 3])
    assert sample["tokens"].tolist() == [6, 7, 8, 7, 8]
    assert sample["loss_mask"].tolist() == [0, 2, 2, 0, 1]
    assert sample["path_ids"].tolist() == [1, 3, 2]
    pairs = trained_by(read_samples(sample))
    assert pairs.token.tolist() == [1, 1, 2, 2, 4]
    assert pairs.path.tolist() == [0, 1, 0, 1, 2]


PATHS = st.lists(
    st.lists(st.tuples(st.integers(0, 1), st.booleans()), min_size=1, max_size=6),
    min_size=1,
    max_size=6,
)


def sums_by_id(microbatches: list[Microbatch]) -> dict[int, float]:
    """For each path the sum of its trained tokens' values, which are below a thousand each."""
    sums: dict[int, float] = {}
    for microbatch in microbatches:
        token, path = microbatch["path_pairs"]
        values = (microbatch["labels"] + 3 * microbatch["position_ids"])[token].tolist()
        ids = microbatch["extra_per_path"]["path_ids"].tolist()
        for value, number in zip(values, path.tolist()):
            sums[ids[number]] = sums.get(ids[number], 0) + 1000 + value
    return sums


def packed(samples: Samples, alignment: Alignment) -> list[Microbatch]:
    half = samples.lengths.size // 2
    number = np.array([half, samples.lengths.size - half])
    return pack(samples, number, layouts_of_samples(samples, number, alignment))


@pytest.mark.slow
@given(st.lists(PATHS, min_size=1, max_size=3), st.sampled_from([1, 4]), st.sampled_from([6, 40]))
def test_sums_of_paths_are_those_of_each_alone(
    records: list[list[list[tuple[int, bool]]]], alignment: int, capacity: int
) -> None:
    """Chosen and rejected answers would be compared by each other's tokens."""
    samples: list[dict[str, Any]] = []
    expected: dict[int, float] = {}
    for record in records:
        paths = [
            path_of([token for token, _ in places], [float(one) for _, one in places])
            for places in record
        ]
        # Paths of one tree begin alike: here by the first of two trained tokens.
        paths = [
            path._replace(
                tokens=np.append(7, path.tokens),
                labels=np.append(7, path.labels),
                loss_mask=np.append(np.float32(1), path.loss_mask),
            )
            for path in paths
        ]
        ids = [1000 * len(samples) + number for number in range(len(paths))]
        samples.append(merge_with_fields(paths, ids=ids))
        for number, path in zip(ids, paths):
            values = 1000 + path.labels + 3 * np.arange(len(path.tokens))
            if path.loss_mask.any():
                expected[number] = float(values[path.loss_mask != 0].sum())
    read = read_samples(samples)
    sent = Samples.from_words(read.to_words(), read.sizes, read.schema)
    layout = Alignment(sequence=alignment, pack=alignment)
    rules = TreeRules(
        alignment=layout, capacity=capacity, linear=1, quadratic=0.1, keys_per_token=32
    )
    cut = shaped(sent, rules).samples
    for each in (read, sent, cut):
        assert sums_by_id(packed(each, layout)) == expected
    whole = {name: values.tolist() for name, values in columns_of(cut).items()}
    counts = dict(zip(whole["path_ids"], whole["path_tokens"]))
    assert {number: int(total) // 1000 for number, total in expected.items()} == {
        number: count for number, count in counts.items() if count
    }, "of whole trees, also in their parts"


def columns_of(samples: Samples) -> dict[str, Any]:
    return {column.name: values for column, values in samples.columns.items()}


def test_paths_that_are_truncated_are_counted_again() -> None:
    """Every pack would have a part of them only."""
    paths = [path_of([1, 1, 2, 3], [1, 1, 1, 1]), path_of([1, 1, 4], [1, 1, 1])]
    samples = read_samples(merge_with_fields(paths, ids=[1, 2]))
    assert columns_of(samples)["path_tokens"].tolist() == [4, 3]
    assert columns_of(truncated(samples, 1))["path_tokens"].tolist() == [1, 1]
    plain = {"tokens": [1, 2, 3], "labels": [2, 3, 4], "path_ids": [5]}
    assert columns_of(truncated(read_samples([plain]), 2))["path_tokens"].tolist() == [2]


def test_sequences_are_paths_of_their_own() -> None:
    """A batch of which some samples are trees has rows per path in all of them."""
    tree = merge_with_fields([path_of([1, 2], [0, 1]), path_of([1, 3], [0, 1])], ids=[8, 9])
    plain = {"tokens": [1, 2, 3], "cu_seqlens": [0, 1, 3], "path_ids": [5, 6]}
    samples = read_samples([plain, tree])
    assert columns_of(samples)["path_ids"].tolist() == [5, 6, 8, 9]
    assert trained_by(samples).path.tolist() == [1, 2, 3], "the last label of each is not known"


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"path_ids": [1]}, "'first_path' must number 1 paths"),
        ({"path_reward": [1.0]}, "'path_reward' must have one row per path, as 'path_ids' (2)"),
        ({"first_path": None}, "'path_ids' must have one row per sequence (1), but has 2"),
        ({"first_path": [1, 1, 1]}, "'first_path' must number 2 paths"),
        ({"first_path": [0, 0, 2]}, "'first_path' must number 2 paths"),
    ],
)
def test_fields_that_are_not_per_path_are_refused(changes: dict[str, Any], fault: str) -> None:
    """An answer would have another one's reward."""
    paths = [path_of([1, 2], [0, 1], last=last) for last in (3, 4)]
    tree = merge_with_fields(paths, ids=[8, 9])
    with pytest.raises(ValueError, match=r".") as caught:
        read_samples([{**tree, **changes}])
    assert str(caught.value).startswith(fault)


def test_wrong_paths_are_refused() -> None:
    """A token of weights 1 and -1 would have no loss at all, of which both paths need one."""
    paths = [path_of([1, 2], [0, 1]), path_of([1, 3], [0, -1])]
    with pytest.raises(TreeError, match=r"'ids' must have one row per path \(2\), but has 1"):
        merge_with_fields(paths, ids=[1])
    with pytest.raises(TreeError, match="weights of at least 0"):
        merge_with_fields(paths, ids=[1, 2])


def test_a_pair_is_one_tree_or_refused() -> None:
    """Two trees may come into two packs, and each half of a pair would be compared with a half of
    another one.
    """
    pair = [[1, 5, 6], [1, 7, 8]]
    sample = merge_with_fields([path_of(tokens, [0, 1, 1]) for tokens in pair], sign=[1, -1])
    assert sample["parents"].tolist() == [-1, 0, 0], "a token without a loss has any label"
    prompt = [np.array([-100, *tokens[2:], 0]) for tokens in pair]
    sample = merge_with_fields(
        [
            Path(np.array(tokens), labels, np.ones(3, np.float32))
            for tokens, labels in zip(pair, prompt)
        ],
        sign=[1, -1],
    )
    assert sample["num_paths"].tolist() == [0, 1, 1, 1, 1], "labels of -100 are masked"
    whole = path_of([1, 2], [1, 1])
    for other in (path_of([3, 2], [1, 1]), path_of([1, 2], [0, 1]), path_of([1, 4], [1, 1])):
        with pytest.raises(TreeError, match="begin with one token, label and mask"):
            merge_with_fields([whole, other], sign=[1, -1])
