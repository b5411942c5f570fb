"""Lower bounds against brute force: a bound above the optimum would certify wrong schedules as optimal."""

import itertools
from unittest import mock

import numpy as np
import pytest

from megatron.packing.scheduling.bounds import step_bound
from megatron.packing.scheduling.cost import PackCost
from megatron.packing.scheduling.rank_bounds import RankBounds
from megatron.packing.scheduling.step_time import StepModel
from megatron.packing.scheduling.work import Work
from tests.unit_tests.packing.brute_force import MODES, least_time, random_instance
from tests.unit_tests.packing.requests import DISTRIBUTIONS, lengths_of
from tests.unit_tests.packing.stubs import array, in_python, needs_compiled


@pytest.mark.parametrize(("mode", "met"), [("ranks", 0.9), ("pipelines", 0.8), ("ranks that meet", 0.8)])
def test_step_bound_is_never_above_the_optimum_and_often_meets_it(mode, met):
    """A bound above the optimum reports "1.000 of the bound" for schedules that others beat, and ends the search early.

    More microbatches than sequences only add their fixed cost, so that the optimum over those tried is that of all.
    """
    rng = np.random.default_rng(11)
    exact = total = bounds_checked = 0
    for case in range(1500):
        work, num_ranks, capacity, multiple = instance = random_instance(rng)
        model = MODES[mode][case % len(MODES[mode])]
        bound = step_bound(work, num_ranks, capacity, multiple, model)
        bounds = {number: time for time, number in bound.by_microbatches}
        optimum = None
        for number in range(multiple, max(work.cost.size, 1) + multiple, multiple):
            time = least_time(work, num_ranks, number, capacity, model)
            if time is None:
                continue
            assert number >= bound.min_microbatches, instance
            if number in bounds:
                assert bounds[number] <= time, (instance, model, number)
                bounds_checked += 1
            optimum = time if optimum is None else min(optimum, time)
        assert optimum is not None
        assert bound.time <= optimum, (instance, model)
        exact += bound.time >= optimum - (optimum >> 30)  # costs in fine units are bounded to within a few of them
        total += 1
    assert bounds_checked > 2 * total
    assert exact > met * total, exact / total


def test_step_bound_counts_with_rounded_costs():
    """Rounding may make a short sequence cost more per token than a long one; bounds once took that for impossible and
    were a few units above these optima.
    """
    model = StepModel(num_stages=2, ranks_meet=True)
    for lengths, cost, capacity in (
        (array(14, 10, 3, 1), PackCost(1 / 3, 0.0, 5 / 3), 14),
        (array(2, 2, 2, 2, 1, 1), PackCost(1 / 3, 0.0, 5 / 3), 2),
    ):
        work = Work.of(lengths, cost)
        optima = [least_time(work, 1, number, capacity, model) for number in range(1, 7)]
        best = min(time for time in optima if time is not None)
        assert best - 1 <= step_bound(work, 1, capacity, 1, model).time <= best


@needs_compiled
@pytest.mark.parametrize("model", [StepModel(), StepModel(num_stages=2), StepModel(num_stages=8)], ids=str)
def test_compiled_and_numpy_form_are_equal(model):
    """The search starts from the bound: ranks with and without a compiler would follow different schedules. Of
    thousands of sequences, bounds of pipelines look at some only.
    """
    looked_at_some = 0
    for case, distribution in itertools.product(range(12), DISTRIBUTIONS):
        rng = np.random.default_rng([13, case])
        num_ranks, size = int(rng.choice([1, 2, 8, 64])), int(rng.choice([1, 5, 100, 1000, 4000]))
        lengths = lengths_of(distribution, rng, size)
        work = Work.of(lengths, PackCost(1.0, 1e-4, float(rng.choice([0, 1e3]))))
        options = num_ranks, int(lengths.max() * rng.choice([1, 1.5, 4])), int(rng.choice([1, 4])), model
        with mock.patch.object(RankBounds, "_some_of", autospec=True, side_effect=RankBounds._some_of) as some_of:
            bound = step_bound(work, *options)
        with in_python():
            assert step_bound(work, *options) == bound
        looked_at_some += some_of.call_count
    assert (looked_at_some > 0) == (model.num_stages > 1)


def test_step_bound_lists_its_microbatches():
    """The search takes them in this order and ends by the first bound above what it has."""
    work = Work.of(array(9, 5, 4, 4, 2), PackCost(1.0, 0.0))
    for model in itertools.chain.from_iterable(MODES.values()):
        bound = step_bound(work, 2, 10, 2, model)
        assert list(bound.by_microbatches) == sorted(bound.by_microbatches)
        numbers = sorted(entry.num_microbatches for entry in bound.by_microbatches)
        assert numbers[:9] == list(range(2, 20, 2))
        assert all(number % 2 == 0 for number in numbers)
        assert bound.min_microbatches == 2
        assert bound.time <= bound.by_microbatches[0].time


def test_step_bound_by_hand():
    """Literal numbers: a unit or a factor wrong in all modes alike would pass every relative check."""
    work = Work(order=np.arange(4), length=array(4, 3, 2, 1), cost=array(4, 3, 2, 1), fixed=10, unit=1.0)
    # One microbatch of 5 on each of two ranks; with two stages the pipeline fills once more.
    assert step_bound(work, 2, 5, 1, StepModel()).time == 5 + 10
    assert step_bound(work, 2, 5, 1, StepModel(num_stages=2)).time == 2 * (5 + 10)
    assert step_bound(work, 2, 5, 1, StepModel(ranks_meet=True)).time == 5 + 10
    # At a capacity of 4 there must be two, each rank with 5 in all; ranks that meet run 4 beside 3, then 2 beside 1.
    assert step_bound(work, 2, 4, 1, StepModel()).time == 5 + 20
    assert step_bound(work, 2, 4, 1, StepModel(ranks_meet=True)).time == 6 + 20


def test_step_bound_without_sequences():
    """The last, empty batch of an epoch still runs its microbatches."""
    work = Work.of(array(), PackCost(1.0, 0.0, 8.0))
    for model, passes in ((StepModel(), 3), (StepModel(num_stages=4), 6), (StepModel(ranks_meet=True), 3)):
        bound = step_bound(work, 2, 10, 3, model)
        assert bound.time * work.unit == 8.0 * passes
        assert bound.min_microbatches == 3
