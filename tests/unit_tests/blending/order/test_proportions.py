"""Proportions of a blend: within one output of what its weights sum to at every prefix, wherever
they change.
"""

import time
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.blending.order.proportions import Proportions, until_exhausted
from megatron.blending.order.weights import WeightSchedule, integer_weights

WEIGHTS = st.lists(st.integers(0, 50), min_size=1, max_size=8).filter(any)


def choose(sequence, count, start=0):
    children, numbers = sequence.choose(np.arange(start, start + count))
    return children.tolist(), numbers.tolist()


def check_numbers(children, numbers, num_children):
    children, numbers = np.array(children), np.array(numbers)
    for child in range(num_children):
        own = numbers[children == child]
        assert (own == np.arange(len(own))).all()


def check_prefixes(children, weights):
    """Within one output of the weights at every prefix."""
    total = sum(weights)
    given_ = np.cumsum(np.eye(len(weights), dtype=np.int64)[children], axis=0)
    due = np.arange(1, len(children) + 1)[:, None] * np.array(weights)
    assert (abs(given_ * total - due) < total).all()


@given(weights=WEIGHTS, seed=st.integers(0, 100))
def test_exact_at_every_prefix(weights, seed):
    """Random draws were off by 2 % after 300 batches in energon."""
    children, numbers = choose(Proportions([(0, weights)], seed), 3000)
    check_prefixes(children, weights)
    check_numbers(children, numbers, len(weights))


@settings(max_examples=10)
@given(weights=st.lists(st.floats(1e-3, 1), min_size=2, max_size=12), seed=st.integers(0, 5))
def test_exact_for_any_weights(weights, seed):
    whole = integer_weights(weights)
    children, numbers = choose(Proportions([(0, whole)], seed), 10_000)
    check_prefixes(children, whole)
    check_numbers(children, numbers, len(weights))


@pytest.mark.slow
@given(weights=WEIGHTS, start=st.integers(0, 10**9), seed=st.integers(0, 9))
def test_exact_anywhere(weights, start, seed):
    """A rank asks for a part of the sequence only, a resumed run begins in its middle."""
    sequence = Proportions([(0, weights)], seed)
    children, numbers = choose(sequence, 200, start)
    before = sequence.counts(start)
    assert sum(before) == start
    for child, count in enumerate(before):
        assert abs(count - start * weights[child] / sum(weights)) < 1 + 1e-6
        own = [number for number, chosen in zip(numbers, children) if chosen == child]
        assert own == list(range(count, count + len(own)))
    fresh, at = Proportions([(0, weights)], seed), [5, 3, 199]
    assert choose(fresh, 1, start + 199) == ([children[199]], [numbers[199]])
    assert fresh.choose(np.array([start + place for place in at])).children.tolist() == [
        children[p] for p in at
    ]


def test_weight_zero_is_never_chosen():
    children, _ = choose(Proportions([(0, (1, 0, 2))], 0), 5000)
    assert set(children) == {0, 2}


@pytest.mark.parametrize(
    ("weights", "num_ranks"), [((1, 1), 2), ((2, 1), 3), ((1, 1, 1, 1), 4), ((3, 1), 4)]
)
def test_no_rank_sees_one_child_only(weights, num_ranks):
    """A pattern as short as the number of ranks would give each rank a source of its own."""
    children = np.array(choose(Proportions([(0, weights)], 0), 4096)[0])
    for rank in range(num_ranks):
        shares = np.bincount(children[rank::num_ranks], minlength=len(weights)) / (4096 / num_ranks)
        assert (shares > 0.5 * np.array(weights) / sum(weights)).all()


WEIGHT = st.one_of(
    st.just(0), st.integers(1, 9), st.integers(1, 5000), st.sampled_from([1e-6, 1e-3, 0.37])
)


def furthest_off(children, segments, start=0, counts=None, shares=None):
    """How far a child is from what the weights sum to, at any prefix: exactly. `start`, `counts`,
    `shares`: before.
    """
    num_children = len(segments[0][1])
    counts = counts or [0] * num_children
    given_ = np.cumsum(np.eye(num_children, dtype=np.int64)[children], axis=0)
    shares = list(shares or [Fraction(0)] * num_children)
    worst = Fraction(0)
    ends = [*(first for first, _ in segments[1:]), start + len(children)]
    for (first, weights), end in zip(segments, ends):
        whole = integer_weights(weights)
        first, end = max(first, start), min(end, start + len(children))
        if first >= end:
            continue
        for child, weight in enumerate(whole):
            share, total = shares[child], sum(whole)
            unit = share.denominator * total
            # Large ones do not fit 64 bits, and take twenty times as long.
            largest = max(
                share.numerator * total + (end - first) * unit,
                (counts[child] + len(children)) * unit,
            )
            exact = np.int64 if largest < 2**62 else object
            due = share.numerator * total + np.arange(1, end - first + 1).astype(exact) * (
                weight * share.denominator
            )
            found = given_[first - start : end - start, child].astype(exact) + counts[child]
            off = abs(found * unit - due).max()
            worst = max(worst, Fraction(int(off), unit))
            shares[child] += Fraction((end - first) * weight, total)
    return worst


def outputs_without_weight(children, segments):
    ends = [*(start for start, _ in segments[1:]), len(children)]
    return sum(
        not weights[c] for (start, weights), end in zip(segments, ends) for c in children[start:end]
    )


@st.composite
def schedules(draw, max_children, max_length, weight):
    num_children = draw(st.integers(1, max_children))
    weights = st.lists(weight, min_size=num_children, max_size=num_children).filter(any)
    lengths = draw(st.lists(st.integers(1, max_length), min_size=2, max_size=6))
    starts = [0, *np.cumsum(lengths).tolist()]
    return [(start, tuple(draw(weights))) for start in starts[:-1]], starts[-1]


def check_planned(segments, length):
    num_children = len(segments[0][1])
    sequence = Proportions(segments, 1)
    children, numbers = choose(sequence, length)
    assert furthest_off(children, segments) < 1
    check_numbers(children, numbers, num_children)
    # A rank that resumes asks for what comes later only, in any order.
    asked = np.random.RandomState(length).permutation(length)[:50]
    fresh, counting = Proportions(segments, 1), Proportions(segments, 1)
    found = fresh.choose(asked)
    assert found.children.tolist() == [children[place] for place in asked]
    assert found.numbers.tolist() == [numbers[place] for place in asked]
    for place in [*(start for start, _ in segments), *asked[:3].tolist()]:
        counts = np.bincount(children[:place], minlength=num_children).tolist()
        assert counting.counts(place) == sequence.counts(place) == counts


@pytest.mark.slow
@settings(max_examples=30)
@given(schedule=schedules(12, 3000, WEIGHT))
def test_within_one_at_every_prefix(schedule):
    """Deadlines as if each segment lasted for ever let children be off by up to two behind its
    end."""
    check_planned(*schedule)


@pytest.mark.slow
@settings(max_examples=150)
@given(schedule=schedules(7, 20, st.one_of(st.just(0), st.integers(1, 9))))
def test_within_one_where_weights_come_and_go(schedule):
    """Outputs that a weight of 0 cuts must stand before it or after; all of them before, or none,
    are too many.
    """
    check_planned(*schedule)


def test_a_pause_has_one_output_at_most():
    """The one that was begun before it: left out for good, it would put the others ahead."""
    segments = [
        (0, (1, 2, 2, 1, 2)),
        (3, (0, 2, 1, 0, 3)),
        (13, (2, 0, 0, 1, 0)),
        (19, (0, 8, 0, 0, 1)),
    ]
    segments.append((31, (1, 1, 1, 1, 0)))
    check_planned(segments, 73)
    children, _ = choose(Proportions(segments, 1), 73)
    for child in range(5):
        for (start, weights), (end, _) in zip(segments, [*segments[1:], (73, ())]):
            assert weights[child] or children[start:end].count(child) <= 1


@settings(max_examples=60)
@given(
    first=st.lists(st.integers(1, 50), min_size=2, max_size=10),
    length=st.integers(1, 300),
    is_kept=st.lists(st.booleans(), min_size=10, max_size=10),
)
def test_nothing_of_a_child_that_is_switched_off(first, length, is_kept):
    """A source whose files are gone by then would be asked for the half sample that it is owed."""
    second = [weight if keep else 0 for weight, keep in zip(first, is_kept)]
    segments = [(0, first), (length, second if any(second) else first)]
    children, _ = choose(Proportions(segments, 3), length + 200)
    assert furthest_off(children, segments) < 1
    assert outputs_without_weight(children, segments) == 0


def check_around(segments, place, width=3000):
    """Against the shares there, without all that comes before."""
    sequence = Proportions(segments, 0)
    before, counts = place - width, sequence.counts(place - width)
    shares = [Fraction(0)] * len(counts)
    ends = [*(start for start, _ in segments[1:]), None]
    for (start, weights), end in zip(segments, ends):
        num = max(0, min(before, before if end is None else end) - start)
        whole = integer_weights(weights)
        shares = [
            share + Fraction(num * weight, sum(whole)) for share, weight in zip(shares, whole)
        ]
    children, numbers = choose(sequence, 2 * width, before)
    assert furthest_off(children, segments, before, counts, shares) < 1
    for child, count in enumerate(counts):
        own = [number for number, chosen in zip(numbers, children) if chosen == child]
        assert own == list(range(count, count + len(own)))


def test_long_segments():
    """Tables of 10**9 outputs would not fit; the repetition must end before the outputs that look
    ahead.
    """
    segments = [
        (0, (5, 3, 2)),
        (10**9 + 1, (1, 1, 1)),
        (2 * 10**9 + 4, (0, 2, 1)),
        (3 * 10**9, (7, 0, 3)),
    ]
    begin = time.process_time()
    for start, _ in segments[1:]:
        check_around(segments, start)
    assert time.process_time() - begin < 20
    sequence = Proportions(segments, 0)
    choose(sequence, 10, 3 * 10**9)
    assert len(sequence._stretches) < 20


def test_a_child_of_one_in_a_hundred_thousand():
    """Its output's window goes on behind several segments, and begins long before."""
    segments = [(0, (99_999, 1)), (250_000, (3, 1)), (250_013, (99_998, 2)), (1_000_000, (1, 1))]
    for start, _ in segments[1:]:
        check_around(segments, start, 200)
    children, _ = choose(Proportions(segments, 0), 1_000_100)
    assert furthest_off(children, segments) < 1


@pytest.mark.slow
def test_linear_schedule_of_thousands_of_steps():
    """A table and its random exchanges for each of them: half a millisecond."""
    schedule = WeightSchedule(
        ((0, (0.9, 0.1, 0)), (2000, (0.1, 0.7, 0.2))), 8, "linear", num_pieces=2000
    )
    begin = time.process_time()
    children, _ = choose(Proportions(schedule.segments(), 0), 17_000)
    assert time.process_time() - begin < 10
    assert furthest_off(children, schedule.segments()) < 1


def test_golden_values():
    """A changed sequence would make a resumed run read some records twice and others never."""
    assert choose(Proportions([(0, (5, 3, 2))], 1), 20)[0] == GOLDEN_EXACT
    assert choose(Proportions([(0, (5, 3, 2))], 1, "random"), 20)[0] == GOLDEN_RANDOM
    segments = [(0, (1, 1, 1, 1)), (10, (3, 1, 0, 0)), (21, (1, 2, 3, 0))]
    assert choose(Proportions(segments, 1), 32)[0] == GOLDEN_PLANNED


GOLDEN_EXACT = [0, 1, 0, 2, 1, 0, 2, 0, 1, 0, 2, 0, 1, 0, 1, 0, 2, 0, 0, 1]
GOLDEN_RANDOM = [1, 0, 2, 0, 1, 0, 0, 0, 1, 1, 2, 0, 2, 1, 0, 2, 0, 0, 0, 2]
GOLDEN_PLANNED = [
    0,
    2,
    1,
    3,
    3,
    2,
    0,
    1,
    0,
    1,
    2,
    0,
    0,
    0,
    0,
    1,
    0,
    0,
    1,
    0,
    0,
    1,
    2,
    1,
    2,
    0,
    2,
    1,
    2,
    1,
    0,
    2,
]


def test_neighbours_are_exchanged_within_segments_that_change():
    """Else a short pattern gives one rank always the same child."""
    segments = [(0, (1, 1)), (3000, (2, 2.01))]
    children = np.array(choose(Proportions(segments, 0), 3000)[0])
    assert 0.3 < (children[::2] == 0).mean() < 0.7
    assert not (children == np.array(choose(Proportions(segments, 5), 3000)[0])).all()


def test_random_is_independent_draws():
    """energon's statistics: the spread of the counts of 100 outputs is that of a binomial."""
    sequence = Proportions([(0, (1, 1))], 3, "random")
    children = np.array(choose(sequence, 200_000)[0])
    counts = children.reshape(-1, 100).sum(axis=1)
    assert 49.5 < counts.mean() < 50.5
    assert 4.6 < counts.std() < 5.4
    repeats = (children[1:] == children[:-1]).mean()
    assert 0.49 < repeats < 0.51


def test_random_numbers_have_no_gaps():
    """At any output, as weights may change after it."""
    sequence = Proportions([(0, (5, 3, 2))], 1, "random")
    children, numbers = (np.array(column) for column in choose(sequence, 2 * 65536))
    check_numbers(children.tolist(), numbers.tolist(), 3)
    assert sequence.counts(2 * 65536) == np.bincount(children).tolist()
    assert (
        Proportions([(0, (5, 3, 2))], 1, "random").counts(70_000)
        == np.bincount(children[:70_000]).tolist()
    )


def owed(children, segments):
    """What the weights so far sum to, less what there was: of each child, after each output."""
    due = np.zeros((len(children), len(segments[0][1])))
    for start, weights in segments:
        due[start:] = np.array(weights) / sum(weights)
    return np.cumsum(due - np.eye(due.shape[1])[children], axis=0)


@settings(max_examples=20)
@given(data=st.data(), num_children=st.integers(1, 12), longest=st.sampled_from([1, 8, 60, 900]))
def test_shares_add_up_over_any_segments(data, num_children, longest):
    """A source whose turn is longer than a segment would never be read, or in each."""
    weights = st.lists(st.floats(1e-3, 1), min_size=num_children, max_size=num_children)
    segments = []
    start = 0
    for _ in range(data.draw(st.integers(2, 12))):
        segments.append((start, data.draw(weights)))
        start += data.draw(st.integers(1, longest))
    sequence = Proportions(segments, 1)
    children, numbers = choose(sequence, start + 6000)
    check_numbers(children, numbers, num_children)
    # Weights are rounded by 2**-20.
    assert abs(owed(children, segments)).max() < 1.02
    # A rank that resumes asks for what comes later only, in any order.
    fresh, at = Proportions(segments, 1), [start + 5999, start, 0, start + 4500]
    assert fresh.choose(np.array(at)).children.tolist() == [children[place] for place in at]
    for place in (start, start + 4321, start + 6000):
        assert (
            Proportions(segments, 1).counts(place)
            == np.bincount(children[:place], minlength=num_children).tolist()
        )


def test_a_rare_source_gets_its_share_of_short_segments():
    """3 % of 4 outputs is none; had each step begun again, it would have been none in all."""
    segments = [(4 * step, (95 + step % 2, 3, 2)) for step in range(500)]
    children, _ = choose(Proportions(segments, 0), 2000)
    assert abs(owed(children, segments)).max() < 1 + 1e-6
    assert np.bincount(children)[1:].tolist() in ([60, 40], [60, 39], [60, 41])


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["exact", "random"])
def test_linear_schedule_changes_in_every_step(mode):
    """10 steps of 100 had the first weights throughout, then jumped to the last."""
    schedule = WeightSchedule(((0, (1, 0)), (10, (0, 1))), 100, "linear")
    children = np.array(choose(Proportions(schedule.segments(), 0, mode), 1200)[0])
    shares = (children.reshape(12, 100) == 0).mean(axis=1)
    expected = [0.95, 0.85, 0.75, 0.65, 0.55, 0.45, 0.35, 0.25, 0.15, 0.05, 0, 0]
    assert abs(shares - expected).max() <= (0.02 if mode == "exact" else 0.2)
    long = WeightSchedule(((0, (0.9, 0.1)), (5000, (0.1, 0.9))), 8, "linear")
    children = np.array(choose(Proportions(long.segments(), 0, mode), 40_000)[0])
    shares = (children.reshape(40, 1000) == 0).mean(axis=1)
    assert abs(shares - (0.89 - 0.02 * np.arange(40))).max() < (0.01 if mode == "exact" else 0.06)


def test_arbitrary_weights_change_after_a_thousand():
    """Their period is a million outputs; the change never came within a run."""
    children = np.array(
        choose(Proportions([(0, (0.333333, 0.666667)), (1000, (0.9, 0.1))], 0), 11_000)[0]
    )
    counts = (children.reshape(11, 1000) == 0).sum(axis=1)
    assert abs(counts - [1000 / 3, *[900] * 10]).max() < 2


def finite(weights, sizes, seed=0):
    return Proportions(until_exhausted(weights, sizes), seed)


@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=6),
    seed=st.integers(0, 9),
    data=st.data(),
)
def test_until_exhausted_reads_each_once(sizes, seed, data):
    weights = data.draw(st.lists(st.integers(1, 9), min_size=len(sizes), max_size=len(sizes)))
    children, numbers = choose(finite(weights, sizes, seed), sum(sizes))
    check_numbers(children, numbers, len(sizes))
    assert np.bincount(children, minlength=len(sizes)).tolist() == sizes
    first_end = min(
        max(place for place, c in enumerate(children) if c == child) for child in range(len(sizes))
    )
    check_prefixes(children[: first_end + 1], weights)


def test_until_exhausted_by_length_mixes_to_the_end():
    """blend_epochized: weights are the lengths, so all run out together; also beyond the largest
    period.
    """
    children, _ = choose(finite((100_003, 7), (100_003, 7)), 100_010)
    check_prefixes(children, (100_003, 7))
    sizes = (3_000_000, 1)
    assert finite(sizes, sizes).counts(3_000_001) == [3_000_000, 1]


def test_until_exhausted_beside_endless():
    children, _ = choose(finite((1, 1), (3, None)), 100)
    assert children.count(0) == 3
    assert choose(finite((0, 1), (5, 3)), 3)[0] == [1, 1, 1]


def test_until_exhausted_of_any_size_and_weights():
    """Large sources are rounded, and what that leaves over is read at the end: all of it."""
    sizes = [int(size) for size in np.random.RandomState(0).pareto(1, 40) * 10**6 + 1]
    sequence = finite(sizes, sizes)
    children, numbers = sequence.choose(np.arange(sum(sizes) - 1000, sum(sizes)))
    assert sequence.counts(sum(sizes)) == sizes
    before = sequence.counts(sum(sizes) - 1000)
    for child, size in enumerate(sizes):
        assert sorted(numbers[children == child]) == list(range(before[child], size))
    weights = np.random.RandomState(1).random_sample(5)
    children, numbers = finite(weights.tolist(), [500, 100, 900, 40, 70]).choose(np.arange(1610))
    check_numbers(children.tolist(), numbers.tolist(), 5)
    assert np.bincount(children).tolist() == [500, 100, 900, 40, 70]


@pytest.mark.parametrize("weights", [(1, 0.001, 1e-6), (1, 1e-5, 3e-6), (1, 1, 1e-6)])
def test_finite_sources_of_tiny_weight_are_read_whole(weights):
    """Where shares did not fit in 64 bits on the way, one source was read twice, another never."""
    sizes = [50, 20, 44]
    sequence = Proportions(until_exhausted(weights, sizes), 0)
    children, numbers = choose(sequence, sum(sizes))
    assert np.bincount(children, minlength=3).tolist() == sizes
    check_numbers(children, numbers, 3)
