"""The cost that the costliest rank reaches, against all assignments."""

import numpy as np

from megatron.packing.scheduling.rank_bounds import rank_cost_lower_bound
from tests.unit_tests.packing.brute_force import descending
from tests.unit_tests.packing.stubs import array


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


def test_rank_cost_bound_is_never_above_the_optimum_and_often_meets_it():
    """Also guards against a bound so loose that it never says anything."""
    rng = np.random.default_rng(1)
    exact = 0
    for _ in range(2000):
        num_ranks = int(rng.integers(1, 5))
        costs = descending(rng, 0, 30, rng.integers(0, 8))
        bound = rank_cost_lower_bound(costs, num_ranks)
        optimum = least_rank_cost(costs.tolist(), num_ranks)
        assert bound <= optimum, (costs, num_ranks)
        exact += bound == optimum
    assert exact > 1600


def test_rank_cost_bound_terms():
    """Each of the terms must be the one that decides where it should."""
    assert rank_cost_lower_bound(array(), 4) == 0
    assert rank_cost_lower_bound(array(3, 3, 2), 2) == 5  # two of three meet: the pigeonhole
    assert rank_cost_lower_bound(array(9, 1, 1), 2) == 9  # the largest
    assert rank_cost_lower_bound(array(4, 3, 2, 2), 2) == 6  # the mean, 5.5
    assert rank_cost_lower_bound(array(14, 12, 8, 7, 7), 3) == 19  # two pairs: 8 and 7, 12 and 7
    assert rank_cost_lower_bound(array(12, 12, 6, 4, 4), 3) == 14  # three on one rank
