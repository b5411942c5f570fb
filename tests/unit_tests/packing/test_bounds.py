"""Lower bounds against brute force: a bound above the optimum would certify wrong schedules as optimal."""

import itertools

import numpy as np

from megatron.packing.bounds import microbatch_lower_bound, rank_cost_lower_bound


def least_rank_cost(costs: list[int], num_ranks: int) -> int:
    """The costliest rank of the best of all assignments."""
    reachable = {(0,) * num_ranks}
    for cost in costs:
        reachable = {
            tuple(sorted((*sums[:rank], sums[rank] + cost, *sums[rank + 1 :])))
            for sums in reachable
            for rank in range(num_ranks)
        }
    return min(max(sums) for sums in reachable)


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


def test_rank_cost_bound_is_never_above_the_optimum_and_often_meets_it():
    """Also guards against a bound so loose that it never says anything."""
    rng = np.random.default_rng(1)
    exact = 0
    for _ in range(1000):
        num_ranks = int(rng.integers(1, 5))
        costs = rng.integers(0, 30, size=rng.integers(0, 8))
        bound = rank_cost_lower_bound(costs.astype(np.float64), num_ranks)
        optimum = least_rank_cost(costs.tolist(), num_ranks)
        assert bound <= optimum, (costs, num_ranks)
        exact += bound > optimum - 1  # costs are whole numbers
    assert exact > 800


def test_rank_cost_bound_terms():
    """Each of the three terms must be the one that decides where it should."""
    assert rank_cost_lower_bound(np.array([]), 4) == 0.0
    assert rank_cost_lower_bound(np.array([3.0, 3.0, 2.0]), 2) == 5.0  # two of three meet: the pigeonhole
    assert rank_cost_lower_bound(np.array([9.0, 1.0, 1.0]), 2) == 9.0  # the largest
    assert rank_cost_lower_bound(np.array([4.0, 3.0, 2.0, 2.0]), 2) == 5.5  # the mean


def test_microbatch_bound_is_never_above_the_optimum_and_often_meets_it():
    """A bound too high would make every schedule take more microbatches than it needs."""
    rng = np.random.default_rng(2)
    exact = 0
    for _ in range(1500):
        capacity = int(rng.integers(1, 25))
        lengths = rng.integers(1, capacity + 1, size=rng.integers(0, 9))
        num_ranks, multiple = int(rng.integers(1, 4)), int(rng.integers(1, 3))
        bound = microbatch_lower_bound(lengths, num_ranks, capacity, multiple)
        step = num_ranks * multiple
        optimum = max(1, -(-fewest_packs(sorted(lengths.tolist(), reverse=True), capacity) // step)) * multiple
        assert bound % multiple == 0
        assert 1 <= bound <= optimum, (lengths, capacity, num_ranks, multiple)
        exact += bound == optimum
    assert exact > 1400


def test_microbatch_bound_sees_what_the_token_sum_does_not():
    """Six sequences of 6 in packs of 10 need six packs, not four; 4 fits beside 6, 5 does not."""
    assert microbatch_lower_bound(np.array([6] * 6), 1, 10, 1) == 6
    assert microbatch_lower_bound(np.array([6] * 6 + [4] * 6), 1, 10, 1) == 6
    assert microbatch_lower_bound(np.array([6] * 6 + [4] * 4 + [5]), 1, 10, 1) == 7
    assert microbatch_lower_bound(np.array([6] * 6), 2, 10, 2) == 4
