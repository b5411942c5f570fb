"""Schedulers: always valid, and `default` balanced."""

import dataclasses
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.packing.bounds import microbatch_lower_bound, rank_cost_lower_bound
from megatron.packing.cost import PackCost
from megatron.packing.schedule import CapacityError, Schedule, ScheduleRequest, check_schedule
from megatron.packing.schedulers import SCHEDULERS, get_scheduler

COST = PackCost(linear=1.0, quadratic=1 / 8192)


def request(lengths, num_ranks, capacity, *, microbatch_multiple=1, per_draw=1) -> ScheduleRequest:
    """Sequences dealt to source ranks in equal shares, `per_draw` of them by each `next`."""
    n = len(lengths)
    per_rank = -(-n // num_ranks)
    position = np.arange(n) % max(per_rank, 1)
    return ScheduleRequest(
        lengths=np.array(lengths, np.int64),
        source_rank=np.arange(n) // max(per_rank, 1),
        source_draw=position // per_draw,
        num_ranks=num_ranks,
        num_draws=-(-per_rank // per_draw),
        capacity=capacity,
        cost=COST,
        microbatch_multiple=microbatch_multiple,
    )


def packs(schedule: Schedule) -> list[list[list[int]]]:
    return [[pack.tolist() for pack in schedule.packs_of(rank)] for rank in range(schedule.num_ranks)]


@st.composite
def requests(draw, max_draw_tokens=None):
    capacity = draw(st.integers(1, 60))
    longest = draw(st.integers(1, capacity))
    lengths = draw(st.lists(st.integers(1, longest), max_size=40))
    per_draw = draw(st.integers(1, 3))
    return request(
        lengths,
        draw(st.integers(1, 9)),
        capacity if max_draw_tokens is None else capacity * per_draw,
        microbatch_multiple=draw(st.integers(1, 4)),
        per_draw=per_draw,
    )


@pytest.mark.parametrize("name", ["default", "dp_balanced"])
@settings(max_examples=1500, deadline=None)
@given(asked=requests())
def test_schedules_are_valid(name, asked):
    """A pack over capacity is out of memory on one GPU hours later; an idle rank with work left is lost time."""
    schedule = SCHEDULERS[name](asked)
    check_schedule(asked, schedule)
    all_packs = [pack for rank in packs(schedule) for pack in rank]
    assert sorted(i for pack in all_packs for i in pack) == list(range(asked.lengths.size))
    assert all(pack == sorted(pack) for pack in all_packs)
    assert sum(map(bool, all_packs)) == min(len(all_packs), asked.lengths.size)
    again = SCHEDULERS[name](dataclasses.replace(asked, lengths=asked.lengths.copy()))
    assert packs(again) == packs(schedule)


@settings(max_examples=500, deadline=None)
@given(asked=requests(max_draw_tokens="whole draws fit"))
def test_empty_packs_as_drawn(asked):
    """`empty` must not move what the sampler placed."""
    schedule = SCHEDULERS["empty"](asked)
    check_schedule(asked, schedule)
    assert (schedule.rank == asked.source_rank).all()
    assert (schedule.microbatch == asked.source_draw).all()
    fewest = max(asked.num_draws, 1)
    assert fewest <= schedule.num_microbatches < fewest + asked.microbatch_multiple


@settings(max_examples=500, deadline=None)
@given(asked=requests())
def test_default_takes_few_microbatches(asked):
    """Packing by balance alone fragments; without the tighter fallback nobody would notice the extra microbatches."""
    per_rank = SCHEDULERS["default"](asked).num_microbatches
    bound = microbatch_lower_bound(asked.lengths, asked.num_ranks, asked.capacity, asked.microbatch_multiple)
    # Best-fit-decreasing needs at most 11/9 of the optimum's packs plus 1, which is rounded up to the multiple.
    packs_per_step = asked.num_ranks * asked.microbatch_multiple
    assert per_rank * asked.num_ranks < 11 / 9 * bound * asked.num_ranks + 1 + packs_per_step


def test_default_by_hand():
    """Costliest first to the cheapest rank; the costliest pack of a rank first."""
    assert packs(SCHEDULERS["default"](request([5, 4, 3, 3, 3], 2, 18))) == [[[0, 3]], [[1, 2, 4]]]
    assert packs(SCHEDULERS["default"](request([1, 9, 1, 9, 1, 1], 2, 10))) == [[[1], [0, 4]], [[3], [2, 5]]]


def test_default_returns_to_a_rank_that_had_no_room():
    """Rank 1 (6, 6) has no room for the second 5; forgetting it would send both 4s to the tighter fallback."""
    assert packs(SCHEDULERS["default"](request([9, 6, 6, 5, 5, 4, 4], 2, 10))) == [[[3, 4], [0]], [[1, 5], [2, 6]]]


def test_default_falls_back_to_tight_packs():
    """Placing 4, 4 | 3, 3 first leaves no room for 2, 2 and 2; best fit finds 4 4 2 | 3 3 2 2."""
    schedule = SCHEDULERS["default"](request([4, 4, 3, 3, 2, 2, 2], 2, 10))
    assert schedule.num_microbatches == 1
    assert packs(schedule) == [[[0, 1, 4]], [[2, 3, 5, 6]]]


def test_default_leaves_no_pack_empty_beside_a_giant():
    """The rank of a giant takes nothing else by balance, but an empty pack is a wasted microbatch."""
    schedule = SCHEDULERS["default"](request([1000, *[10] * 20], 2, 1000, microbatch_multiple=2))
    assert [[len(pack) for pack in rank] for rank in packs(schedule)] == [[1, 1], [10, 9]]


def first_fit_decreasing_cost(lengths, num_ranks, capacity) -> float:
    """Cost of the costliest rank where first-fit-decreasing packs go to ranks in turn."""
    rooms: list[int] = []
    costs = np.zeros(num_ranks)
    for length in sorted(lengths.tolist(), reverse=True):
        pack = next((pack for pack, room in enumerate(rooms) if room >= length), len(rooms))
        if pack == len(rooms):
            rooms.append(capacity)
        rooms[pack] -= length
        costs[pack % num_ranks] += COST(np.array([length]))[0]
    return costs.max()


DISTRIBUTIONS = {
    "lognormal": lambda rng, n: np.clip(np.exp(rng.normal(8.2, 0.6, n)), 1024, 8192),
    "long tail": lambda rng, n: np.clip(np.exp(rng.normal(6.5, 1.5, n)), 16, 131072),
    "uniform": lambda rng, n: rng.integers(1, 8193, n),
    "constant": lambda rng, n: np.full(n, 1000),
    "one giant": lambda rng, n: np.append(rng.integers(16, 512, n - 1), 65536),
}


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_default_is_balanced(distribution):
    """A bug that only costs balance shows nowhere else: training is right, and slow."""
    rng = np.random.default_rng(3)
    for seed_case in range(12):
        num_ranks, n = [(2, 64), (8, 64), (8, 512), (32, 512)][seed_case % 4]
        lengths = DISTRIBUTIONS[distribution](rng, n).astype(np.int64)
        capacity = int(lengths.max()) * (1 + seed_case // 6)
        asked = request(lengths, num_ranks, capacity)
        schedule = SCHEDULERS["default"](asked)
        costs = COST(lengths)
        worst = np.bincount(schedule.rank, weights=costs).max()
        bound = rank_cost_lower_bound(costs, num_ranks)
        assert worst <= first_fit_decreasing_cost(lengths, num_ranks, capacity) * (1 + 1e-12)
        fill = lengths.sum() / (capacity * num_ranks * schedule.num_microbatches)
        if costs.max() < 0.5 * costs.sum() / num_ranks and fill < 0.9:
            assert worst <= 1.05 * bound


def test_default_is_fast():
    """Scheduling is inside the step: an accidental O(N^2) would cost seconds at 512 ranks."""
    rng = np.random.default_rng(4)
    for name in ("lognormal", "uniform"):
        asked = request(DISTRIBUTIONS[name](rng, 8192).astype(np.int64), 512, 8192)
        seconds = []
        for _ in range(3):
            start = time.perf_counter()
            SCHEDULERS["default"](asked)
            seconds.append(time.perf_counter() - start)
        assert min(seconds) < 0.5


def test_dp_balanced_by_hand():
    """The order and the dealing are what users of Megatron-LM's scheduler compare with."""
    schedule = SCHEDULERS["dp_balanced"](request([4, 4, 4, 6, 3, 9, 1], 2, 10))
    assert packs(schedule) == [[[0, 1], [4]], [[2, 3], [5, 6]]]


def test_dp_balanced_splits_the_largest_pack_for_idle_ranks():
    """Megatron-LM asserts where a batch fits one pack; leaving ranks idle would be as bad, and silent."""
    assert packs(SCHEDULERS["dp_balanced"](request([1] * 8, 2, 100))) == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]
    assert packs(SCHEDULERS["dp_balanced"](request([9, 1, 1, 1], 3, 100))) == [[[0]], [[1]], [[2, 3]]]
    assert packs(SCHEDULERS["dp_balanced"](request([7], 2, 7))) == [[[0]], [[]]]


@pytest.mark.parametrize("name", SCHEDULERS)
def test_no_sequences(name):
    """The last, empty batch of an epoch must not hang or divide by zero."""
    schedule = SCHEDULERS[name](request([], 3, 10, microbatch_multiple=2))
    assert packs(schedule) == [[[], []]] * 3


def test_empty_over_capacity():
    """A sampler that packs too much must not reach the GPU."""
    with pytest.raises(CapacityError, match=r"microbatch 1 of rank 0 has 12 tokens.*10.*--max-seqlen-per-dp-cp-rank"):
        SCHEDULERS["empty"](request([5, 5, 6, 6], 1, 10, per_draw=2))


def test_sequence_over_capacity_is_named():
    """The user must learn which sequence, how long, and what to do."""
    with pytest.raises(
        CapacityError, match=r"sequence 3 .*rank 1, draw 1.* 11 tokens.*10; raise --max-seqlen-per-dp-cp-rank"
    ):
        request([5, 5, 6, 11], 2, 10)


def test_contradictory_requests_are_refused():
    """A wrong dtype or a rank out of range would index another pack without a word."""
    good = request([3, 4], 2, 10)
    for change, message in (
        ({"lengths": np.array([3, 0])}, "lengths must be at least 1, but spans 0 to 3"),
        ({"lengths": np.array([3.0, 4.0])}, r"lengths must be int64 \[2\], but is float64"),
        ({"source_rank": np.array([0, 2])}, "source_rank must be at least 0 and below 2"),
        ({"source_draw": np.array([0])}, r"source_draw must be int64 \[2\]"),
        ({"num_ranks": 0}, "num_ranks must be at least 1, but is 0"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(good, **change)


def test_check_schedule_finds_each_violation():
    """The tests above, and schedulers of users, rely on it."""
    asked = request([6, 5, 4], 2, 10, microbatch_multiple=2)
    good = Schedule(np.array([0, 1, 0]), np.array([0, 0, 1]), 2, 2)
    check_schedule(asked, good)
    for change, message in (
        ({"num_ranks": 3}, "must be for 2 ranks"),
        ({"num_microbatches": 3}, "positive multiple of 2, but are 3"),
        ({"num_microbatches": 0}, "positive multiple of 2, but are 0"),
        ({"rank": np.array([0, 1])}, r"schedule.rank must be int64 \[3\]"),
        ({"rank": np.array([0, 1, 2])}, "schedule.rank must be"),
        ({"microbatch": np.array([0, 0, 2])}, "schedule.microbatch must be"),
        ({"rank": np.array([0, 0, 1])}, "microbatch 0 of rank 0 has 11 tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            check_schedule(asked, dataclasses.replace(good, **change))


def test_unknown_scheduler():
    """A typo must not fall back to something."""
    assert get_scheduler("dp_balanced") is SCHEDULERS["dp_balanced"]
    with pytest.raises(
        ValueError, match=r"--sequence-packing-scheduler must be one of default, empty, dp_balanced.*mean dp_balanced\?"
    ):
        get_scheduler("dp-balanced")
