"""Intervals of a blend's outputs, and the order that keeps them: compiled and in Python alike."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.blending.order import compiled, proportions
from megatron.blending.order.finite import until_exhausted
from megatron.blending.order.proportions import Proportions
from megatron.blending.order.shares import Shares, _earliest_deadline_first

built = pytest.mark.skipif(
    compiled.EARLIEST_DEADLINE_FIRST is None,
    reason="megatron.blending.order._core is not built (setup.py found no C++ compiler)",
)
WEIGHT = st.one_of(st.integers(0, 9), st.integers(1, 5000), st.floats(1e-4, 1))


@built
@settings(max_examples=60)
@given(data=st.data(), num_children=st.integers(1, 9), num_segments=st.integers(1, 4))
def test_compiled_order_is_that_of_python(data, num_children, num_segments):
    """A run that goes on where no compiler is would read some records twice and others never."""
    segments, start = [], 0
    for _ in range(num_segments):
        weights = st.lists(WEIGHT, min_size=num_children, max_size=num_children).filter(any)
        segments.append((start, data.draw(weights)))
        start += data.draw(st.integers(1, 400))
    # Shares that begin ahead or behind, as after a change, leave places with nothing released.
    ahead = [Fraction(data.draw(st.integers(-3, 3)), 4) for _ in range(num_children - 1)]
    shares = Shares(segments, [*ahead, -sum(ahead, Fraction(0))])
    counts, end = np.zeros(num_children, np.int64), start + 300
    found, expected = np.empty((2, end, 4), np.int64)
    after = shares._place(0, end, counts, found)
    assert (after == _earliest_deadline_first(shares, 0, end, counts, expected)).all()
    assert (found == expected).all()
    assert (after == np.bincount(found[:, 0], minlength=num_children)).all()
    at = end // 2
    half = shares.advanced(0, at, counts)
    assert (found[at:] == np.array(shares.order(at, end, half)).T).all()


def test_python_alone_gives_the_same_order(monkeypatch):
    """Where there is no compiler; the whole path, not the loop alone."""
    segments = [(0, (0.123, 0.5, 3)), (9000, (2, 1, 1)), (20_000, (1, 7, 0.25))]
    asked = np.random.RandomState(0).randint(0, 60_000, 500)
    found = Proportions(segments, 3).choose(asked)
    monkeypatch.setattr(compiled, "EARLIEST_DEADLINE_FIRST", None)
    proportions._exchanged.cache_clear()
    alone = Proportions(segments, 3).choose(asked)
    assert (found.children == alone.children).all()
    assert (found.numbers == alone.numbers).all()


@built
def test_a_jump_makes_the_outputs_around_it_alone():
    """A process that resumes beyond a million outputs computed all before it, for seconds."""
    weights = (0.123456789, 0.3333337, 0.5432095)
    proportions._exchanged.cache_clear()
    sequence = Proportions([(0, weights)], 1)
    at = 5_000_000_123
    found = sequence.choose(np.arange(at, at + 100))
    assert proportions._exchanged.cache_info().misses <= 2
    counts = sequence.counts(at)
    assert sum(counts) == at
    for child, weight in enumerate(weights):
        share = Fraction(str(weight)) * at / sum(Fraction(str(each)) for each in weights)
        assert abs(counts[child] - share) < 1 + at / 2**20  # the period is rounded to 2**20
        own = found.numbers[found.children == child]
        assert (own == counts[child] + np.arange(len(own))).all()


def within_one_of(segments, sequence, start, length):
    """Whether each prefix of some outputs is within one of the shares, and of the sizes."""
    shares = Shares(segments, [Fraction(0)] * len(segments[0][1]))
    children = sequence.choose(np.arange(start, start + length)).children
    given_ = np.array(sequence.counts(start)) + np.cumsum(
        np.eye(len(shares.at(0)), dtype=np.int64)[children], axis=0
    )
    places = range(0, length, max(length // 50, 1))
    return all(
        abs(count - share) < 1
        for place in places
        for count, share in zip(given_[place].tolist(), shares.at(start + place + 1))
    )


def test_hundreds_of_finite_sources_with_odd_weights():
    """300 of them took 16 seconds before the first sample: shares had 2,700 bits."""
    draws = np.random.RandomState(0)
    sizes = draws.randint(50, 5000, 120).tolist()
    weights = draws.random_sample(120).tolist()
    segments = until_exhausted(weights, sizes)
    total = sum(sizes)
    assert len(segments) <= 2 * len(sizes)
    assert Shares(segments, [Fraction(0)] * 120).unit <= 2**16
    sequence = Proportions(segments, 1)
    assert sequence.counts(total) == sizes
    for start in (0, 70_001, total - 20_000):
        assert within_one_of(segments, sequence, start, 20_000)
    found = sequence.choose(np.arange(total))
    for child, size in enumerate(sizes):
        assert (found.numbers[found.children == child] == np.arange(size)).all()
    # In proportion to the weights, until the first one runs out.
    first = int(segments[1][0])
    shares = first * np.array(weights) / sum(weights)
    assert abs(sequence.counts(first) - shares).max() < 1 + first / 2**16


def test_many_finite_sources_beside_endless_ones_and_by_size():
    sizes = [*range(3, 40), None]
    segments = until_exhausted([1 + child % 7 for child in range(38)], sizes)
    sequence = Proportions(segments, 0)
    assert sequence.counts(100_000)[:-1] == sizes[:-1]
    assert set(sequence.choose(np.arange(5000, 5100)).children.tolist()) == {37}
    sizes = [10**6 + 7 * child**3 for child in range(40)]
    segments = until_exhausted(sizes, sizes)
    sequence = Proportions(segments, 0)
    assert sequence.counts(sum(sizes)) == sizes
    half = sum(sizes) // 2
    # Weights are rounded to a period of 2**16.
    off = max(abs(2 * count - size) for count, size in zip(sequence.counts(half), sizes))
    assert off < 2 + 2 * half / 2**16
