"""Lower bounds against brute force: a bound above the optimum would certify wrong schedules as
optimal.
"""

import numpy as np
import pytest

from megatron.packing.scheduling.cost import PackCost
from megatron.packing.scheduling.default import default
from megatron.packing.scheduling.problem import Schedule
from megatron.packing.scheduling.step_time import StepModel
from tests.unit_tests.packing.brute_force import MODES, least_time, optimum, random_request
from tests.unit_tests.packing.requests import request


@pytest.mark.parametrize(("masks", "launches"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize(
    ("mode", "met"),
    [("ranks", 0.75), ("pipelines", 0.4), ("unequal stages", 0.15), ("ranks that meet", 0.45)],
)
def test_bound_is_never_above_the_optimum_and_often_meets_it(mode, met, masks, launches):
    """A bound above the optimum reports "1.000 of the bound" for schedules that others beat, and
    ends searches.
    """
    rng = np.random.default_rng(11)
    exact = total = 0
    for case in range(450):
        asked = random_request(rng, MODES[mode][case % len(MODES[mode])], masks, launches)
        best = optimum(asked)
        assert asked.bound <= best * (1 + 1e-9), asked
        exact += asked.bound >= best * (1 - 1e-9)
        total += 1
        multiple = asked.microbatch_multiple
        for number in range(multiple, asked.fewest_microbatches, multiple):
            assert least_time(asked, number) is None, (asked, number)
    assert exact > met * total, exact / total


@pytest.mark.parametrize("chunks", [1, 2])
def test_equal_packs_take_no_less_than_the_bound_in_unequal_stages(chunks):
    """The flow shop says nothing there: a slow first stage never waits. One pack per microbatch is
    all that there is to schedule, so that the simulation is the optimum.
    """
    rng = np.random.default_rng(3)
    ratios = []
    for _ in range(60):
        stages = int(rng.integers(2, 5))
        shares = rng.dirichlet(np.full(stages * chunks, 4.0))
        group = stages if chunks > 1 else 1
        model = StepModel(
            num_stages=stages,
            num_virtual_stages=chunks,
            stage_group=group,
            shares=tuple((shares / shares.sum()).tolist()),
        )
        number = int(rng.integers(1, 4)) * stages
        cost = PackCost(1.0, 0.0, float(rng.integers(0, 2)))
        asked = request([8] * number, 1, 8, cost=cost, model=model, microbatch_multiple=group)
        time = model.time_of(np.full((1, number), 8 + cost.fixed))
        ratios.append(time / asked.bound)
    assert min(ratios) >= 1 - 1e-12
    assert min(ratios) < 1.001
    assert np.median(ratios) < (1.12 if chunks == 1 else 1.3)


def test_bound_by_hand():
    """Literal numbers: a factor wrong in all modes alike would pass every relative check."""

    def bound(capacity: int, model: StepModel) -> float:
        return request([4, 3, 2, 1], 2, capacity, cost=PackCost(1.0, 0.0, 10.0), model=model).bound

    # One microbatch of 5 on each of two ranks; with two stages, of half of it each, the pipeline
    # fills once more.
    assert bound(5, StepModel()) == 5 + 10
    assert bound(5, StepModel(num_stages=2)) == 2 * (5 + 10) / 2
    assert bound(5, StepModel(sync_every_microbatch=True)) == 5 + 10
    # At a capacity of 4 there must be two.
    assert bound(4, StepModel()) == 5 + 20
    assert bound(4, StepModel(sync_every_microbatch=True)) == 5 + 20


def test_packs_that_are_too_small_for_their_launches():
    """Empty packs would be free, and many of them preferred to one."""
    cost = PackCost(1.0, 0.0, fixed=2.0, least=8.0)
    asked = request([9, 1, 1], 2, 9, cost=cost, model=StepModel(num_stages=2))
    assert asked.bound == (11 + 11) / 2  # the 9 and its fixed cost, and as much to fill
    assert request([1, 1], 2, 9, cost=cost, model=StepModel(num_stages=2)).bound == (8 + 8) / 2
    schedule = Schedule(np.array([0, 1, 1]), np.array([1, 0, 0]), 2, 2)
    assert asked.pack_costs(schedule).tolist() == [[8, 11], [8, 8]]


@pytest.mark.parametrize("stages", [4, 8])
def test_packs_are_not_more_than_their_launches_pay_for(stages):
    """Packs that only launch kernels would be as good as free, and steps up to 19 % longer."""
    model = StepModel(num_stages=stages)
    lengths = [10] * 64

    def number(least: float) -> int:
        cost = PackCost(1.0, 0.0, fixed=1.0, least=least)
        return default(request(lengths, 1, 100, cost=cost, model=model)).num_microbatches

    numbers = [number(least) for least in (0.0, 20.0, 40.0, 80.0)]
    assert numbers == sorted(numbers, reverse=True)
    assert numbers[0] > 2 * numbers[-1]


def test_costliest_rank_by_hand():
    """Each of the three bounds must be the largest somewhere, or it may be wrong unseen."""

    def bound(*lengths: int) -> float:
        return request([*lengths], 2, 10, cost=PackCost(1.0, 0.0)).rank_cost_bound

    assert bound(5, 4, 4, 4, 1) == 9  # the mean
    assert bound(9, 1, 1) == 9  # the costliest
    assert bound(4, 4, 4) == 8  # two of three share a rank
    assert bound() == 0


def test_fewest_packs_by_hand():
    """Too many would raise the number of microbatches of every step."""
    assert request([6, 6, 6], 1, 10).fewest_packs == 3  # none may share a pack
    assert request([6, 4, 4, 3, 3], 1, 10).fewest_packs == 2
    assert request([8, 8, 3, 3], 1, 10).fewest_packs == 3  # nothing fits beside the long ones
    assert request([], 1, 10).fewest_packs == 0


def test_bound_without_sequences():
    """The last, empty batch of an epoch still runs its microbatches."""
    for model, passes in (
        (StepModel(), 3),
        (StepModel(num_stages=4), 6 / 4),
        (StepModel(sync_every_microbatch=True), 3),
    ):
        asked = request([], 2, 10, microbatch_multiple=3, cost=PackCost(1.0, 0.0, 8.0), model=model)
        assert asked.bound == 8.0 * passes
