"""The table that decides on hardware: each figure against one made by hand."""

from dataclasses import replace

import numpy as np
import pytest

from megatron.packing.batch.layout import Alignment
from megatron.packing.scheduling.cost import PackCost
from megatron.packing.scheduling.problem import Schedule
from megatron.packing.scheduling.registry import SCHEDULERS
from megatron.packing.scheduling.step_time import StepModel
from megatron.planner.compare import (
    PADDED_PER_MICROBATCH,
    PADDED_TO_LONGEST,
    _time_of,
    compare,
    modelled_cost,
    outcome_of,
)
from megatron.planner.sequences import Sequences
from megatron.planner.step_record import StepLayout

LAYOUT = StepLayout(
    num_ranks=2, capacity=8, alignment=Alignment(), cost=PackCost(1.0, 0.0, 1.0), model=StepModel()
)
BATCH = Sequences(np.array([8, 2, 2, 2, 4, 1]))  # drawn by rank 0: 8 2 2, by rank 1: 2 4 1


def outcomes(layout=LAYOUT, batches=(BATCH,), schedulers=SCHEDULERS, longest=8):
    comparison = compare(batches, layout, schedulers, longest)
    return {outcome.name: outcome for outcome in comparison.outcomes}, comparison


def test_padding_to_the_longest():
    """The baseline of all gains: three microbatches of 8 tokens on each rank."""
    padded = outcomes()[0][PADDED_TO_LONGEST]
    assert padded.microbatches == 3
    assert padded.step_cost == pytest.approx(3 * (8 + 1))
    assert padded.padding == pytest.approx(1 - 19 / 48)
    assert padded.fill == pytest.approx(19 / 48)
    assert padded.bubble == 0


def test_padding_per_microbatch():
    """Rank 0: [8], [2 2] padded to 2; rank 1: [2 4] padded to 4, then [1]."""
    padded = outcomes()[0][PADDED_PER_MICROBATCH]
    assert padded.microbatches == 2
    assert padded.padding == pytest.approx(1 - 19 / (8 + 4 + 8 + 1))
    assert padded.step_cost == pytest.approx((8 + 1) + (4 + 1))
    assert padded.bubble == pytest.approx(1 - (14 + 11) / 28)


def test_packed_schedulers():
    """19 tokens on two ranks of two packs: 10 and 9, each with 2 of fixed cost; arrival order is no
    better.
    """
    found, comparison = outcomes()
    assert found["default"].step_cost == pytest.approx(12)
    assert found["default"].balance == pytest.approx(12 / 11.5)  # the bound is the mean over ranks
    assert found["empty"].microbatches == 3
    assert found["empty"].step_cost == pytest.approx(12 + 3)
    assert found["default"].padding == 0
    assert {record.scheduler for record in comparison.records} == set(SCHEDULERS)
    assert outcome_of("again", comparison.records[:1]).step_cost == found["default"].step_cost


def test_several_batches_are_averaged():
    """Batches of one scheduler count by their time, not each alike."""
    small = Sequences(np.array([1, 1]))
    found = outcomes(batches=(BATCH, small))[0]["default"]
    assert found.step_cost == pytest.approx((12 + 2) / 2)
    assert found.fill == pytest.approx((19 + 2) / (32 + 16))


def test_a_picture_says_which_batch_it_shows():
    """Its figures are of one batch, those of the table are means: they look like a
    contradiction."""
    titles = [record.title for record in outcomes(batches=(BATCH, BATCH))[1].records]
    assert titles == ["batch 1 of 2, 6 sequences"] * len(SCHEDULERS)
    assert outcomes()[1].records[0].title == "6 sequences"


def broken(request):
    raise KeyError("oops")


def exiting(request):
    raise SystemExit(3)


def overfull(request):
    zeros = np.zeros_like(request.lengths)
    return Schedule(zeros, zeros, request.num_ranks, 1)


def test_failing_schedulers_are_named():
    """A user's scheduler that is wrong must cost a line, not the table of the others."""
    found, comparison = outcomes(
        schedulers={
            "mine": broken,
            "full": overfull,
            "exits": exiting,
            "default": SCHEDULERS["default"],
        }
    )
    assert "default" in found
    assert [failed.name for failed in comparison.failed] == ["mine", "full", "exits"]
    assert "KeyError: 'oops'" in comparison.failed[0].reason
    assert "has 19 tokens, but a pack holds 8" in comparison.failed[1].reason
    assert comparison.failed[2].reason == "SystemExit: 3"


@pytest.mark.parametrize(("stages", "chunks"), [(1, 1), (2, 1), (8, 1), (2, 2), (4, 3)])
@pytest.mark.parametrize("more", [1, 5])
def test_steady_state_is_what_simulation_says(stages, chunks, more):
    """The baseline of thousands of equal microbatches is not simulated: the short way must be
    exact.
    """
    multiple = stages if chunks > 1 else 1
    model = StepModel(num_stages=stages, num_virtual_stages=chunks, stage_group=multiple)
    layout = replace(LAYOUT, microbatch_multiple=multiple, model=model)
    packs = np.full((2, (4 * stages + more) * multiple), 600)
    assert _time_of(packs, layout) == pytest.approx(model.time_of(packs))


def test_modelled_cost_is_that_of_the_table():
    """Advice compares its own figures with one another: they must be those of the table."""
    layout = replace(LAYOUT, model=StepModel(num_stages=2))
    assert (
        modelled_cost((BATCH,), layout, SCHEDULERS["default"])
        == outcomes(layout)[0]["default"].step_cost
    )
