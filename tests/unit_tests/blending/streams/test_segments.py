"""Proportions that change: the bound on every prefix holds within each stretch, and nothing is lost between them."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.blending.streams.segments import Segments, UntilExhausted
from tests.unit_tests.blending.streams.test_blend import WEIGHTS, check_numbers, check_prefixes, choose


@settings(deadline=None)
@given(first=WEIGHTS, change=st.integers(0, 300), seed=st.integers(0, 9), data=st.data())
def test_segments_hold_the_bound_across(first, change, seed, data):
    second = data.draw(st.lists(st.integers(0, 9), min_size=len(first), max_size=len(first)).filter(any))
    sequence = Segments([(0, first)], seed)
    at = sequence.append(change, second)
    period = sum(first) // np.gcd.reduce(first)
    assert change <= at < change + period
    children, numbers = choose(sequence, at + 500)
    check_numbers(children, numbers, len(first))
    if at:
        check_prefixes(children[:at], first)
    check_prefixes(children[at:], second)
    assert sequence.counts(at + 250) == np.bincount(children[: at + 250], minlength=len(first)).tolist()


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=6),
    seed=st.integers(0, 9),
    data=st.data(),
)
def test_until_exhausted_reads_each_once(sizes, seed, data):
    weights = data.draw(st.lists(st.integers(1, 9), min_size=len(sizes), max_size=len(sizes)))
    sequence = UntilExhausted(weights, sizes, seed)
    assert sequence.length == sum(sizes)
    children, numbers = choose(sequence, sum(sizes))
    check_numbers(children, numbers, len(sizes))
    assert np.bincount(children, minlength=len(sizes)).tolist() == sizes
    first_end = min(max(place for place, c in enumerate(children) if c == child) for child in range(len(sizes)))
    check_prefixes(children[: first_end + 1], weights)


def test_until_exhausted_by_length_mixes_to_the_end():
    """blend_epochized: weights are the lengths, so all run out together; also beyond the largest period."""
    children, _ = choose(UntilExhausted((100_003, 7), (100_003, 7), 0), 100_010)
    check_prefixes(children, (100_003, 7))
    sizes = (3_000_000, 1)
    sequence = UntilExhausted(sizes, sizes, 0)
    assert sequence.length == 3_000_001
    assert sequence.counts(3_000_001) == [3_000_000, 1]


def test_until_exhausted_beside_endless():
    sequence = UntilExhausted((1, 1), (3, None), 0)
    assert sequence.length is None
    children, _ = choose(sequence, 100)
    assert children.count(0) == 3
    assert choose(UntilExhausted((0, 1), (5, 3), 0), 3)[0] == [1, 1, 1]


def test_until_exhausted_of_any_size_and_weights():
    """Large sources are rounded, and what that leaves over is read at the end: all of it."""
    sizes = [int(size) for size in np.random.RandomState(0).pareto(1, 40) * 10**6 + 1]
    sequence = UntilExhausted(sizes, sizes, 0)
    children, numbers = sequence.choose(np.arange(sum(sizes) - 1000, sum(sizes)))
    assert sequence.counts(sum(sizes)) == sizes
    before = sequence.counts(sum(sizes) - 1000)
    for child, size in enumerate(sizes):
        assert sorted(numbers[children == child]) == list(range(before[child], size))
    weights = np.random.RandomState(1).random_sample(5)
    free = UntilExhausted(weights.tolist(), [500, 100, 900, 40, 70], 0)
    children, numbers = free.choose(np.arange(1610))
    check_numbers(children.tolist(), numbers.tolist(), 5)
    assert np.bincount(children).tolist() == [500, 100, 900, 40, 70]
