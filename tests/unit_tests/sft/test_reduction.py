"""What a step comes to, out of sums over ranks."""

import math

import numpy as np
import pytest

from megatron.sft.data.counts import COLUMNS, Counts

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def reduced(loss_sum, num_tokens, counts, source_losses=()):
    from megatron.sft.reduction import Reduced

    return Reduced(loss_sum, num_tokens, False, counts, np.array(source_losses, np.float64).reshape(2, -1))


@pytest.mark.parametrize(("loss_sum", "num_tokens", "expected"), [(6.0, 4, 1.5), (0.0, 4, 0.0), (0.0, 0, 0.0)])
def test_loss_is_the_mean_per_token(loss_sum, num_tokens, expected):
    """A batch of prompts only has no token in the loss: NaN would end in every metric after it."""
    assert reduced(loss_sum, num_tokens, Counts.none(1)).loss == expected


def test_by_source():
    """A mean over another source's tokens, or a loss of 0 where there is none, says that a source is learned."""
    table = np.zeros((4, len(COLUMNS)), np.int64)
    table[:, 0], table[:, 1] = (3, 1, 0, 2), (30, 10, 0, 20)
    table[2, -1] = 5
    result = reduced(9.0, 8, Counts(table), [[6.0, 3.0, 0.0, 0.0], [2, 6, 0, 0]])
    sources = result.by_source("abcd")
    assert list(sources) == ["a", "b", "d"]
    assert (sources["a"].loss, sources["b"].loss, sources["b"].sequences, sources["b"].tokens) == (3.0, 0.5, 1, 10)
    assert math.isnan(sources["d"].loss)
    assert result.dropped_by_source("abcd") == {"c": {"bad sample": 5}}


def test_one_source_is_not_told_apart():
    """Its loss is the loss."""
    table = np.ones((1, len(COLUMNS)), np.int64)
    assert reduced(1.0, 1, Counts(table)).by_source(["only"]) == {}
