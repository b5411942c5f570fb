"""Bounds where ranks meet at every microbatch, against all schedules of a few long sequences."""

from unittest import mock

import numpy as np

from megatron.packing.scheduling.pack_bounds import Span, fewest_microbatches
from megatron.packing.scheduling.row_bounds import RowBounds, _HeldByPacks
from megatron.packing.scheduling.second_row import LaterRows
from megatron.packing.scheduling.step_time import StepModel
from megatron.packing.scheduling.work import Work
from tests.unit_tests.packing.brute_force import descending, fits, least_time


def random_rows(rng, num_ranks: int = 2, size: int = 7) -> tuple[Work, int, int]:
    """Few rows of few packs, in which capacity and long sequences decide: the work, ranks, capacity."""
    longest = int(rng.integers(8, 40))
    length = descending(rng, max(longest // 5, 1), longest + 1, size)
    length[0] = longest
    cost = length * (int(rng.choice([1, 20, 100])) + length)
    work = Work(order=np.arange(length.size), length=length, cost=cost, fixed=int(rng.choice([0, 5])), unit=1.0)
    return work, num_ranks, int(longest * rng.choice([1, 1, 1.2, 2]))


def test_row_bounds_are_never_above_the_optimum():
    """Where one pack per rank and row holds a long sequence, most of the bound comes from what fits beside it."""
    rng = np.random.default_rng(7)
    exact = total = 0
    for _ in range(1500):
        work, num_ranks, capacity = random_rows(rng, int(rng.integers(1, 4)), int(rng.integers(4, 8)))
        model = StepModel(num_stages=int(rng.choice([1, 1, 3])), ranks_meet=True)
        rows = fewest_microbatches(work.length, num_ranks, capacity, 1).num_microbatches
        bounds = RowBounds(work, num_ranks, capacity, model.num_stages, rows)
        for number in range(rows, rows + 3):
            optimum = least_time(work, num_ranks, number, capacity, model)
            if optimum is None:
                continue
            bound = bounds.of(Span(number, number), None)
            assert bounds.quick(Span(number, number)) <= optimum, (work, num_ranks, capacity, number)
            assert bound <= optimum, (work, num_ranks, capacity, number)
            exact += bound == optimum
            total += 1
    assert exact > 0.7 * total, exact / total


def test_the_second_row_and_what_packs_hold_count():
    """Bounds that never decide anything would pass the test above."""
    rng = np.random.default_rng(8)
    by_second = by_packs = 0

    def hold_everything(held: _HeldByPacks, ceilings) -> np.ndarray:
        return held._above_price.min() + held._worth.sum(axis=1).max() + 0 * held._num_packs

    for _ in range(500):
        work, num_ranks, capacity = random_rows(rng)
        rows = fewest_microbatches(work.length, num_ranks, capacity, 1).num_microbatches
        span = Span(max(rows, 3), max(rows, 3))
        bound = RowBounds(work, num_ranks, capacity, 1, rows).of(span, None)
        with mock.patch.object(LaterRows, "least", return_value=np.zeros(0, np.int64)):
            by_second += RowBounds(work, num_ranks, capacity, 1, rows).of(span, None) < bound
        with mock.patch.object(_HeldByPacks, "most", hold_everything):
            by_packs += RowBounds(work, num_ranks, capacity, 1, rows).of(span, None) < bound
    assert by_second > 5, by_second
    assert by_packs > 5, by_packs


def test_later_rows_hold_what_does_not_fit_before():
    """A cost that a later row need not reach would refute schedules that there are; against all ways to put the longest
    sequences into a first row that capacity limits and rows that cost limits.
    """
    rng = np.random.default_rng(9)
    above_none = 0
    for _ in range(3000):
        work, num_ranks, capacity = random_rows(rng)
        later = LaterRows(work, num_ranks, capacity, 5)
        second = int(rng.integers(int(work.cost[-1]), int(work.cost[0]) + 1))
        for number, least in enumerate(later.least(second), start=2):
            if least == 0:
                continue
            longest = work.cost >= least
            assert not fit_rows(work.length[longest], work.cost[longest], num_ranks, number, capacity, second), (
                *(work, num_ranks, capacity, second, number),
            )
            above_none += 1
    assert above_none > 300, above_none


def fit_rows(length, cost, num_ranks: int, num_rows: int, capacity: int, second: int) -> bool:
    """Whether some of the sequences fit into one row of packs of `capacity` tokens, and the others into packs of the
    other rows, of a cost of `second`.
    """
    for chosen in range(1 << length.size):
        first = np.array([chosen >> i & 1 for i in range(length.size)], np.bool_)
        if fits(cost[~first].tolist(), (second,) * (num_ranks * (num_rows - 1))) and fits(
            length[first].tolist(), (capacity,) * num_ranks
        ):
            return True
    return False
