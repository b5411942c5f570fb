"""The cost that the costliest rank reaches, against all assignments."""

from unittest import mock

import numpy as np
import pytest

from megatron.packing.scheduling import rank_bounds
from megatron.packing.scheduling.cost import PackCost
from megatron.packing.scheduling.pack_bounds import Span
from megatron.packing.scheduling.rank_bounds import CrowdedRanks, RankBounds, rank_cost_lower_bound
from megatron.packing.scheduling.row_bounds import RowBounds
from megatron.packing.scheduling.step_time import StepModel
from megatron.packing.scheduling.work import Work
from tests.unit_tests.packing.brute_force import MODES, descending, least_time
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
    assert rank_cost_lower_bound(array(10, 10, 4, 4, 4), 2) == 18  # all ways to share out


def random_crowd(rng) -> tuple[Work, int, int, int]:
    """Some long sequences, and nearly as many short ones as have room: the work, ranks, capacity, microbatches.

    Costs are rounded in some, so that a short sequence may cost more per token than a long one.
    """
    num_ranks, num_microbatches = [(2, 1), (3, 1), (4, 1), (5, 1), (2, 2), (3, 2)][rng.integers(6)]
    size = int(rng.integers(num_ranks + 1, 8)) if num_microbatches > 1 else 8 + (num_ranks < 5)
    num_long = int(rng.integers(1, num_ranks))
    length = np.concatenate((rng.integers(20, 24, num_long), rng.integers(1, 16, size - num_long)))
    length = np.sort(length)[::-1].astype(np.int64)
    fair = -(-int(length.sum()) // (num_ranks * num_microbatches))
    capacity = max(int(length[0]), fair + int(rng.integers(0, 6)))
    per_token = int(rng.choice([0, 1, 10]))
    if rng.random() < 0.3:
        work = Work.of(length, PackCost(max(per_token, 1) / 3, 1 / 7 if rng.random() < 0.7 else 0.0, 1.0))
    else:
        cost = length * (per_token + length)
        work = Work(order=np.arange(size), length=length, cost=cost, fixed=1, unit=1.0)
    return work, num_ranks, capacity, num_microbatches


def bound_of(work: Work, num_ranks: int, capacity: int, num_microbatches: int, model: StepModel) -> int:
    bounds: RowBounds | RankBounds
    if model.ranks_meet:
        bounds = RowBounds(work, num_ranks, capacity, model.num_stages, 1)
    else:
        bounds = RankBounds(work, num_ranks, capacity, model.num_stages)
    return bounds.of(Span(num_microbatches, num_microbatches), None)


@pytest.mark.parametrize("mode", MODES)
def test_bound_of_crowded_ranks_is_never_above_the_optimum(mode):
    """Where the other ranks have too little room, those of the long sequences must hold more than the mean."""
    rng = np.random.default_rng(3)
    by_crowd = by_several = 0
    for case in range(2000):
        model = MODES[mode][case % len(MODES[mode])]
        work, num_ranks, capacity, num_microbatches = instance = random_crowd(rng)
        optimum = least_time(work, num_ranks, num_microbatches, capacity, model)
        if optimum is None:
            continue
        bound = bound_of(*instance, model)
        assert bound <= optimum, (instance, model)
        with mock.patch.object(CrowdedRanks, "costs", return_value=(0, 0)):
            by_crowd += bound_of(*instance, model) < bound
        with mock.patch.object(rank_bounds, "_MOST_WITH_COSTLIEST", 1):
            by_several += bound_of(*instance, model) < bound
    assert by_crowd > 300, by_crowd
    assert by_several > 100, by_several


def test_bound_of_crowded_ranks_by_hand():
    """Two of three ranks hold the long sequences; the third has room for 13 of the other 16 tokens, and the 3 cheapest
    ones cost 1 + 3 * 2. The optimum is 10 + 3, 10 + 1, 4 + 4 + 4.
    """
    length = array(10, 10, 4, 4, 4, 3, 1)
    work = Work(order=np.arange(7), length=length, cost=length * length, fixed=0, unit=1.0)
    assert RankBounds(work, 3, 13, 1).of(Span(1, 1), None) == 104  # half of 207
    assert RankBounds(work, 3, 13, 8).of(Span(1, 1), None) == 8 * 104  # one pack per rank: each stage takes as long
    assert RankBounds(work, 3, 14, 1).of(Span(1, 1), None) == 102  # half of 100 + 100 + 1 + 3
    assert least_time(work, 3, 1, 13, StepModel()) == 109
