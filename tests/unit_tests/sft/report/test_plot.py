"""The picture of a run."""

import math

import pytest


def test_running_means_are_few_and_whole_at_the_ends():
    """A mean at each step, over 2 % of them, took minutes at the end of each run of 10^5 steps."""
    pytest.importorskip("matplotlib")
    from megatron.sft.report.plot import MEANS_DRAWN, running_means

    assert running_means([]) == ([], [])
    assert running_means([1.0, math.nan, 4.0]) == (
        [0, 1, 2],
        pytest.approx([1, math.nan, 4], nan_ok=True),
    )
    values = [float(number) for number in range(100)]
    assert running_means(values) == (list(range(100)), values)
    for count in (1000, 1001, 10_007):
        places, means = running_means([float(number) for number in range(count)])
        assert (places[0], places[-1]) == (0, count - 1)
        assert len(places) <= MEANS_DRAWN + 1
        assert means == [float(place) for place in places], "as many before as after"
