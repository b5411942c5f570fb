"""Shapes of pipelines: what the optimum by linear programming is, reached within a percent or two."""

import numpy as np
import pytest

from megatron.packing.scheduling.shape import MEAN, best_shape
from megatron.packing.scheduling.step_time import StepModel, simulate

COST = 1 << 20


def time_over_equal(shape, model: StepModel, fixed: float = 0.0) -> float:
    """Simulated time of one rank over that of as many equal packs."""
    chunks = model.num_virtual_stages
    packs = np.stack([shape / shape.mean(), np.ones(shape.size)]) + fixed
    time, equal = simulate(np.rint(packs * COST / chunks).astype(np.int64) * chunks, model)
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
    """The optima are those of linear programs: each pass after those that it waits for, sizes free, their sum given
    (solved with scipy's HiGHS).
    """
    model = StepModel(num_stages=stages, num_virtual_stages=chunks, stage_group=stages if chunks > 1 else 1)
    shape = best_shape(model, num_microbatches, fixed=0.0, room=8.0)
    assert shape.shape == (num_microbatches,)
    assert shape.mean() == pytest.approx(MEAN, rel=1e-3)
    assert optimum - 1e-4 < time_over_equal(shape, model) < optimum + (0.006 if chunks == 1 else 0.02)


@pytest.mark.parametrize(("fixed", "optimum"), [(0.25, 0.9152), (1.0, 0.9158)])
def test_fixed_costs_count(fixed, optimum):
    """A microbatch's fixed cost is the same in all packs: sizes must be the more uneven for costs as good."""
    model = StepModel(num_stages=8)
    with_fixed, without = (best_shape(model, 16, fixed=counted, room=8.0) for counted in (fixed, 0.0))
    assert optimum - 1e-4 < time_over_equal(with_fixed, model, fixed) < optimum + 0.006
    assert time_over_equal(with_fixed, model, fixed) < time_over_equal(without, model, fixed)


@pytest.mark.parametrize("room", [1.0, 1.1, 1.25])
def test_no_pack_beyond_the_room(room):
    """Larger ones would not fit the capacity, and what spills over lands anywhere."""
    shape = best_shape(StepModel(num_stages=8), 32, fixed=0.0, room=room)
    assert shape.max() <= MEAN * (max(room, 1.0) + 1 / 16)
    if room == 1.0:
        assert np.ptp(shape) == 0


def test_long_pipelines_are_even_in_the_middle():
    """The ends do not depend on how long the middle is, and are searched for in a shorter pipeline."""
    shape = best_shape(StepModel(num_stages=4), 1000, fixed=0.0, room=2.0)
    assert np.ptp(shape[64:900]) < MEAN / 1000
    assert shape[0] < MEAN / 2 > shape[-1]
