"""Proportions that change: the bound on every prefix holds within each stretch, and nothing is lost between them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.blending.streams.segments import Segments, UntilExhausted
from megatron.blending.streams.weights import WeightSchedule
from tests.unit_tests.blending.streams.test_blend import WEIGHTS, check_numbers, check_prefixes, choose


def owed(children, segments):
    """What the weights so far sum to, less what there was: of each child, after each output."""
    due = np.zeros((len(children), len(segments[0][1])))
    for start, weights in segments:
        due[start:] = np.array(weights) / sum(weights)
    return np.cumsum(due - np.eye(due.shape[1])[children], axis=0)


@settings(deadline=None)
@given(first=WEIGHTS, change=st.integers(0, 300), mode=st.sampled_from(["exact", "random"]), data=st.data())
def test_weights_change_at_the_output_that_is_named(first, change, mode, data):
    """They waited for the end of a period of the weights before: up to a million outputs, or the end of the run."""
    second = data.draw(st.lists(st.integers(0, 9), min_size=len(first), max_size=len(first)).filter(any))
    sequence = Segments([(0, first)], 1, mode)
    before = choose(sequence, change)
    sequence.append(change, second)
    children, numbers = choose(sequence, change + 500)
    assert (children[:change], numbers[:change]) == before
    check_numbers(children, numbers, len(first))
    assert all(second[child] for child in children[change:])
    if mode == "exact":
        if change:
            check_prefixes(children[:change], first)
        assert abs(owed(children, [(0, first), (change, second)])).max() < 2
    at = change + 250
    told = Segments([(0, first)], 1, mode)
    told.append(change, second)
    for asked in (sequence, told):
        assert asked.counts(at) == np.bincount(children[:at], minlength=len(first)).tolist()


@pytest.mark.parametrize("num_children", [20, 200])
def test_many_that_are_behind_do_not_keep_out_the_others(num_children):
    """A hundred children half an output behind, with half the weight: had they all come first, another waits for long.

    It was then 8.5 outputs behind.
    """
    half = num_children // 2
    sequence = Segments([(0, [1] * num_children + [0])], 0)
    given = set(choose(sequence, half)[0])
    weights = [0.2 if child in given else 0.3 for child in range(num_children)] + [half]
    sequence.append(half, weights)
    children, _ = choose(sequence, 4 * num_children)
    assert abs(owed(children, [(0, [1] * num_children + [0]), (half, weights)])).max() < 1.5


@pytest.mark.parametrize("mode", ["exact", "random"])
def test_what_stands_before_an_appended_change_looked_ahead_to_what_was_planned(mode):
    """Planned anew with the change in sight it would be another order: a resumed run would not go on as it was."""
    segments = [(0, (5, 3, 2, 1)), (6000, (1, 1, 9, 0)), (12_000, (2, 0, 1, 7)), (12_050, (1, 4, 1, 1))]
    whole, _ = choose(Segments(segments, 0, mode), 13_000)
    for change in (1, 5998, 6000, 11_990, 12_000, 12_049, 12_500):
        told = Segments(segments, 0, mode)
        told.append(change, (4, 3, 2, 1))
        asked = Segments(segments, 0, mode)
        choose(asked, 13_000)
        asked.append(change, (4, 3, 2, 1))
        for sequence in (told, asked):
            sequence.append(change + 100, (1, 1, 1, 1))
        children, numbers = choose(told, change + 300)
        assert children[:change] == whole[:change]
        assert (children, numbers) == choose(asked, change + 300)
        check_numbers(children, numbers, 4)


@settings(max_examples=30, deadline=None)
@given(data=st.data(), num_children=st.integers(1, 12), longest=st.sampled_from([1, 8, 60, 900]))
def test_shares_add_up_over_any_segments(data, num_children, longest):
    """A source whose turn is longer than a segment would never be read, or in each."""
    weights = st.lists(st.floats(1e-3, 1), min_size=num_children, max_size=num_children)
    segments = []
    start = 0
    for _ in range(data.draw(st.integers(2, 12))):
        segments.append((start, data.draw(weights)))
        start += data.draw(st.integers(1, longest))
    sequence = Segments(segments, 1)
    children, numbers = choose(sequence, start + 6000)
    check_numbers(children, numbers, num_children)
    # Weights are rounded by 2**-20.
    assert abs(owed(children, segments)).max() < 1.02
    # A rank that resumes asks for what comes later only, in any order.
    fresh, at = Segments(segments, 1), [start + 5999, start, 0, start + 4500]
    assert fresh.choose(np.array(at)).children.tolist() == [children[place] for place in at]
    for place in (start, start + 4321, start + 6000):
        assert Segments(segments, 1).counts(place) == np.bincount(children[:place], minlength=num_children).tolist()


def test_a_rare_source_gets_its_share_of_short_segments():
    """3 % of 4 outputs is none; had each step begun anew, it would have been none in all."""
    segments = [(4 * step, (95 + step % 2, 3, 2)) for step in range(500)]
    children, _ = choose(Segments(segments, 0), 2000)
    assert abs(owed(children, segments)).max() < 1 + 1e-6
    assert np.bincount(children)[1:].tolist() in ([60, 40], [60, 39], [60, 41])


def test_a_change_after_outputs_were_made_keeps_them():
    """Also within a schedule, whose short segments are made to measure: a resumed run would have had others."""
    segments = [(0, (1, 1, 1)), (100, (5, 2, 1)), (150, (1, 3, 1)), (170, (1, 1, 0))]
    planned = choose(Segments(segments, 3), 200)[0]
    for mode in ("exact", "random"):
        sequence = Segments(segments, 3, mode)
        before = choose(sequence, 200)[0]
        assert mode == "random" or before == planned
        for change in (160, 130, 100, 40):
            sequence.append(change, (0, 0, 1))
            children, numbers = choose(sequence, 300)
            assert children[:change] == before[:change]
            assert set(children[change:]) == {2}
            check_numbers(children, numbers, 3)
            told = Segments(segments, 3, mode)
            told.append(change, (0, 0, 1))
            assert choose(told, 50, 30) == (children[30:80], numbers[30:80])


@pytest.mark.parametrize("mode", ["exact", "random"])
def test_linear_schedule_changes_in_every_step(mode):
    """10 steps of 100 had the first weights throughout, then jumped to the last."""
    schedule = WeightSchedule(((0, (1, 0)), (10, (0, 1))), 100, "linear")
    children = np.array(choose(Segments(schedule.segments(), 0, mode), 1200)[0])
    shares = (children.reshape(12, 100) == 0).mean(axis=1)
    expected = [0.95, 0.85, 0.75, 0.65, 0.55, 0.45, 0.35, 0.25, 0.15, 0.05, 0, 0]
    assert abs(shares - expected).max() <= (0.02 if mode == "exact" else 0.2)
    long = WeightSchedule(((0, (0.9, 0.1)), (5000, (0.1, 0.9))), 8, "linear")
    children = np.array(choose(Segments(long.segments(), 0, mode), 40_000)[0])
    shares = (children.reshape(40, 1000) == 0).mean(axis=1)
    assert abs(shares - (0.89 - 0.02 * np.arange(40))).max() < (0.01 if mode == "exact" else 0.06)


def test_arbitrary_weights_change_after_a_thousand():
    """Their period is a million outputs; the change never came within a run."""
    children = np.array(choose(Segments([(0, (0.333333, 0.666667)), (1000, (0.9, 0.1))], 0), 11_000)[0])
    counts = (children.reshape(11, 1000) == 0).sum(axis=1)
    assert abs(counts - [1000 / 3, *[900] * 10]).max() < 2


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
