"""The `default` scheduler: valid whatever it is asked, near the optimum, and quick."""

import dataclasses
import math
import time

import numpy as np
import pytest
from hypothesis import given, settings

from megatron.packing.scheduling import ranks, synchronous
from megatron.packing.scheduling.cost import PackCost, gpt_pack_cost
from megatron.packing.scheduling.default import default
from megatron.packing.scheduling.placement import place_longest_first
from megatron.packing.scheduling.problem import ScheduleRequest, check_schedule, rounded_up
from megatron.packing.scheduling.step_time import StepModel
from megatron.packing.scheduling.tight_packs import best_fit
from tests.unit_tests.packing.brute_force import MODES, optimum, random_request
from tests.unit_tests.packing.requests import (
    DISTRIBUTIONS,
    MODELS,
    lengths_of,
    packs,
    request,
    requests,
)
from tests.unit_tests.packing.stubs import in_python, needs_compiled

DEAR = PackCost(linear=1.0, quadratic=1 / 8192, fixed=100.0)
"""So that more microbatches are never cheaper."""


def gpt_cost() -> PackCost:
    """Of 8 billion parameters in the shape of Llama 3."""
    shape = {
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_query_groups": 8,
        "kv_channels": 128,
    }
    return gpt_pack_cost(
        num_layers=32, **shape, ffn_hidden_size=14336, vocab_size=128256, swiglu=True
    )


def check(asked: ScheduleRequest) -> None:
    """A valid schedule, without more microbatches than give each sequence a pack of its own."""
    schedule = default(asked)
    check_schedule(asked, schedule)
    all_packs = [pack for rank in packs(schedule) for pack in rank]
    assert sorted(i for pack in all_packs for i in pack) == list(range(asked.lengths.size))
    most = rounded_up(asked.lengths.size / asked.num_ranks, asked.microbatch_multiple)
    assert asked.fewest_microbatches <= schedule.num_microbatches <= most


@pytest.mark.slow
@settings(max_examples=300)
@given(asked=requests(models=MODELS))
def test_schedules_are_valid(asked):
    """A pack over capacity is out of memory on one GPU hours later; empty microbatches are lost
    time.
    """
    check(asked)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:scheduling is slower")
@settings(max_examples=150)
@given(asked=requests(models=MODELS))
def test_schedules_are_valid_without_a_compiler(asked):
    """Few machines run this way, so that nobody would see it break."""
    with in_python():
        check(asked)


def test_without_a_compiler_it_says_so():
    """Scheduling would be slower and a little worse for no reason that a user can see."""
    with in_python(), pytest.warns(UserWarning, match="slower and a little worse.*install a C"):
        default(request([3, 2, 2, 1], 2, 10))


@needs_compiled
@pytest.mark.parametrize(
    ("num_sequences", "num_ranks", "most"), [(128, 8, 1.002), (1024, 64, 1.005)]
)
def test_ranks_are_even_where_sequences_have_different_shares_of_loss_tokens(
    num_sequences, num_ranks, most
):
    """By lengths alone, ranks would differ by 4 and 6 % where the output layer is a fifth of a
    model's work.
    """
    rng = np.random.default_rng(5)
    shape = {
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_query_groups": 8,
        "kv_channels": 64,
    }
    cost = gpt_pack_cost(
        num_layers=16, **shape, ffn_hidden_size=8192, vocab_size=128256, swiglu=True
    )
    balances = []
    for _ in range(5):
        lengths = np.clip(np.exp(rng.normal(6, 1, num_sequences)).astype(np.int64), 16, 8192)
        loss_tokens = (lengths * rng.uniform(0.05, 0.95, num_sequences)).astype(np.int64)
        asked = request(lengths, num_ranks, 16384, cost=cost, loss_tokens=loss_tokens)
        balances.append(asked.time_of(default(asked)) / asked.bound)
    assert np.mean(balances) < most, balances


@needs_compiled
@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize(("mode", "least_share"), [("ranks", 0.97), ("ranks that meet", 0.97)])
def test_tiny_schedules_are_nearly_optimal(mode, least_share, masks):
    """Held against brute force: what the search misses shows here even where the bound is far from
    the optimum.
    """
    rng = np.random.default_rng(12)
    logs = []
    for _ in range(200):
        asked = random_request(rng, MODES[mode][0], masks)
        if asked.lengths.size:
            best, time_found = optimum(asked), asked.time_of(default(asked))
            assert time_found >= best * (1 - 1e-9)
            logs.append(math.log(time_found / best))
    assert len(logs) > 150
    assert np.mean(np.array(logs) < 1e-9) > least_share
    assert math.exp(np.mean(logs)) < 1.003
    assert math.exp(max(logs)) < 1.15


@pytest.mark.slow
@needs_compiled
def test_tiny_pipelines_are_quicker_than_any_of_even_packs():
    """By 1F1B, with small packs first and last; where packs can't be even, hardly slower."""
    rng = np.random.default_rng(13)
    logs = []
    for case in range(100):
        asked = random_request(rng, MODES["pipelines"][case % 3])
        if asked.lengths.size:
            logs.append(math.log(asked.time_of(default(asked)) / optimum(asked)))
    assert math.exp(np.mean(logs)) < 1.0
    assert math.exp(max(logs)) < 1.1


QUALITY = {
    # Mode: model, geometric mean over the bound, worst: a little above what they are, as schedules
    # are deterministic.
    "ranks": (StepModel(), 1.0008, 1.01),
    "pipelines": (StepModel(num_stages=8), 1.07, 1.3),
    "interleaved": (StepModel(num_stages=4, num_virtual_stages=2, stage_group=4), 1.34, 1.85),
    "ranks that meet": (StepModel(sync_every_microbatch=True), 1.022, 1.45),
}


@pytest.mark.slow
@needs_compiled
@pytest.mark.parametrize("mode", QUALITY)
def test_modelled_time_is_near_the_bound(mode):
    """A bug that only costs balance shows nowhere else: training is right, and slow."""
    model, mean, worst = QUALITY[mode]
    logs = []
    for seed, distribution in enumerate(DISTRIBUTIONS):
        rng = np.random.default_rng([31, seed])
        for num_ranks, n in ((1, 64), (8, 64), (8, 512), (64, 512)):
            for factor in (1, 2):
                lengths = lengths_of(distribution, rng, n)
                asked = request(
                    *(lengths, num_ranks, factor * int(lengths.max())),
                    model=model,
                    microbatch_multiple=model.stage_group,
                    cost=DEAR,
                )
                schedule = default(asked)
                check_schedule(asked, schedule)
                logs.append(math.log(asked.time_of(schedule) / asked.bound))
    assert math.exp(np.mean(logs)) < mean, math.exp(np.mean(logs))
    assert math.exp(max(logs)) < worst, math.exp(max(logs))


@settings(max_examples=100)
@given(asked=requests(models=MODELS))
def test_few_microbatches_where_they_are_dear(asked):
    """Packing by balance alone fragments; without the tight packs nobody would notice the extra
    microbatches.
    """
    dear = dataclasses.replace(asked, cost=dataclasses.replace(asked.cost, fixed=1e9))
    tight = rounded_up(
        best_fit(asked.sorted.length, asked.capacity)[1] / asked.num_ranks,
        asked.microbatch_multiple,
    )
    assert asked.fewest_microbatches <= default(dear).num_microbatches <= tight


@needs_compiled
def test_few_microbatches_where_only_a_search_finds_them():
    """Best-fit takes four packs for what three can hold."""
    for model in (StepModel(), StepModel(num_stages=2), StepModel(sync_every_microbatch=True)):
        asked = request(
            [10, 8, 7, 7, 6, 6, 6, 5, 5], 3, 20, cost=PackCost(1.0, 0.0, 1000.0), model=model
        )
        schedule = default(asked)
        check_schedule(asked, schedule)
        assert schedule.num_microbatches == 1


@pytest.mark.parametrize(
    ("lengths", "num_ranks", "stages", "most"),
    [
        ([100] * 64, 1, 4, 64),  # without a fixed cost these once made 11,035 microbatches
        ([100] * 256, 4, 4, 64),
        ([200] * 58 + [9000] * 6, 8, 8, 8),
    ],
)
def test_no_storm_of_empty_microbatches(lengths, num_ranks, stages, most):
    """Each is a pass through the whole model for nothing."""
    for cost in (PackCost(1.0, 0.0), PackCost(1.0, 1e-4), gpt_cost()):
        asked = request(lengths, num_ranks, 10_000, cost=cost, model=StepModel(num_stages=stages))
        assert default(asked).num_microbatches <= most


@needs_compiled
@pytest.mark.parametrize("mode", ["ranks", "pipelines", "ranks that meet"])
@pytest.mark.parametrize("kind", ["equal", "two lengths", "one giant", "uniform to 1M", "full"])
def test_many_sequences_take_little_time(kind, mode):
    """A scheduler that hangs on odd lengths stops a cluster. A tenth of the largest batches, so far
    from its limit.
    """
    rng = np.random.default_rng(4)
    size, num_ranks = 10_000, 410
    lengths = {
        "equal": np.full(size, 1000),
        "two lengths": rng.choice([300, 9000], size),
        "one giant": np.append(rng.integers(1, 200, size - 1), 1_000_000),
        "uniform to 1M": rng.integers(1, 1_000_000, size),
        "full": np.full(size, 334),
    }[kind]
    capacity = 1002 if kind == "full" else int(lengths.max())
    asked = request(lengths, num_ranks, capacity, cost=PackCost(1.0, 1e-4), model=MODES[mode][-1])
    start = time.process_time()
    check_schedule(asked, default(asked))
    assert time.process_time() - start < 1.0


@pytest.mark.parametrize(
    "model", [StepModel(), StepModel(sync_every_microbatch=True), StepModel(num_stages=2)]
)
def test_numbers_of_microbatches_that_no_packing_has_are_not_tried(monkeypatch, model):
    """Three of these fill a pack, and the bound knows of 3.57: each number between once was tried,
    a minute for 100,000 sequences on one rank.
    """
    tried = []

    def counted(*of, **how):
        tried.append(of)
        return place_longest_first(*of, **how)

    monkeypatch.setattr(ranks, "place_longest_first", counted)
    asked = request([28] * 3000, 1, 100, cost=gpt_cost(), model=model)
    assert asked.fewest_microbatches == 840
    assert default(asked).num_microbatches >= 1000
    assert len(tried) < 10


def test_synchronous_pipelines_try_some_numbers_of_microbatches(monkeypatch):
    """Each further one fills them a little better: with 100,000 sequences all of thousands were
    tried, for a minute.
    """
    tried = []

    class Counted(synchronous._Search):
        def __init__(self, *of):
            tried.append(of)
            super().__init__(*of)

    monkeypatch.setattr(synchronous, "_Search", Counted)
    lengths = np.random.default_rng(0).integers(1300, 1500, 1000)
    model = StepModel(num_stages=8, sync_every_microbatch=True)
    default(request(lengths, 2, 10_000, cost=PackCost(1.0, 0.0), model=model))
    assert 3 < len(tried) <= 24


def test_more_microbatches_where_they_are_cheaper():
    """In a pipeline short microbatches make small bubbles: one alone would take 4 times as long."""
    asked = request([10] * 64, 1, 1000, cost=PackCost(1.0, 0.0), model=StepModel(num_stages=4))
    assert asked.fewest_microbatches == 1
    assert default(asked).num_microbatches > 20


def test_by_hand():
    """By descending cost to the cheapest rank; the costliest pack of a rank first."""
    assert packs(default(request([5, 4, 3, 3, 3], 2, 18))) == [[[0, 1]], [[2, 3, 4]]]


def test_tight_packs_where_nothing_else_fits():
    """Placing 4, 4 | 3, 3 first leaves no room for 2, 2 and 2; best fit finds 4 4 2 | 3 3 2 2."""
    schedule = default(request([4, 4, 3, 3, 2, 2, 2], 2, 10))
    assert schedule.num_microbatches == 1
    assert packs(schedule) == [[[0, 1, 4]], [[2, 3, 5, 6]]]


@needs_compiled
def test_pipelines_too_long_to_simulate_are_not_preferred_for_it():
    """Their time is an estimate: one that was too low took 296 microbatches here for 8, and a third
    more time.
    """
    lengths = np.append(np.random.default_rng(2).integers(16, 128, 1023), 32768)
    model = StepModel(num_stages=8, num_virtual_stages=2, stage_group=8)
    asked = request(lengths, 2, 32768, cost=gpt_cost(), model=model, microbatch_multiple=8)
    assert default(asked).num_microbatches < 100


@needs_compiled
def test_costly_sequences_share_a_pipeline():
    """With 4 stages a costly pack delays its whole rank: apart, each giant would take its rank (100
    + 300 + 300) / 4; on one rank they leave the other one at less than 150.
    """
    asked = request(
        [100, 100, *[10] * 60], 2, 200, cost=PackCost(1.0, 0.0), model=StepModel(num_stages=4)
    )
    schedule = default(asked)
    assert schedule.rank[0] == schedule.rank[1]
    assert asked.time_of(schedule) < 150


def test_packs_that_meet_are_alike():
    """Where ranks meet, a costly pack beside cheap ones makes all ranks wait: packs of a microbatch
    are alike.
    """
    asked = request(
        [8] * 4 + [4] * 4 + [2] * 4,
        4,
        8,
        cost=PackCost(1.0, 0.0),
        model=StepModel(sync_every_microbatch=True),
    )
    assert asked.time_of(default(asked)) == asked.bound == 14


def test_few_microbatches_beside_a_giant():
    """Where a microbatch costs nothing by itself, one giant once spread the others over 132
    microbatches, not 4.
    """
    lengths = [131072, *np.random.default_rng(0).integers(10, 200, 1023).tolist()]
    for fixed in (0.0, 1e-9):
        asked = request(lengths, 8, 131072, cost=PackCost(4e-5, 2e-9, fixed), microbatch_multiple=4)
        assert default(asked).num_microbatches == 4


@needs_compiled
@pytest.mark.parametrize(("num_ranks", "multiple"), [(64, 1), (16, 4)])
@pytest.mark.parametrize("sync_every_microbatch", [False, True])
def test_full_packs_are_even(num_ranks, multiple, sync_every_microbatch):
    """Four sequences to a pack, 99.2 % full: a microbatch more would often take twice the fixed
    cost for nothing.
    """
    shares = np.exp(np.random.default_rng(3).normal(0, 1.1, 2048))
    lengths = (4096 * shares[(shares > 0.25) & (shares < 2)][:256]).astype(np.int64)
    cost, model = (
        PackCost(1.0, 2**-16, 500.0),
        StepModel(sync_every_microbatch=sync_every_microbatch),
    )
    capacity = int(lengths.sum()) * 1008 // 64_000
    asked = request(
        lengths, num_ranks, capacity, cost=cost, model=model, microbatch_multiple=multiple
    )
    schedule = default(asked)
    check_schedule(asked, schedule)
    assert schedule.num_microbatches <= 2 * multiple
    assert asked.time_of(schedule) < 1.05 * asked.bound
