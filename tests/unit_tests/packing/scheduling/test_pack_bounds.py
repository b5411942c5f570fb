"""Packs needed, against the best of all packings."""

import itertools

import numpy as np

from megatron.packing.scheduling.pack_bounds import (
    fewest_microbatches,
    longest_that_need_more,
    microbatch_lower_bound,
    packs_needed,
)
from megatron.packing.scheduling.placement import best_fit
from tests.unit_tests.packing.brute_force import check_packing, descending, fits
from tests.unit_tests.packing.scheduling.test_pack_fit import NEEDS_33
from tests.unit_tests.packing.stubs import array, in_python, needs_compiled


def fewest_packs(lengths: list[int], capacity: int) -> int:
    """Packs of the best of all packings."""
    return next(n for n in itertools.count() if fits(lengths, (capacity,) * n))


def test_microbatch_bound_is_never_above_the_optimum_and_often_meets_it():
    """A bound too high would make every schedule take more microbatches than it needs."""
    rng = np.random.default_rng(2)
    exact = 0
    for _ in range(1500):
        capacity = int(rng.integers(1, 25))
        lengths = descending(rng, 1, capacity + 1, rng.integers(0, 9))
        num_ranks, multiple = int(rng.integers(1, 4)), int(rng.integers(1, 3))
        bound = microbatch_lower_bound(lengths, num_ranks, capacity, multiple)
        step = num_ranks * multiple
        optimum = max(1, -(-fewest_packs(lengths.tolist(), capacity) // step)) * multiple
        assert bound % multiple == 0
        assert 1 <= bound <= optimum, (lengths, capacity, num_ranks, multiple)
        exact += bound == optimum
    assert exact > 1400


def test_packs_needed_is_never_above_the_optimum_of_any_prefix():
    """Bounds for ranks that meet ask how many packs the i longest sequences need, for every i."""
    rng = np.random.default_rng(3)
    exact = total = 0
    for _ in range(600):
        capacity = int(rng.integers(1, 25))
        length = descending(rng, 1, capacity + 1, rng.integers(0, 8))
        needed = packs_needed(length, capacity).tolist()
        optima = [fewest_packs(length[: i + 1].tolist(), capacity) for i in range(length.size)]
        assert all(bound <= optimum for bound, optimum in zip(needed, optima, strict=True)), (length, capacity)
        exact += sum(bound == optimum for bound, optimum in zip(needed, optima))
        total += len(needed)
    assert exact > 0.9 * total


@needs_compiled
def test_compiled_and_numpy_form_are_equal():
    """Ranks with and without a compiler would try other numbers of microbatches, and follow different schedules."""
    rng = np.random.default_rng(4)
    for _ in range(2000):
        length = descending(rng, 1, int(rng.choice([3, 50, 5000])), rng.integers(0, 100))
        capacity = int(length.max(initial=1) * rng.choice([1, 1.3, 2, 2.5, 5, 100]))
        needed = packs_needed(length, capacity)
        with in_python():
            assert packs_needed(length, capacity).tolist() == needed.tolist()


def test_microbatch_bound_sees_what_the_token_sum_does_not():
    """Six sequences of 6 in packs of 10 need six packs, not four; 4 fits beside 6, 5 does not."""
    assert microbatch_lower_bound(array(*[6] * 6), 1, 10, 1) == 6
    assert microbatch_lower_bound(array(*[6] * 6 + [4] * 6), 1, 10, 1) == 6
    assert microbatch_lower_bound(array(*[6] * 6 + [5] + [4] * 4), 1, 10, 1) == 7
    assert microbatch_lower_bound(array(*[6] * 6), 2, 10, 2) == 4


def test_packs_needed_counts_room_for_several():
    """What fits beside a long one only once or twice leaves room that no sum of tokens tells."""
    assert packs_needed(array(7, 7, 7, 3, 3, 3, 3), 12).tolist() == [1, 2, 3, 3, 3, 3, 4]  # once beside each 7
    assert packs_needed(array(70, 70, 20, 20, 20, 20, 20), 120)[-1] == 3  # twice beside each 70, and 240 tokens


def test_packs_needed_sees_pairs():
    """Of what is above a third of capacity, a pack holds two, and only where they fit beside one another."""
    assert packs_needed(array(8, 8, 5, 5, 5, 4, 4), 12).tolist() == [1, 2, 3, 3, 4, 4, 4]
    assert packs_needed(array(7, 7, 6, 4, 4, 4, 4), 10).tolist() == [1, 2, 3, 3, 4, 4, 5]  # 7 + 7 + 6 + 4 * 4 = 36


def test_fewest_microbatches_is_never_above_the_optimum_and_nearly_always_it():
    """What a search proves must be so; and its packing, from which schedules start, must be one."""
    rng = np.random.default_rng(5)
    exact = proven = 0
    for _ in range(1500):
        capacity = int(rng.integers(10, 60))
        length = descending(rng, max(capacity // 5, 1), capacity * 2 // 3, rng.integers(6, 11))
        num_ranks, multiple = int(rng.integers(1, 4)), int(rng.integers(1, 3))
        fewest, pack = fewest_microbatches(length, num_ranks, capacity, multiple)
        step = num_ranks * multiple
        optimum = max(1, -(-fewest_packs(length.tolist(), capacity) // step)) * multiple
        assert fewest % multiple == 0
        assert 1 <= fewest <= optimum, (length, capacity, num_ranks, multiple)
        if pack is not None:
            assert pack.min() >= 0
            assert pack.max() < num_ranks * fewest
            assert np.bincount(pack, weights=length).max() <= capacity
        exact += fewest == optimum
        proven += fewest > microbatch_lower_bound(length, num_ranks, capacity, multiple)
    assert exact == 1500
    assert proven > 30, proven


def test_fewest_microbatches_of_more_sequences_than_are_searched_long(form):
    """Best-fit decreasing needs three packs more: a microbatch of a single rank, for which all others wait."""
    rng = np.random.default_rng([3, 1])
    length = 1024 * np.exp(rng.normal(1.1, 0.7, 1100))
    length = np.sort(np.clip(length.astype(np.int64), 1024, 8192))[::-1].copy()
    assert best_fit(length, capacity=8192)[1] == 494
    fewest, pack = fewest_microbatches(length, 491, 8192, 1)
    assert fewest == 1
    assert pack is not None
    check_packing(pack, length, 8192, 491)
    assert fewest_microbatches(length, 490, 8192, 1).num_microbatches == 2


def test_fewest_microbatches_of_a_batch_in_doubt():
    """L2 allows 4 microbatches on 8 ranks, a search proves that 32 packs are too few: by the multiple of 4, that is
    twice the microbatches, and the bound was as much too low.
    """
    assert microbatch_lower_bound(NEEDS_33, 8, 7845, 4) == 4
    fewest, pack = fewest_microbatches(NEEDS_33, 8, 7845, 4)
    assert fewest == 8
    assert pack is not None
    assert fewest_microbatches(NEEDS_33, 8, 3 * 7845, 4).num_microbatches == 4


def test_longest_that_need_more_do():
    """Where ranks meet, a row after those packs is said to hold one of them, and to take as long."""
    rng = np.random.default_rng(6)
    exact = lower = total = 0
    for _ in range(1500):
        capacity = int(rng.integers(10, 60))
        length = descending(rng, max(capacity // 5, 1), capacity * 2 // 3, rng.integers(6, 11))
        num_packs = max(fewest_packs(length.tolist(), capacity) - int(rng.integers(0, 2)), 1)
        needed = packs_needed(length, capacity)
        number = longest_that_need_more(length, needed, capacity, num_packs)
        everything = (capacity,) * num_packs
        assert number > length.size or not fits(length[:number].tolist(), everything), (length, capacity, num_packs)
        exact += fits(length[: number - 1].tolist(), everything)
        lower += number <= int(np.searchsorted(needed, num_packs + 1))
        total += 1
    assert exact > 0.99 * total
    assert lower > 10, lower
