"""The model of a step: what schedules are compared by, and the pictures of pipelines drawn from."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron.packing.scheduling.step_time import (
    Operation,
    StepModel,
    TimedOperation,
    simulate,
    timeline,
)
from tests.unit_tests.packing.stubs import Ranks

PIPELINES = [
    StepModel(num_stages=stages, num_virtual_stages=chunks, stage_group=group)
    for stages in (1, 2, 3, 4, 8)
    for chunks, group in ((1, 1), (2, stages), (3, stages), (2, stages + 1), (2, 2 * stages))
]

UNEVEN = [
    StepModel(num_stages=2, shares=(0.25, 0.75)),
    StepModel(num_stages=4, shares=(0.5, 0.0, 0.125, 0.375)),
    StepModel(num_stages=2, num_virtual_stages=2, stage_group=2, shares=(0.5, 0.25, 0.125, 0.125)),
    StepModel(
        num_stages=4,
        num_virtual_stages=2,
        stage_group=5,
        shares=(0.0625, 0.125, 0.125, 0.125, 0.125, 0.0625, 0.125, 0.25),
    ),
]
"""Stages of unequal shares, which are multiples of 1/16 so that sums of them are exact."""


def numbers_of_microbatches(model: StepModel) -> list[int]:
    if model.num_virtual_stages == 1:
        return [1, 2, 3, model.num_stages, 2 * model.num_stages + 1]
    return [model.stage_group, 2 * model.stage_group, 3 * model.stage_group]


def random_costs(rng, model: StepModel, num_microbatches: int, num_ranks: int = 3) -> np.ndarray:
    """So many times an integer that all passes end at integers."""
    passes = 3 * model.num_stages * model.num_virtual_stages
    return rng.integers(0, 50, (num_ranks, num_microbatches)) * float(passes)


def test_time_by_hand():
    """Literal numbers for the three modes of even packs, of a whole pack's cost in all stages;
    schedulers would balance something else without a word.
    """
    costs = np.array([[5, 1, 4], [3, 6, 2]])
    assert StepModel().even_time_of(costs) == 11  # 3 + 6 + 2
    assert (
        StepModel(num_stages=4).even_time_of(costs) == 29 / 4
    )  # 11 + 3 * 6 on rank 1, 10 + 3 * 5 on rank 0
    assert StepModel(sync_every_microbatch=True).even_time_of(costs) == 15  # 5 + 6 + 4
    assert StepModel(num_stages=4, sync_every_microbatch=True).even_time_of(costs) == 33 / 4


def test_one_stage_needs_no_simulation():
    """Reports compare the two; a third of a unit between them would look like a bubble."""
    costs = np.array([[5, 1, 4], [3, 6, 2]])
    for model in (StepModel(), StepModel(sync_every_microbatch=True)):
        assert model.even_time_of(costs) == model.time_of(costs)


def test_two_stages_by_hand():
    """Microbatches of 18 and 36 through two stages: F takes a sixth of their cost, B a third."""
    run: dict[int, list[Any]] = {0: [], 1: []}
    for stage, (backward, microbatch, _), start, end in timeline(
        np.array([[18.0, 36]]), StepModel(num_stages=2)
    ):
        run[stage].append((f"{'B' if backward else 'F'}{microbatch}", start.item(), end.item()))
    assert run[0] == [("F0", 0, 3), ("F1", 3, 9), ("B0", 12, 18), ("B1", 30, 42)]
    assert run[1] == [("F0", 3, 6), ("B0", 6, 12), ("F1", 12, 18), ("B1", 18, 30)]
    assert simulate(
        np.array([[18.0, 36], [36, 18], [36, 36]]), StepModel(num_stages=2)
    ).tolist() == [42, 42, 54]


def test_unequal_stages_by_hand():
    """A pack of 24 through stages that take a quarter and three: the second one sets the pace."""
    costs, model = np.array([[24.0, 24, 24]]), StepModel(num_stages=2, shares=(0.25, 0.75))
    # Stage 1: forward 6, backward 12. It waits 2 for the first forward of stage 0, which does the
    # last backward, 4, after it.
    assert model.time_of(costs) == 2 + 3 * 18 + 4
    assert model.effective_stages == pytest.approx(4 / 3)
    assert model.even_time_of(costs) == pytest.approx((72 + 24 / 3) * 3 / 4)
    # The first stage never waits: the others are done before it has run the next forward.
    turned = StepModel(num_stages=2, shares=(0.75, 0.25))
    assert turned.time_of(costs) == 3 * 18


def test_equal_shares_are_the_same_model():
    """Caches would know two models of one layout, and rounding would tell them apart."""
    assert StepModel(num_stages=3, shares=(1 / 3,) * 3) == StepModel(num_stages=3)
    assert StepModel(num_stages=3).stage_paces() == [(3, 2.0)]


@pytest.mark.parametrize("shares", [(0.5, 0.25, 0.25), (1.5, -0.5), (0.5, 0.4)])
def test_shares_that_are_none_are_refused(shares):
    """Time would be that of a part of the pack, or of stages that do not exist."""
    with pytest.raises(ValueError, match="shares must"):
        StepModel(num_stages=2, shares=shares)


def test_ranks_that_meet_run_the_costliest_pack():
    """Each microbatch of the pipeline lasts as long as its costliest pack."""
    model = StepModel(num_stages=2, sync_every_microbatch=True)
    assert model.time_of(np.array([[18.0, 6], [12, 36]])) == 42


@pytest.mark.parametrize(
    "model", [model for model in PIPELINES if model.stage_group in (1, model.num_stages)], ids=str
)
def test_equal_packs_take_as_long_as_in_the_flow_shop(model):
    """Bounds are proven for the flow shop: they say something about 1F1B because the two agree
    here. Interleaving shortens only the filling and draining, to one chunk per stage.
    """
    for num_microbatches in numbers_of_microbatches(model):
        time = simulate(np.full((2, num_microbatches), 7.0), model)
        bubble = (model.num_stages - 1) / model.num_virtual_stages
        assert time == pytest.approx(np.full(2, 7 * (num_microbatches + bubble) / model.num_stages))
        assert time[0] == pytest.approx(model.even_time_of(np.full((2, num_microbatches), 7.0)))


def test_order_of_packs_matters():
    """The flow shop does not see the order: without the simulation any would do, and 1F1B would be
    7 % slower here.
    """
    orders = np.array([[41, 48, 30], [30, 41, 48], [48, 30, 41]])
    model = StepModel(num_stages=2)
    assert [model.even_time_of(row[None]) for row in orders] == [167 / 2] * 3
    assert [model.time_of(row[None]) for row in orders] == pytest.approx(
        [463 / 6, 481 / 6, 533 / 6], rel=1e-2
    )


def operations_of(stage: int, model: StepModel, num_microbatches: int) -> list[Operation]:
    timed = timeline(np.ones((1, num_microbatches)), model)
    return [entry.operation for entry in timed if entry.stage == stage]


@pytest.mark.parametrize("model", PIPELINES, ids=str)
def test_order_is_that_of_megatron_core(model):
    """A contract with upstream: the order of packs is chosen for the pipeline that runs."""
    from megatron.core.pipeline_parallel.schedules import (
        get_pp_rank_microbatches,
        get_schedule_table,
    )

    chunks = model.num_virtual_stages
    for num_microbatches in numbers_of_microbatches(model):
        table = get_schedule_table(num_microbatches, chunks, model.stage_group)
        forwards = [Operation(False, microbatch, chunk) for microbatch, chunk in table]
        backwards = [Operation(True, microbatch, chunks - 1 - chunk) for microbatch, chunk in table]
        for stage in range(model.num_stages):
            communicator = SimpleNamespace(
                pp_group=Ranks(model.num_stages, stage),
                virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
            )
            total, _, warmup, steady = get_pp_rank_microbatches(
                num_microbatches, chunks, model.stage_group, p2p_communicator=communicator
            )
            if model.num_stages == 1:  # megatron-core runs no pipeline there
                continue
            assert total == len(forwards)
            pairs = [pair for step in zip(forwards[warmup:], backwards) for pair in step]
            expected = [*forwards[:warmup], *pairs, *backwards[steady:]]
            assert operations_of(stage, model, num_microbatches) == expected


@pytest.mark.parametrize("model", PIPELINES + UNEVEN, ids=str)
def test_operations_wait_for_what_they_need_and_for_nothing_else(model):
    """A pass before its input is there, or idle time without a cause, makes the best order of
    another pipeline.
    """
    rng = np.random.default_rng(5)
    last_layer = model.num_stages * model.num_virtual_stages - 1
    for num_microbatches in numbers_of_microbatches(model):
        costs = random_costs(rng, model, num_microbatches)
        ends: dict[tuple[bool, int, int], np.ndarray] = {}
        free = np.zeros((model.num_stages, 3))
        run: list[TimedOperation] = list(timeline(costs, model))
        for stage, (backward, microbatch, chunk), start, end in run:
            layer = chunk * model.num_stages + stage
            if backward:
                need = (
                    (False, microbatch, layer)
                    if layer == last_layer
                    else (True, microbatch, layer + 1)
                )
            else:
                need = (False, microbatch, layer - 1)
            earliest = free[stage] if need[2] < 0 else np.maximum(free[stage], ends[need])
            assert start.tolist() == earliest.tolist()
            cost = (
                costs[:, microbatch]
                / (3 * model.num_stages * model.num_virtual_stages)
                * ((1 + backward) * model.relative_shares[layer])
            )
            assert end.tolist() == (start + cost).tolist()
            assert (backward, microbatch, layer) not in ends
            ends[backward, microbatch, layer] = free[stage] = end
        assert len(run) == 2 * num_microbatches * (last_layer + 1)
        if model.num_stages == 1:
            continue
        many = np.concatenate([costs] * 4)  # compiled, ranks are simulated eight at once
        assert simulate(many, model).tolist() == free.max(axis=0).tolist() * 4
        assert simulate(costs, model).tolist() == free.max(axis=0).tolist()


def test_pipelines_that_would_hang_are_refused():
    """megatron-core refuses them too; here they were an assertion inside of the simulation."""
    with pytest.raises(
        ValueError, match=r"stage_group must be at least num_stages, 4, .* but is 2"
    ):
        StepModel(num_stages=4, num_virtual_stages=2, stage_group=2)
    for name in ("num_stages", "num_virtual_stages", "stage_group"):
        changed: dict[str, Any] = {name: 0}
        with pytest.raises(ValueError, match=f"{name} must be at least 1, but is 0"):
            StepModel(**changed)
