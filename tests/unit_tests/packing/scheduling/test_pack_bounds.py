"""Packs needed, against the best of all packings."""

import itertools

import numpy as np

from megatron.packing.scheduling.pack_bounds import microbatch_lower_bound, packs_needed
from tests.unit_tests.packing.brute_force import descending
from tests.unit_tests.packing.stubs import array, in_python, needs_compiled


def fewest_packs(lengths: list[int], capacity: int) -> int:
    """Packs of the best of all packings."""
    return next(n for n in itertools.count() if fits(lengths, (capacity,) * n))


def fits(lengths: list[int], rooms: tuple[int, ...]) -> bool:
    if not lengths:
        return True
    return any(
        fits(lengths[1:], (*rooms[:i], room - lengths[0], *rooms[i + 1 :]))
        for i, room in enumerate(rooms)
        if room >= lengths[0] and room not in rooms[:i]
    )


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
