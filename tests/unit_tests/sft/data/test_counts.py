"""Counts by source are a table that sums over ranks."""

import numpy as np

from megatron.sft.data.counts import COLUMNS, Counts


def test_columns():
    """A column taken for another reports cut samples as dropped, or tokens as sequences."""
    table = np.arange(2 * len(COLUMNS)).reshape(2, -1)
    counts = Counts(table)
    assert (counts.num_sequences, counts.num_tokens, counts.square_sum, counts.num_cut) == (
        12,
        14,
        16,
        18,
    )
    assert counts.num_dropped == sum(range(4, 12)) + sum(range(16, 24))
    assert counts.dropped(0) == {
        "over length": 4,
        "no loss token": 5,
        "no loss token left after truncation": 6,
        "empty answer": 7,
        "equal answers": 8,
        "empty answer in one of several pairs": 9,
        "equal answers in one of several pairs": 10,
        "bad sample": 11,
    }
    assert counts.of("tokens").tolist() == [1, 13]


def test_difference_and_equality():
    """A step's counts are the difference of two totals."""
    one = Counts(np.ones((2, len(COLUMNS)), np.int64))
    assert one - one == Counts.none(2)
    assert one != Counts.none(2)
    assert Counts.none(2).dropped(1) == {}
