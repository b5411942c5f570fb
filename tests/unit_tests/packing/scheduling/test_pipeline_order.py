"""The order of packs and their sizes: what fills a pipeline's bubbles, and moves nothing between
ranks.
"""

import dataclasses

import numpy as np
import pytest

from megatron.packing.scheduling.cost import PackCost
from megatron.packing.scheduling.pipeline_order import (
    _shapes,
    best_shape,
    order_each_rank,
    order_microbatches,
)
from megatron.packing.scheduling.placement import PackGrid, costs_as_run, sums_of_packs
from megatron.packing.scheduling.problem import ScheduleRequest
from megatron.packing.scheduling.step_time import StepModel, simulate
from tests.unit_tests.packing.requests import request

PIPELINES = [
    StepModel(num_stages=2),
    StepModel(num_stages=4),
    StepModel(num_stages=8),
    StepModel(num_stages=4, num_virtual_stages=2, stage_group=4),
]


def random_placement(rng, model: StepModel) -> tuple[ScheduleRequest, np.ndarray, PackGrid]:
    """Sequences, and packs of any cost: more often full than empty."""
    num_ranks, number = int(rng.integers(1, 5)), int(rng.integers(1, 6)) * model.stage_group
    size = int(rng.integers(1, 8 * num_ranks * number))
    lengths = np.sort(
        np.clip(np.exp(rng.normal(5, rng.choice([0.2, 1.0, 1.7]), size)), 1, 5000).astype(np.int64)
    )[::-1]
    pack = rng.integers(0, num_ranks * number, size)
    capacity = int(np.bincount(pack, weights=lengths).max() * rng.choice([1, 1.5]))
    cost = PackCost(1.0, 1 / 500, float(rng.choice([0, 100])))
    asked = request(
        lengths, num_ranks, capacity, cost=cost, model=model, microbatch_multiple=model.stage_group
    )
    return asked, pack, PackGrid(num_ranks, number, capacity)


def simulated(asked: ScheduleRequest, pack, packs: PackGrid) -> np.ndarray:
    return simulate(
        asked.model.run_packs(costs_as_run(asked, pack, packs)),
        asked.model,
    )


@pytest.mark.parametrize("sync_every_microbatch", [False, True])
@pytest.mark.parametrize("model", PIPELINES, ids=str)
@pytest.mark.usefixtures("form")
def test_pipelines_are_never_slower_than_before(model, sync_every_microbatch):
    """A profile that suits even packs may be 17 % slower with packs that can't be even, and nothing
    would show it.
    """
    model = dataclasses.replace(model, sync_every_microbatch=sync_every_microbatch)
    rng = np.random.default_rng(21)
    quicker = total = 0
    for _ in range(25):
        asked, pack, packs = random_placement(rng, model)
        each_rank = order_each_rank(asked, pack, packs)
        other = order_microbatches(asked, pack, packs) if sync_every_microbatch else each_rank.pack
        assert other.dtype == np.int64
        assert (other // packs.num_microbatches == pack // packs.num_microbatches).all()
        assert np.bincount(other, weights=asked.sorted.length).max() <= packs.capacity
        before, after = simulated(asked, pack, packs), simulated(asked, other, packs)
        if not sync_every_microbatch:
            assert each_rank.ends.tolist() == after.tolist()
        assert (after <= before * (1 + 1e-9)).all()
        quicker += int((after < before).sum())
        total += before.size
        # all ranks change the order alike, or each microbatch would wait for another costly pack
        if sync_every_microbatch:
            pairs = set(
                zip(
                    (pack % packs.num_microbatches).tolist(),
                    (other % packs.num_microbatches).tolist(),
                )
            )
            assert len(pairs) == len({old for old, _ in pairs}) == len({new for _, new in pairs})
    assert quicker > 0.3 * total


def test_small_packs_first_and_last():
    """What the shape is for: even packs of many sequences take less time with small packs at both
    ends.
    """
    model = StepModel(num_stages=4)
    asked = request([10] * 640, 1, 10**9, cost=PackCost(1.0, 0.0), model=model)
    packs = PackGrid(1, 16, 10**9)
    other = order_each_rank(asked, np.repeat(np.arange(16), 40), packs).pack
    costs = sums_of_packs(asked.sorted.cost, other, packs)
    # 16 packs and 3 more to fill and drain, at 400 each over 4 stages: equal packs take 19 of them.
    assert simulate(costs, model)[0] < 0.97 * 19 * 400 / 4
    middle = int(costs[0, 4:12].min())
    assert costs[0, 0] < middle > costs[0, -1]


def test_pipelines_too_long_to_simulate():
    """1,024 microbatches of 8 stages have 16,384 passes: the order is a guess there, and still
    valid.
    """
    rng = np.random.default_rng(23)
    pack, packs = np.arange(4096) % 2048, PackGrid(2, 1024, 10**9)
    lengths = np.sort(rng.integers(1, 100, 4096))[::-1]
    for chunks in (1, 2):
        model = StepModel(
            num_stages=8, num_virtual_stages=chunks, stage_group=8 if chunks > 1 else 1
        )
        asked = request(lengths, 2, 10**9, model=model, microbatch_multiple=8)
        other = order_each_rank(asked, pack, packs).pack
        assert (order_microbatches(asked, pack, packs).tolist() == pack.tolist()) == (chunks > 1)
        costs = [
            np.sort(sums_of_packs(asked.sorted.cost, placed, packs), axis=1).tolist()
            for placed in (pack, other)
        ]
        assert costs[0] == costs[1]
        assert (other.tolist() == pack.tolist()) == (chunks > 1)


def time_over_equal(shape, model: StepModel, fixed: float = 0.0) -> float:
    """Simulated time of one rank over that of as many equal packs."""
    time, equal = simulate(np.stack([shape, np.ones(shape.size)]) + fixed, model)
    return time / equal


@pytest.mark.parametrize(
    ("stages", "chunks", "num_microbatches", "optimum"),
    [
        (2, 1, 8, 0.9495),
        (4, 1, 4, 0.9486),
        (4, 1, 16, 0.9335),
        (8, 1, 8, 0.9304),
        (8, 1, 32, 0.9243),
        (8, 1, 64, 0.9479),
        (16, 1, 16, 0.9214),
        (8, 2, 8, 1.0),
        (8, 2, 16, 0.9867),
        (8, 2, 32, 0.9655),
    ],
)
def test_near_the_optimum(stages, chunks, num_microbatches, optimum):
    """The optima are those of linear programs: each pass after those that it waits for, sizes free,
    their sum given (solved with scipy's HiGHS).
    """
    model = StepModel(
        num_stages=stages, num_virtual_stages=chunks, stage_group=stages if chunks > 1 else 1
    )
    shape = best_shape(model, num_microbatches, fixed=0.0, largest=8.0)
    assert shape.shape == (num_microbatches,)
    assert shape.mean() == pytest.approx(1.0)
    assert (
        optimum - 1e-4 < time_over_equal(shape, model) < optimum + (0.006 if chunks == 1 else 0.02)
    )


@pytest.mark.parametrize(("fixed", "optimum"), [(0.25, 0.9152), (1.0, 0.9158)])
def test_fixed_costs_count(fixed, optimum):
    """A microbatch's fixed cost is the same in all packs: sizes must be the more uneven for costs
    as good.
    """
    model = StepModel(num_stages=8)
    with_fixed, without = (
        best_shape(model, 16, fixed=counted, largest=8.0) for counted in (fixed, 0.0)
    )
    assert optimum - 1e-4 < time_over_equal(with_fixed, model, fixed) < optimum + 0.006
    assert time_over_equal(with_fixed, model, fixed) < time_over_equal(without, model, fixed)


@pytest.mark.parametrize("largest", [1.0, 1.1, 1.25])
def test_no_pack_beyond_the_capacity(largest):
    """Larger ones would not fit the capacity, and what spills over lands anywhere."""
    shape = best_shape(StepModel(num_stages=8), 32, fixed=0.0, largest=largest)
    assert shape.max() <= max(largest, 1.0) + 1 / 16
    if largest == 1.0:
        assert np.ptp(shape) < 1e-9


def test_long_pipelines_are_even_in_the_middle():
    """The ends do not depend on how long the middle is, and are searched for in a shorter
    pipeline."""
    shape = best_shape(StepModel(num_stages=4), 1000, fixed=0.0, largest=2.0)
    assert np.ptp(shape[64:900]) < 1 / 1000
    assert shape[0] < 0.5 > shape[-1]


def test_equal_shapes_are_tried_once():
    """Each shape is a split and a simulation of all ranks: a third of the time of scheduling."""
    for num_stages, num_microbatches, count in ((2, 64, 2), (8, 16, 3)):
        asked = request(np.full(640, 100), 2, 8192, model=StepModel(num_stages=num_stages))
        shapes = _shapes(asked, PackGrid(2, num_microbatches, 8192))
        assert len(shapes) == len({tuple(shape) for shape in shapes}) == count
        assert all(np.isclose(shape.mean(), 1) for shape in shapes)
