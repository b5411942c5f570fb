"""The closer bound of rows, against all schedules of a few long sequences."""

import numpy as np
import pytest

from megatron.packing.scheduling import row_search
from megatron.packing.scheduling.balance import default
from megatron.packing.scheduling.cost import PackCost
from megatron.packing.scheduling.row_search import closer_bound
from megatron.packing.scheduling.schedule import ScheduleRequest
from megatron.packing.scheduling.step_time import StepModel
from tests.unit_tests.packing.brute_force import descending, least_time

MEETING = StepModel(ranks_meet=True)


def request_of(lengths, num_ranks: int, capacity: int, cost: PackCost, model: StepModel = MEETING) -> ScheduleRequest:
    size = lengths.size
    return ScheduleRequest(
        lengths=lengths,
        source_rank=np.zeros(size, np.int64),
        source_draw=np.zeros(size, np.int64),
        num_ranks=num_ranks,
        num_draws=1,
        capacity=capacity,
        cost=cost,
        microbatch_multiple=1,
        model=model,
    )


def time_of_default(request: ScheduleRequest) -> int:
    schedule = default(request)
    pack = schedule.pack[request.work.order]
    return request.model.time_of(request.work.pack_costs(pack, request.num_ranks, schedule.num_microbatches))


@pytest.mark.parametrize("alone", [40, 1])
def test_the_closer_bound_is_never_above_the_optimum(monkeypatch, alone):
    """With one tier for each sequence, and with few for all."""
    monkeypatch.setattr(row_search, "_MOST_ALONE", alone)
    monkeypatch.setattr(row_search, "_NUM_SHARED", 2 if alone == 1 else 96)
    rng = np.random.default_rng(11)
    closer = exact = 0
    for _ in range(250):
        num_ranks, longest = int(rng.integers(1, 4)), int(rng.integers(8, 40))
        lengths = descending(rng, max(longest // 5, 1), longest + 1, int(rng.integers(4, 8)))
        lengths[0] = longest
        cost = PackCost(linear=float(rng.choice([1, 20])), quadratic=1.0, fixed=float(rng.choice([0, 5])))
        request = request_of(lengths, num_ranks, int(longest * rng.choice([1, 1.2, 2])), cost)
        fewest = request.bound.min_microbatches
        times = [least_time(request.work, num_ranks, fewest + k, request.capacity, MEETING) for k in range(4)]
        optimum = min(time for time in times if time is not None)
        bound = closer_bound(request, optimum + optimum // 20)
        assert request.bound.time <= bound <= optimum, (lengths, num_ranks, request.capacity)
        closer += bound > request.bound.time
        exact += bound > 0.97 * optimum
    assert closer > (15 if alone == 40 else 0), closer
    assert exact > 100, exact


def test_where_few_long_sequences_decide_it_is_much_closer():
    """Five documents on two ranks: 25 and 21 thousand tokens find no room for one another."""
    rng = np.random.default_rng(0)
    lengths = np.concatenate(([64228, 42378, 30216, 25673, 21905], rng.integers(100, 1100, 50)))
    request = request_of(lengths, 2, 64228, PackCost(linear=14000.0, quadratic=0.26, fixed=7e6))
    time = time_of_default(request)
    bound = closer_bound(request, time)
    assert time > 1.04 * request.bound.time
    assert time < 1.01 * bound


def test_where_a_third_row_decides_it_is_much_closer():
    """Fourteen documents on four ranks: what is left for a third row finds no room in packs of like cost."""
    rng = np.random.default_rng(23)
    lengths = np.concatenate((rng.integers(20000, 60000, 14), rng.integers(100, 1100, 20)))
    request = request_of(lengths, 4, int(lengths.max()), PackCost(linear=14000.0, quadratic=0.26, fixed=7e6))
    time = time_of_default(request)
    assert time > 1.06 * request.bound.time
    assert time < 1.01 * closer_bound(request, time)


def test_other_modes_and_schedules_as_good_as_the_bound_gain_nothing():
    lengths = np.array([9, 7, 5, 4, 2])
    cost = PackCost(linear=1.0, quadratic=1.0, fixed=1.0)
    for model in (StepModel(), StepModel(num_stages=2, ranks_meet=True)):
        request = request_of(lengths, 2, 9, cost, model)
        assert closer_bound(request, 2 * request.bound.time) == request.bound.time
    request = request_of(lengths, 2, 9, cost)
    assert closer_bound(request, request.bound.time) == request.bound.time
