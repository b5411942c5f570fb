"""The account of a global batch: literal numbers, and none changed on their way to other ranks."""

import numpy as np
import pytest

from megatron.packing.batch.layout import Alignment
from megatron.packing.scheduling.cost import PackCost
from megatron.packing.scheduling.problem import Schedule, ScheduleRequest
from megatron.packing.scheduling.step_time import StepModel
from megatron.packing.step.stats import PackingStats, packing_stats, padded_rows
from tests.unit_tests.packing.stubs import array


def account(
    lengths,
    rank,
    microbatch,
    num_ranks: int = 2,
    num_microbatches: int = 2,
    *,
    cost: PackCost | None = None,
    capacity: int = 16,
    model: StepModel | None = None,
) -> PackingStats:
    """Rank 0 drew all sequences."""
    alignment, length = Alignment(sequence=4, pack=8), array(*lengths)
    request = ScheduleRequest(
        lengths=alignment.padded_length(length),
        source_rank=np.zeros_like(length),
        source_fetch=np.zeros_like(length),
        num_ranks=num_ranks,
        num_fetches=1,
        capacity=capacity,
        cost=cost or PackCost(linear=1.0, quadratic=0.5, fixed=2.0),
        model=model or StepModel(),
    )
    schedule = Schedule(array(*rank), array(*microbatch), num_ranks, num_microbatches)
    return packing_stats(
        request=request,
        schedule=schedule,
        length=length,
        alignment=alignment,
    )


def test_literal_account():
    """The reported utilisation, padding and balance rest on these numbers; nothing else would
    notice a wrong one.
    """
    # Packs: rank 0 [4 + 8 -> 16, dummy 8], rank 1 [dummy 8, 4 -> 8]. Sequences cost 12, 40, 12 and
    # each pack 2.
    stats = account([3, 5, 2], rank=[0, 0, 1], microbatch=[0, 0, 1])
    assert stats == PackingStats(
        sequences=3,
        tokens=10,
        square_sum=9 + 25 + 4,
        num_loss_tokens=10,
        padded_tokens=16 + 8 + 8 + 8,
        row_tokens=5 * 3,
        microbatches=2,
        num_ranks=2,
        capacity_tokens=2 * 2 * 16,
        moved_tokens=2,
        step_cost=12.0 + 40.0 + 2 * 2.0,
        step_cost_bound=40.0 + 2.0,  # one microbatch would do
        bubble=stats.bubble,
    )
    assert stats.bubble == pytest.approx(1 - (56 + 16) / (2 * 56))
    assert stats.fill == 10 / (2 * 2 * 16)
    assert stats.padding == 1 - 10 / 40
    assert stats.balance == 56 / 42
    assert stats.moved == 2 / 10


def test_rows_without_packing_by_hand():
    """README's factor is over this baseline: padded to the longest that may be, it would look
    several times better.
    """
    assert padded_rows([3, 5, 9, 2], 12) == [(5, 2), (9, 1), (2, 1)]
    assert padded_rows([4, 4, 4], 12) == [(4, 3)]
    assert padded_rows([], 12) == [(0, 0)]


def test_no_more_is_moved_than_there_is():
    """Padding of short sequences, counted as moved, came to several times the tokens of the
    batch."""
    assert account([1, 2, 3], rank=[1, 1, 1], microbatch=[0, 0, 1]).moved == 1


def test_pipelines_are_accounted_for_by_simulation():
    """Two stages run packs of 6 and 12 in 14 of a stage's time; two even packs of 9 would take (9 +
    9 + 9) / 2.
    """
    stats = account(
        *([8, 16], [0, 0], [0, 1]),
        num_ranks=1,
        cost=PackCost(linear=0.75, quadratic=0.0),
        model=StepModel(num_stages=2),
    )
    assert stats.step_cost == pytest.approx(14.0)
    assert stats.step_cost_bound == pytest.approx(13.5)
    assert stats.balance == pytest.approx(14 / 13.5)
    assert stats.bubble == pytest.approx(1 - 18 / 28)


def test_ranks_that_meet_are_accounted_for():
    """A rank that waits at every microbatch is idle there, though all ranks have the same sum."""
    stats = account(
        *([8, 4, 4, 8], [0, 0, 1, 1], [0, 1, 0, 1]),
        cost=PackCost(linear=1.0, quadratic=0.0),
        model=StepModel(sync_every_microbatch=True),
    )
    assert (stats.step_cost, stats.step_cost_bound) == (16.0, 12.0)
    assert stats.bubble == pytest.approx(1 - 24 / 32)


def test_empty_batch():
    """A batch of dummy packs only (all samples dropped) must be accounted for, not divide by
    zero."""
    stats = account([], rank=[], microbatch=[])
    assert (stats.sequences, stats.tokens, stats.square_sum, stats.padded_tokens) == (
        0,
        0,
        0,
        4 * 8,
    )
    assert (stats.step_cost, stats.step_cost_bound, stats.bubble) == (4.0, 2.0, 0.0)
    assert (stats.balance, stats.fill, stats.padding, stats.moved) == (2.0, 0.0, 1.0, 0.0)
    free = account([], rank=[], microbatch=[], cost=PackCost(1.0, 0.0))
    assert (free.balance, free.bubble) == (1.0, 0.0)


def test_square_sums_are_exact():
    """Above 2**53 a float sum drops the last digits, and FLOPs differ by rank."""
    stats = account([2**31 - 1, 2], rank=[0, 1], microbatch=[0, 0], capacity=2**31)
    assert stats.square_sum == 4611686014132420609 + 4
    assert type(stats.square_sum) is int
