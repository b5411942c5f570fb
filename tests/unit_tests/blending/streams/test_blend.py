"""Sequences of a blend: true to the weights at every prefix, without gaps, and the same however they are asked for."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.blending.streams.blend import ExactSequence, RandomSequence
from megatron.blending.streams.weights import integer_weights

WEIGHTS = st.lists(st.integers(0, 50), min_size=1, max_size=8).filter(any)


def choose(sequence, count, start=0):
    children, numbers = sequence.choose(np.arange(start, start + count))
    return children.tolist(), numbers.tolist()


def check_numbers(children, numbers, num_children):
    for child in range(num_children):
        own = [number for number, chosen in zip(numbers, children) if chosen == child]
        assert own == list(range(len(own)))


def check_prefixes(children, weights):
    """Within one output of the weights at every prefix."""
    total = sum(weights)
    given_ = np.cumsum(np.eye(len(weights), dtype=np.int64)[children], axis=0)
    due = np.arange(1, len(children) + 1)[:, None] * np.array(weights)
    assert (abs(given_ * total - due) < total).all()


@settings(deadline=None)
@given(weights=WEIGHTS, seed=st.integers(0, 100))
def test_exact_at_every_prefix(weights, seed):
    """Random draws were off by 2 % after 300 batches in energon."""
    children, numbers = choose(ExactSequence(weights, seed), 3000)
    check_prefixes(children, weights)
    check_numbers(children, numbers, len(weights))


@settings(max_examples=10, deadline=None)
@given(weights=st.lists(st.floats(1e-3, 1), min_size=2, max_size=12), seed=st.integers(0, 5))
def test_exact_for_any_weights(weights, seed):
    whole = integer_weights(weights)
    children, numbers = choose(ExactSequence(whole, seed), 10_000)
    check_prefixes(children, whole)
    check_numbers(children, numbers, len(weights))


@settings(deadline=None)
@given(weights=WEIGHTS, start=st.integers(0, 10**9), seed=st.integers(0, 9))
def test_exact_anywhere(weights, start, seed):
    """A rank asks for a part of the sequence only, a resumed run begins in its middle."""
    sequence = ExactSequence(weights, seed)
    children, numbers = choose(sequence, 200, start)
    before = sequence.counts(start)
    assert sum(before) == start
    for child, count in enumerate(before):
        assert abs(count - start * weights[child] / sum(weights)) < 1 + 1e-6
        own = [number for number, chosen in zip(numbers, children) if chosen == child]
        assert own == list(range(count, count + len(own)))
    fresh, at = ExactSequence(weights, seed), [5, 3, 199]
    assert choose(fresh, 1, start + 199) == ([children[199]], [numbers[199]])
    assert fresh.choose(np.array([start + place for place in at])).children.tolist() == [children[p] for p in at]


def test_weight_zero_is_never_chosen():
    children, _ = choose(ExactSequence((1, 0, 2), 0), 5000)
    assert set(children) == {0, 2}


@pytest.mark.parametrize(("weights", "num_ranks"), [((1, 1), 2), ((2, 1), 3), ((1, 1, 1, 1), 4), ((3, 1), 4)])
def test_no_rank_sees_one_child_only(weights, num_ranks):
    """A pattern as short as the number of ranks would give each rank a source of its own."""
    children = np.array(choose(ExactSequence(weights, 0), 4096)[0])
    for rank in range(num_ranks):
        shares = np.bincount(children[rank::num_ranks], minlength=len(weights)) / (4096 / num_ranks)
        assert (shares > 0.5 * np.array(weights) / sum(weights)).all()


def test_position_of():
    sequence = ExactSequence((3, 2), 0)
    for number in (0, 1, 17, 10_000):
        at = sequence.position_of(1, number)
        assert choose(sequence, 1, at) == ([1], [number])


def test_golden_values():
    """A changed sequence would make a resumed run read some records twice and others never."""
    assert choose(ExactSequence((5, 3, 2), 1), 20)[0] == GOLDEN_EXACT
    assert choose(RandomSequence((5, 3, 2), 1), 20)[0] == GOLDEN_RANDOM


GOLDEN_EXACT = [1, 0, 2, 0, 0, 1, 1, 0, 2, 0, 1, 0, 0, 2, 0, 1, 0, 1, 2, 0]
GOLDEN_RANDOM = [1, 0, 2, 0, 1, 0, 0, 0, 1, 1, 2, 0, 2, 1, 0, 2, 0, 0, 0, 2]


def test_random_is_independent_draws():
    """energon's statistics: the spread of the counts of 100 outputs is that of a binomial."""
    sequence = RandomSequence((1, 1), 3)
    children = np.array(choose(sequence, 200_000)[0])
    counts = children.reshape(-1, 100).sum(axis=1)
    assert 49.5 < counts.mean() < 50.5
    assert 4.6 < counts.std() < 5.4
    repeats = (children[1:] == children[:-1]).mean()
    assert 0.49 < repeats < 0.51


def test_random_numbers_have_no_gaps():
    """At any output, as weights may change after it."""
    sequence = RandomSequence((5, 3, 2), 1)
    children, numbers = (np.array(column) for column in choose(sequence, 2 * 65536))
    check_numbers(children.tolist(), numbers.tolist(), 3)
    assert sequence.counts(2 * 65536) == np.bincount(children).tolist()
    assert RandomSequence((5, 3, 2), 1).counts(70_000) == np.bincount(children[:70_000]).tolist()


def test_random_memory_is_bounded():
    sequence = RandomSequence((1, 1), 0)
    choose(sequence, 1, 65536 * 2000)
    assert len(sequence._before) < 100
    assert choose(sequence, 5, 65536 * 3) == choose(RandomSequence((1, 1), 0), 5, 65536 * 3)
