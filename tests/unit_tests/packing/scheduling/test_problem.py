"""What schedulers are asked and answer: contradictions are found before they index another pack
without a word.
"""

import dataclasses

import numpy as np
import pytest

from megatron.packing.scheduling.cost import PackCost
from megatron.packing.scheduling.problem import (
    CapacityError,
    Schedule,
    check_schedule,
    sorted_order,
)
from megatron.packing.scheduling.step_time import StepModel
from tests.unit_tests.packing.requests import request
from tests.unit_tests.packing.stubs import array


def test_sequence_over_capacity_is_named():
    """The user must learn which sequence, how long, and what to do."""
    with pytest.raises(
        CapacityError,
        match=r"sequence 3 .*rank 1, fetch 1.* 11 tokens.*10; raise --max-seqlen-per-dp-cp-rank",
    ):
        request([5, 5, 6, 11], 2, 10)


def test_contradictory_requests_are_refused():
    """A wrong dtype or a rank out of range would index another pack without a word."""
    good = request([3, 4], 2, 10)
    for change, message in (
        ({"lengths": np.array([3, 0])}, "lengths must be at least 1, but spans 0 to 3"),
        ({"lengths": np.array([3.0, 4.0])}, r"lengths must be int64 \[2\], but is float64"),
        ({"source_rank": np.array([0, 2])}, "source_rank must be at least 0 and below 2"),
        ({"source_fetch": np.array([0])}, r"source_fetch must be int64 \[2\]"),
        (
            {"steps_delayed": np.array([0, -1])},
            "steps_delayed must be at least 0, but spans -1 to 0",
        ),
        (
            {"loss_tokens": [1, 2]},
            r"loss_tokens must be a numpy array, int64 \[2\], but is \[1, 2\]",
        ),
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
        ({"num_microbatches": 10**12}, "must be at most 4, but are 1000000000000"),
        ({"num_microbatches": 2.0}, "schedule.num_microbatches must be an int, but is 2.0"),
        ({"num_ranks": None}, "schedule.num_ranks must be an int, but is None"),
        ({"rank": np.array([0, 1])}, r"schedule.rank must be int64 \[3\]"),
        (
            {"rank": [0, 1, 0]},
            r"schedule.rank must be a numpy array, int64 \[3\], but is \[0, 1, 0\]",
        ),
        (
            {"rank": np.array([0, 1, np.nan])},
            r"schedule.rank must be int64 \[3\], but is float64 \[3\]",
        ),
        (
            {"rank": np.array([0, None, 1])},
            r"schedule.rank must be int64 \[3\], but is object \[3\]",
        ),
        (
            {"microbatch": np.zeros((3, 1), np.int64)},
            r"schedule.microbatch must be int64 \[3\], but is int64 \[3, 1\]",
        ),
        (
            {"context_parallel_size": np.ones((2, 2), np.int64)},
            "context_parallel_size must be None",
        ),
        ({"rank": np.array([0, 1, 2])}, "schedule.rank must be"),
        ({"microbatch": np.array([0, 0, 2])}, "schedule.microbatch must be"),
        ({"rank": np.array([0, 0, 1])}, "microbatch 0 of rank 0 has 11 tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            check_schedule(asked, dataclasses.replace(good, **change))


@pytest.mark.parametrize("answer", [None, ([0, 1, 0], [0, 0, 1]), "packs", float("nan")])
def test_what_is_no_schedule_is_refused(answer):
    """A user's scheduler that forgets its return must not end in an AttributeError deep inside of
    the step.
    """
    with pytest.raises(ValueError, match="a scheduler must return a Schedule, but returned"):
        check_schedule(request([6, 5, 4], 2, 10), answer)


def test_packs_are_numbered_by_rank():
    schedule = Schedule(np.array([1, 0, 1, 1, 0]), np.array([2, 0, 0, 2, 0]), 2, 3)
    assert schedule.pack.tolist() == [5, 0, 3, 5, 0]


def test_costs_and_time_of_a_schedule():
    """Reports and the planner show these; a factor between them would be called imbalance."""
    asked = request([4, 3, 2, 1], 2, 5, cost=PackCost(1.0, 0.5, 10.0))
    assert asked.sorted.length.tolist() == [4, 3, 2, 1]
    assert asked.sorted.cost.tolist() == [12, 7.5, 4, 1.5]
    schedule = Schedule(np.array([0, 1, 1, 0]), np.array([0, 0, 1, 0]), 2, 2)
    assert asked.pack_costs(schedule).tolist() == [[23.5, 10], [17.5, 14]]
    assert asked.time_of(schedule) == 33.5
    assert (
        dataclasses.replace(asked, model=StepModel(sync_every_microbatch=True)).time_of(schedule)
        == 37.5
    )


@pytest.mark.parametrize("highest", [3, 2**15, 2**16, 2**20, 2**33, 2**61])
def test_sorted_order_is_stable(highest):
    """Sequences of equal length in another order than they were drawn would still train, but not
    repeat a run.
    """
    values = np.random.default_rng(1).integers(-highest, highest, 500) // 3 * 3
    assert sorted_order(values).tolist() == np.argsort(values, kind="stable").tolist()
    assert sorted_order(array()).size == 0


def test_multiple_of_an_interleaved_pipeline():
    """Other numbers of microbatches would make its stages wait for one another for ever."""
    model = StepModel(num_stages=2, num_virtual_stages=2, stage_group=4)
    request([4, 3], 2, 5, microbatch_multiple=8, model=model)
    with pytest.raises(ValueError, match=r"multiple of the model's stage_group, 4, .* but is 6"):
        request([4, 3], 2, 5, microbatch_multiple=6, model=model)


def test_a_scheduler_can_not_change_what_it_is_asked():
    """One that sorts the lengths in place would pass every check, and pack other sequences over
    capacity.
    """
    lengths = array(3, 1, 2)
    asked = request(lengths, 1, 10)
    for values in (asked.lengths, asked.source_rank, asked.source_fetch):
        with pytest.raises(ValueError, match="read-only"):
            values.sort()
    lengths.sort()  # the caller's own stays as it was
