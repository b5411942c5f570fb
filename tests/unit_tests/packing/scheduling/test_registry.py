"""The schedulers that have names, and those that users bring."""

import pytest
from hypothesis import given, settings

from megatron.packing.scheduling.problem import CapacityError, check_schedule
from megatron.packing.scheduling.registry import SCHEDULERS, get_scheduler
from tests.unit_tests.packing.requests import packs, request, requests


@pytest.mark.slow
@settings(max_examples=200)
@given(asked=requests())
def test_dp_balanced_is_valid(asked):
    """A pack over capacity is out of memory on one GPU hours later; an idle rank with work left is
    lost time.
    """
    schedule = SCHEDULERS["dp_balanced"](asked)
    check_schedule(asked, schedule)
    all_packs = [pack for rank in packs(schedule) for pack in rank]
    assert sorted(i for pack in all_packs for i in pack) == list(range(asked.lengths.size))
    assert sum(map(bool, all_packs)) == min(len(all_packs), asked.lengths.size)


def test_dp_balanced_by_hand():
    """The order and the dealing are what users of Megatron-LM's scheduler compare with."""
    schedule = SCHEDULERS["dp_balanced"](request([4, 4, 4, 6, 3, 9, 1], 2, 10))
    assert packs(schedule) == [[[0, 1], [4]], [[2, 3], [5, 6]]]


def test_dp_balanced_splits_the_largest_pack_for_idle_ranks():
    """Megatron-LM asserts where a batch fits one pack; leaving ranks idle would be as bad, and
    silent.
    """
    assert packs(SCHEDULERS["dp_balanced"](request([1] * 8, 2, 100))) == [
        [[0, 1, 2, 3]],
        [[4, 5, 6, 7]],
    ]
    assert packs(SCHEDULERS["dp_balanced"](request([9, 1, 1, 1], 3, 100))) == [
        [[0]],
        [[1]],
        [[2, 3]],
    ]
    assert packs(SCHEDULERS["dp_balanced"](request([7], 2, 7))) == [[[0]], [[]]]


@settings(max_examples=100)
@given(asked=requests(whole_fetches_fit=True))
def test_empty_packs_as_loaded(asked):
    """`empty` must not move what the sampler placed."""
    schedule = SCHEDULERS["empty"](asked)
    check_schedule(asked, schedule)
    assert (schedule.rank == asked.source_rank).all()
    assert (schedule.microbatch == asked.source_fetch).all()
    fewest = max(asked.num_fetches, 1)
    assert fewest <= schedule.num_microbatches < fewest + asked.microbatch_multiple


def test_empty_over_capacity():
    """A sampler that packs too much must not reach the GPU."""
    with pytest.raises(
        CapacityError,
        match=r"microbatch 1 of rank 0 has 12 tokens.*10.*--max-seqlen-per-dp-cp-rank",
    ):
        SCHEDULERS["empty"](request([5, 5, 6, 6], 1, 10, per_fetch=2))


REGISTRY = "megatron.packing.scheduling.registry"


@pytest.mark.parametrize("name", SCHEDULERS)
def test_no_sequences(name):
    """The last, empty batch of an epoch must not hang or divide by zero."""
    schedule = SCHEDULERS[name](request([], 3, 10, microbatch_multiple=2))
    assert packs(schedule) == [[[], []]] * 3


def test_a_name_or_a_function_of_ones_own():
    """Users bring schedulers without a change to this package."""
    for name, scheduler in SCHEDULERS.items():
        assert get_scheduler(name) is scheduler
    assert get_scheduler(f"{REGISTRY}:default") is SCHEDULERS["default"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "dp-balanced",
            r"must be one of .*dp_balanced.* or module:function.*did you mean dp_balanced\?",
        ),
        ("", rf"must be one of {', '.join(SCHEDULERS)} or module:function, but is ''$"),
        (
            "no_such_module:function",
            r"'no_such_module:function' can't be imported: No module named 'no_such_module'",
        ),
        (
            f"{REGISTRY}:no_such",
            r"can't be imported: .*has no attribute 'no_such'; give module:function",
        ),
        (f"{REGISTRY}:", rf"'{REGISTRY}:' can't be imported: .*; give module:function"),
        (":default", r"':default' can't be imported: .*; give module:function"),
        (".registry:default", r"'.registry:default' can't be imported: .*; give module:function"),
        (
            "megatron.packing.scheduling.step_time:GOOD_ENOUGH",
            r"GOOD_ENOUGH' must be a function, but is 1.0002",
        ),
    ],
)
def test_wrong_names_are_refused(name, message):
    """A typo must not fall back to something, nor end in a traceback that doesn't name the flag."""
    with pytest.raises(ValueError, match=message) as error:
        get_scheduler(name)
    assert str(error.value).startswith("--sequence-packing-scheduler")
