"""Even placements: valid each, none forgotten, and even where evenness is possible."""

from collections.abc import Iterator
from unittest import mock

import numpy as np
import pytest

from megatron.packing.scheduling.cost import PackCost
from megatron.packing.scheduling.even import Effort, Room, even_ranks
from megatron.packing.scheduling.even_pipelines import even_pipelines
from megatron.packing.scheduling.even_rows import even_rows, rows_with_short_last
from megatron.packing.scheduling.placement import best_fit
from megatron.packing.scheduling.repacking import deal
from megatron.packing.scheduling.step_time import StepModel
from megatron.packing.scheduling.work import Work
from tests.unit_tests.packing.stubs import array


def placements(mode: str, work: Work, room: Room) -> Iterator[np.ndarray | None]:
    def tight() -> np.ndarray | None:
        packs, num_packs = best_fit(work.length, capacity=room.capacity)
        fit = num_packs <= room.num_ranks * room.num_microbatches
        return deal(work.cost, packs, room.num_ranks, room.num_microbatches) if fit else None

    if mode == "ranks":
        return even_ranks(work, room, tight)
    if mode == "rows":
        return even_rows(work, room, tight, lambda: rows_with_short_last(work, room.num_ranks, room.capacity))
    low = 4 * work.total // (room.num_ranks * 4) + work.fixed * (room.num_microbatches + 3)
    return even_pipelines(work, room, tight, 4, low)


@pytest.mark.parametrize("effort", [0, 1000, 10**6])
@pytest.mark.parametrize("mode", ["ranks", "pipelines", "rows"])
def test_placements_are_valid(mode, effort):
    """The search compares them by time alone: one that is over capacity, or lacks a sequence, would win. Something is
    found with no effort left too, wherever best-fit decreasing finds packs.
    """
    rng = np.random.default_rng(51)
    tried = 0
    for _ in range(250):
        num_ranks, num_microbatches = int(rng.integers(1, 7)), int(rng.integers(1, 6))
        longest = int(rng.choice([3, 60]))
        work = Work.of(rng.integers(1, longest + 1, int(rng.integers(1, 60))), PackCost(1.0, 0.02))
        capacity = int(work.length[0] * rng.choice([1, 1.5, 3]))
        room = Room(num_ranks=num_ranks, num_microbatches=num_microbatches, capacity=capacity, effort=Effort(effort))
        found = 0
        for pack in placements(mode, work, room):
            if pack is None:
                continue
            assert pack.shape == work.cost.shape
            assert pack.dtype == np.int64
            assert 0 <= pack.min() <= pack.max() < num_ranks * num_microbatches
            assert np.bincount(pack, weights=work.length).max() <= capacity
            found += 1
        assert found >= (best_fit(work.length, capacity=capacity)[1] <= num_ranks * num_microbatches)
        tried += found
    assert tried > 100


def test_effort_is_counted():
    """Time must not depend on the machine, or schedules would."""
    effort = Effort(10)
    assert effort.spend(4)
    part = effort.part(2)
    assert part.spend(3)
    assert not part.spend(1)
    assert effort.spend(3)
    assert not effort.spend(1)


@pytest.mark.parametrize("mode", ["ranks", "pipelines", "rows"])
def test_sequences_that_can_be_even_are(mode):
    """Thousands of short sequences leave no reason for more than a thousandth."""
    rng = np.random.default_rng(52)
    work = Work.of(rng.integers(1, 100, 4000), PackCost(1.0, 0.0))
    room = Room(num_ranks=4, num_microbatches=4, capacity=20000, effort=Effort(10**6))
    models = {"ranks": StepModel(), "pipelines": StepModel(num_stages=4), "rows": StepModel(ranks_meet=True)}
    model = models[mode]
    times = [model.time_of(work.pack_costs(pack, 4, 4)) for pack in placements(mode, work, room) if pack is not None]
    even = work.total / 16 * (4 + model.num_stages - 1)
    assert even <= min(times) < 1.001 * even


def test_rows_trade_sequences_by_hand():
    """The 8 makes one row long whatever else is in it, so the 3 beside a 5 belongs there: 8 + 5 instead of 8 + 8."""
    work = Work.of(array(8, 5, 5, 3), PackCost(1.0, 0.0))
    room = Room(num_ranks=2, num_microbatches=2, capacity=8, effort=Effort(10**6))
    model = StepModel(ranks_meet=True)
    best = min(
        model.time_of(work.pack_costs(pack, 2, 2)) for pack in placements("rows", work, room) if pack is not None
    )
    assert best * work.unit == 13


def test_rows_are_lowered_by_trades():
    """Sequences that no full row and no even rows suit: trades between rows find what neither way sees."""
    rng = np.random.default_rng(53)
    model = StepModel(ranks_meet=True)
    gains = 0
    for _ in range(60):
        work = Work.of(np.exp(rng.normal(4, 1, 40)).astype(np.int64) + 1, PackCost(1.0, 0.01))
        room = Room(num_ranks=4, num_microbatches=3, capacity=10 * int(work.length[0]), effort=Effort(10**6))
        ways = [pack for pack in placements("rows", work, room) if pack is not None]
        times = [model.time_of(work.pack_costs(pack, 4, 3)) for pack in ways]
        room = Room(num_ranks=4, num_microbatches=3, capacity=room.capacity, effort=Effort(10**6))
        with mock.patch("megatron.packing.scheduling.even_rows._ROUNDS", 0):
            untraded = [pack for pack in placements("rows", work, room) if pack is not None]
        before = min(model.time_of(work.pack_costs(pack, 4, 3)) for pack in untraded)
        assert min(times) <= before
        gains += min(times) < before
    assert gains > 4


def test_rows_with_short_last_by_hand():
    """Where two packs lack a little room, the shortest sequence goes to the next row; best-fit would leave a longer one
    for that, and the row would take as long.
    """
    length = array(6, 5, 5, 3, 2)  # 6 + 3 and 5 + 5 in packs of 10; best-fit alone leaves the 2
    work = Work(order=np.arange(5), length=length, cost=length, fixed=0, unit=1.0)
    rows = rows_with_short_last(work, 2, 10)
    assert rows is not None
    assert rows.num_rows == 2
    assert rows.pack.tolist() == [0, 1, 1, 0, 2]
    assert rows_with_short_last(work, 5, 10) is None  # one row holds all
