"""Weights that change as planned: within one output of what they sum to at every prefix, also behind each change."""

import time
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.blending.streams.planned import PlannedSequence
from megatron.blending.streams.shares import Shares
from megatron.blending.streams.weights import WeightSchedule, integer_weights
from tests.unit_tests.blending.streams.test_blend import check_numbers, choose

WEIGHT = st.one_of(st.just(0), st.integers(1, 9), st.integers(1, 5000), st.sampled_from([1e-6, 1e-3, 0.37]))


def furthest_off(children, segments, start=0, counts=None, shares=None):
    """How far a child is from what the weights sum to, at any prefix: exactly. `start`, `counts`, `shares`: before."""
    num_children = len(segments[0][1])
    counts = counts or [0] * num_children
    given_ = np.cumsum(np.eye(num_children, dtype=np.int64)[children], axis=0).astype(object)
    shares = list(shares or [Fraction(0)] * num_children)
    worst = Fraction(0)
    ends = [*(first for first, _ in segments[1:]), start + len(children)]
    for (first, weights), end in zip(segments, ends):
        whole = integer_weights(weights)
        first, end = max(first, start), min(end, start + len(children))
        if first >= end:
            continue
        num = np.arange(1, end - first + 1).astype(object)
        for child, weight in enumerate(whole):
            share, total = shares[child], sum(whole)
            due = share.numerator * total + num * weight * share.denominator
            unit = share.denominator * total
            off = abs((given_[first - start : end - start, child] + counts[child]) * unit - due).max()
            worst = max(worst, Fraction(int(off), unit))
            shares[child] += Fraction((end - first) * weight, total)
    return worst


def outputs_without_weight(children, segments):
    ends = [*(start for start, _ in segments[1:]), len(children)]
    return sum(not weights[c] for (start, weights), end in zip(segments, ends) for c in children[start:end])


@st.composite
def schedules(draw, max_children, max_length, weight):
    num_children = draw(st.integers(1, max_children))
    weights = st.lists(weight, min_size=num_children, max_size=num_children).filter(any)
    lengths = draw(st.lists(st.integers(1, max_length), min_size=2, max_size=6))
    starts = [0, *np.cumsum(lengths).tolist()]
    return [(start, tuple(draw(weights))) for start in starts[:-1]], starts[-1]


def check_planned(segments, length):
    num_children = len(segments[0][1])
    sequence = PlannedSequence(segments, 1)
    children, numbers = choose(sequence, length)
    assert furthest_off(children, segments) < 1
    check_numbers(children, numbers, num_children)
    # A rank that resumes asks for what comes later only, in any order.
    asked = np.random.RandomState(length).permutation(length)[:50]
    found = PlannedSequence(segments, 1).choose(asked)
    assert found.children.tolist() == [children[place] for place in asked]
    assert found.numbers.tolist() == [numbers[place] for place in asked]
    for place in [*asked[:3].tolist(), *(start for start, _ in segments)]:
        counts = np.bincount(children[:place], minlength=num_children).tolist()
        assert PlannedSequence(segments, 1).counts(place) == sequence.counts(place) == counts


@settings(max_examples=60, deadline=None)
@given(schedule=schedules(12, 3000, WEIGHT))
def test_within_one_at_every_prefix(schedule):
    """Deadlines as if each segment lasted for ever let children be off by up to two behind its end."""
    check_planned(*schedule)


@settings(max_examples=150, deadline=None)
@given(schedule=schedules(7, 20, st.one_of(st.just(0), st.integers(1, 9))))
def test_within_one_where_weights_come_and_go(schedule):
    """Outputs that a weight of 0 cuts must stand before it or after; all of them before, or none, are too many."""
    check_planned(*schedule)


def test_within_one_where_no_order_spares_a_pause():
    """Then the output that was begun stands in it, once: left out, it would put the others ahead."""
    segments = [(0, (1, 2, 2, 1, 2)), (3, (0, 2, 1, 0, 3)), (13, (2, 0, 0, 1, 0)), (19, (0, 8, 0, 0, 1))]
    segments.append((31, (1, 1, 1, 1, 0)))
    check_planned(segments, 73)
    assert outputs_without_weight(choose(PlannedSequence(segments, 1), 73)[0], segments) <= 1


@settings(max_examples=60, deadline=None)
@given(
    first=st.lists(st.integers(1, 50), min_size=2, max_size=10),
    length=st.integers(1, 300),
    is_kept=st.lists(st.booleans(), min_size=10, max_size=10),
)
def test_nothing_of_a_child_that_is_switched_off(first, length, is_kept):
    """A source whose files are gone by then would be asked for the half sample that it is owed."""
    second = [weight if keep else 0 for weight, keep in zip(first, is_kept)]
    segments = [(0, first), (length, second if any(second) else first)]
    children, _ = choose(PlannedSequence(segments, 3), length + 200)
    assert furthest_off(children, segments) < 1
    assert outputs_without_weight(children, segments) == 0


def check_around(segments, place, width=3000):
    """Against the shares there, without all that comes before."""
    sequence = PlannedSequence(segments, 0)
    before, counts = place - width, sequence.counts(place - width)
    shares = [Fraction(0)] * len(counts)
    ends = [*(start for start, _ in segments[1:]), None]
    for (start, weights), end in zip(segments, ends):
        num = max(0, min(before, before if end is None else end) - start)
        whole = integer_weights(weights)
        shares = [share + Fraction(num * weight, sum(whole)) for share, weight in zip(shares, whole)]
    children, numbers = choose(sequence, 2 * width, before)
    assert furthest_off(children, segments, before, counts, shares) < 1
    for child, count in enumerate(counts):
        own = [number for number, chosen in zip(numbers, children) if chosen == child]
        assert own == list(range(count, count + len(own)))


def test_long_segments():
    """Tables of 10**9 outputs would not fit; the repetition must end before the outputs that look ahead."""
    segments = [(0, (5, 3, 2)), (10**9 + 1, (1, 1, 1)), (2 * 10**9 + 4, (0, 2, 1)), (3 * 10**9, (7, 0, 3))]
    begin = time.process_time()
    for start, _ in segments[1:]:
        check_around(segments, start)
    assert time.process_time() - begin < 20
    sequence = PlannedSequence(segments, 0)
    choose(sequence, 10, 3 * 10**9)
    assert len(sequence._stretches) < 10


def test_a_child_of_one_in_a_hundred_thousand():
    """Its output's window goes on behind several segments, and begins long before."""
    segments = [(0, (99_999, 1)), (250_000, (3, 1)), (250_013, (99_998, 2)), (1_000_000, (1, 1))]
    for start, _ in segments[1:]:
        check_around(segments, start, 200)
    children, _ = choose(PlannedSequence(segments, 0), 1_000_100)
    assert furthest_off(children, segments) < 1


def test_linear_schedule_of_thousands_of_steps():
    """A table and its random exchanges for each of them: half a millisecond."""
    schedule = WeightSchedule(((0, (0.9, 0.1, 0)), (2000, (0.1, 0.7, 0.2))), 8, "linear", num_pieces=2000)
    begin = time.process_time()
    children, _ = choose(PlannedSequence(schedule.segments(), 0), 17_000)
    assert time.process_time() - begin < 10
    assert furthest_off(children, schedule.segments()) < 1


def test_golden_values():
    """A changed sequence would make a resumed run read some records twice and others never."""
    segments = [(0, (1, 1, 1, 1)), (10, (3, 1, 0, 0)), (21, (1, 2, 3, 0))]
    assert choose(PlannedSequence(segments, 1), 32)[0] == GOLDEN
    constant = PlannedSequence([(0, (5, 3, 2))], 1, first_number=4)
    assert choose(constant, 20)[0] == GOLDEN_CONSTANT


GOLDEN = [2, 3, 0, 1, 3, 1, 0, 2, 0, 2, 0, 1, 1, 0, 0, 0, 1, 0, 0, 0, 0, 1, 2, 0, 2, 1, 2, 1, 2, 1, 2, 0]
GOLDEN_CONSTANT = [1, 0, 2, 0, 0, 2, 1, 0, 1, 0, 2, 0, 1, 0, 0, 2, 1, 0, 1, 0]


def test_neighbours_are_exchanged_within_segments_that_change():
    """Else a short pattern gives one rank always the same child."""
    segments = [(0, (1, 1)), (3000, (2, 2.01))]
    children = np.array(choose(PlannedSequence(segments, 0), 3000)[0])
    assert 0.3 < (children[::2] == 0).mean() < 0.7
    assert not (children == np.array(choose(PlannedSequence(segments, 5), 3000)[0])).all()


@settings(max_examples=40, deadline=None)
@given(schedule=schedules(6, 300, WEIGHT), data=st.data())
def test_shares_are_exact(schedule, data):
    """Rounded shares would drift, over thousands of segments, or make a deadline one place late."""
    segments, length = schedule
    shares, child = Shares(segments), data.draw(st.integers(0, len(segments[0][1]) - 1))
    exact, ends = [Fraction(0)], [*(start for start, _ in segments[1:]), length]
    for (start, weights), end in zip(segments, ends):
        whole = integer_weights(weights)
        exact += [exact[-1] + Fraction(num * whole[child], sum(whole)) for num in range(1, end - start + 1)]
    for place in range(0, length, 7):
        assert abs(Fraction(shares.in_units(place)[child], 2**40) - exact[place]) < Fraction(1, 2**38)
    for output in range(int(exact[-1])):
        assert shares.deadline(child, output) == next(k for k, share in enumerate(exact) if share >= output + 1) - 1
    for number, segment in enumerate(shares.segments):
        for output in range(segment.whole[child] + 1, int(exact[ends[number]])):
            assert shares.release(number, child, output) == next(k for k, s in enumerate(exact) if s > output) - 1


@pytest.mark.parametrize(
    ("counts", "can"),
    [((1, 0, 1, 0), True), ((1, 1, 0, 0), True), ((2, 0, 0, 0), True), ((0, 0, 1, 1), False)],
)
def test_what_can_go_on(counts, can):
    """After two outputs two of four are behind by a half: if they get all the weight, both are due at once."""
    shares = Shares([(0, (1, 1, 1, 1)), (2, (1, 1, 0, 0))])
    assert shares.can_go_on(1, counts) == can
