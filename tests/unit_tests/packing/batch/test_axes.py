"""Positions along axes go with their tokens, whatever form they were given in."""

from typing import Any

import numpy as np
import pytest
import torch

from megatron.packing.batch.columns import AXIS_POSITIONS
from megatron.packing.batch.layout import Alignment
from megatron.packing.batch.microbatches import layout_microbatches, layouts_of_samples, pack
from megatron.packing.batch.reading import SampleError, read_samples
from megatron.packing.batch.samples import Samples, joined


def positions_of(samples: Samples) -> list[list[list[int]]]:
    """Of each sequence, of each token, three numbers."""
    ends = np.cumsum(samples.lengths)[:-1]
    return [part.tolist() for part in np.split(samples.columns[AXIS_POSITIONS], ends)]


def some(rng: Any, length: int) -> np.ndarray:
    return rng.integers(0, 50, (3, length))


@pytest.mark.parametrize(
    "shape",
    [
        lambda positions: positions,
        lambda positions: torch.from_numpy(positions)[:, None],
        lambda positions: positions.tolist(),
    ],
    ids=["[3, L]", "[3, 1, L]", "lists"],
)
def test_each_token_keeps_its_three_positions(shape: Any) -> None:
    """Axes that are mixed up, or positions of a neighbour, move pixels within their image."""
    rng = np.random.default_rng(1)
    given = [some(rng, length) for length in (4, 3, 1)]
    items: list[dict[str, Any]] = [
        {"tokens": np.arange(each.shape[1]), "position_ids": shape(each)} for each in given
    ]
    expected = [each.T.tolist() for each in given]
    assert positions_of(read_samples(items)) == expected
    text = {"tokens": [7, 8], "position_ids": [5, 9]}  # one position stands along all axes
    samples = read_samples([text, items[0], {"tokens": [1, 2]}])
    assert positions_of(samples) == [[[5] * 3, [9] * 3], expected[0], [[0] * 3, [1] * 3]]
    assert samples.fields().position_ids.tolist() == [5, 9, 0, 1, 2, 3, 0, 1]


def test_positions_of_other_forms_of_samples() -> None:
    """Padding, other rows and other sequences of the same sample have positions too."""
    rng = np.random.default_rng(2)
    rows = rng.integers(0, 50, (3, 3, 5))  # axes, samples, tokens
    batch = {"tokens": np.ones((3, 5), int), "position_ids": rows}
    assert positions_of(read_samples(batch)) == rows.transpose(1, 2, 0).tolist()
    packed = {"tokens": [1, 2, 3, 4, 0], "cu_seqlens": [0, 1, 4], "position_ids": rows[:, 0]}
    first = rows[:, 0].T.tolist()
    assert positions_of(read_samples(packed)) == [first[:1], first[1:4]]
    collated = {
        "input_ids": torch.tensor([[0, 5, 6, 7, 8]]),
        "attention_mask": torch.tensor([[0, 1, 1, 1, 1]]),
        "position_ids": torch.from_numpy(rows[:, :1]),
    }
    assert positions_of(read_samples(collated)) == [first[1:]]


def test_positions_travel_and_are_padded_with_their_sequences() -> None:
    """On the wire, joined with text of another rank, and on stages without tokens as well."""
    rng = np.random.default_rng(3)
    lengths = [5, 2, 7, 1]
    given = [some(rng, length) for length in lengths]
    samples = read_samples([{"tokens": each[0], "position_ids": each} for each in given])
    order = np.array([2, 0, 3, 1])
    taken = samples.take(order)
    received = Samples.from_words(taken.to_words(), taken.sizes, taken.schema)
    expected = [given[i].T.tolist() for i in order]
    assert positions_of(received) == expected
    text = read_samples({"tokens": [1, 2, 3]})
    assert positions_of(joined([text, received])) == [[[0] * 3, [1] * 3, [2] * 3], *expected]
    alignment = Alignment(sequence=4, pack=8)
    layouts = layouts_of_samples(received, np.array([1, 3]), alignment)
    packs = pack(received, np.array([1, 3]), layouts)
    for packed, of_layout in zip(
        packs, layout_microbatches(layouts, samples=received), strict=True
    ):
        assert torch.equal(packed["axis_positions"], of_layout["axis_positions"])
    of_second = packs[1]["axis_positions"]
    assert of_second.shape == (16, 3)  # 5 and 3, 1 and 3, 2 and 2 of padding
    assert of_second[:5].tolist() == expected[1]
    assert of_second[8].tolist() == expected[2][0]
    assert not of_second[5:8].any()


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        (np.zeros((3, 2), int), r"'axis_positions' must be as long as 'tokens' \(3\), but is 2"),
        (np.zeros((3, 2, 3), int), r"must be \[3, L\] or \[3, 1, L\], but are \[3, 2, 3\]"),
        (np.full((3, 3), 0.5), "'position_ids' must be integers"),
        (np.full((3, 3), 2**31), r"'position_ids' must be below 2\*\*31, but has 2147483648"),
    ],
)
def test_positions_that_cannot_be_are_refused(positions: Any, message: str) -> None:
    """By name, and before any step is lost."""
    with pytest.raises((ValueError, SampleError), match=message):
        read_samples({"tokens": [1, 2, 3], "position_ids": positions})
