"""What one rank decides for all: every sequence placed once, and whatever a scheduler does becomes
one error.
"""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from megatron.packing.batch.columns import LABELS, TOKEN, Column
from megatron.packing.batch.layout import Alignment
from megatron.packing.batch.nodes import SampleSizes
from megatron.packing.scheduling.cost import PackCost
from megatron.packing.scheduling.options import SchedulerOptions
from megatron.packing.scheduling.problem import Schedule, ScheduleRequest
from megatron.packing.scheduling.step_time import StepModel
from megatron.packing.step.decide import GlobalBatchError, RankReport, decide
from megatron.packing.step.settings import PackingSettings

CAPACITY = 64
SETTINGS = PackingSettings(
    scheduler="default",
    alignment=Alignment(sequence=4, pack=8),
    capacity=CAPACITY,
    over_length_policy="error",
    microbatch_multiple=1,
    cost=PackCost(linear=1, quadratic=0.1, fixed=5),
    model=StepModel(),
)


def report(*lengths: int, **others: Any) -> RankReport:
    zeros = np.zeros(len(lengths), np.int64)
    columns: dict[str, Any] = {
        field.name: zeros for field in fields(RankReport) if field.type == "IntArray"
    }
    return RankReport(**(columns | {"lengths": np.array(lengths, np.int64), "schema": ()} | others))


def test_every_sequence_has_a_place() -> None:
    """A sequence without one would be lost, with a loss that looks right."""
    reports = [
        report(30, 1, 64),
        report(num_dropped=3),
        report(9, 40, schema=(LABELS,), num_truncated=2, num_dropped=4),
    ]
    decision = decide(reports, 3, SETTINGS, None)
    assert decision is not None
    assert decision.source_rank.tolist() == [0, 0, 0, 2, 2]
    assert decision.sizes.lengths.tolist() == [30, 1, 64, 9, 40]
    assert decision.schema == (LABELS,)
    assert (decision.stats.sequences, decision.stats.tokens) == (5, 144)
    assert (decision.stats.truncated_samples, decision.stats.dropped_samples) == (2, 7)
    packs = decision.pack_lengths()
    assert len(packs) == 3
    assert {len(rank) for rank in packs} == {decision.stats.microbatches}
    for rank in range(3):
        for microbatch in range(decision.stats.microbatches):
            here = (decision.rank == rank) & (decision.microbatch == microbatch)
            assert packs[rank][microbatch] == decision.sizes.lengths[here].tolist()
    assert decision.stats.delays == []


def test_a_scheduler_receives_all_that_is_known() -> None:
    """A scheduler that draws at random repeats a resumed run's choices by seed and step only."""
    received: list[ScheduleRequest] = []

    def scheduler(request: ScheduleRequest) -> Schedule:
        received.append(request)
        return Schedule(
            request.source_rank.copy(), np.zeros_like(request.source_rank), request.num_ranks, 1
        )

    with mock.patch("megatron.packing.step.decide.get_scheduler", return_value=scheduler):
        counts = {"num_loss_tokens": np.array([3, 1]), "steps_delayed": np.array([2, 0])}
        decide(
            [report(5, 2, **counts), report(7)],
            1,
            replace(SETTINGS, seed=8, step=31, options=SchedulerOptions(outlier_delay_steps=9)),
            max_delay=2,
        )
    (request,) = received
    assert request.options == SchedulerOptions(outlier_delay_steps=9)
    assert (request.seed, request.step) == (8, 31)
    assert request.loss_tokens is not None
    assert request.steps_delayed is not None
    assert (request.loss_tokens.tolist(), request.steps_delayed.tolist()) == ([3, 1, 0], [2, 0, 0])


def test_an_outlier_without_company_waits() -> None:
    """It would make all ranks wait for it; and at the end of the data nothing may be left."""
    reports = [report(60, 2, 2), report(3, 2, 2)]
    decision = decide(reports, 3, SETTINGS, max_delay=2)
    assert decision is not None
    assert decision.rank[0] == decision.microbatch[0] == -1
    assert min(decision.rank[1:]) >= 0
    assert (decision.stats.waiting, decision.stats.delays, decision.stats.sequences) == (1, [5], 5)
    assert sum(length for rank in decision.pack_lengths() for pack in rank for length in pack) == 11
    at_end = decide([reports[0], report(3, ended=True)], 3, SETTINGS, max_delay=2)
    assert at_end is not None
    assert (at_end.stats.waiting, min(at_end.rank)) == (0, 0)


def test_the_end_of_the_data() -> None:
    """Ranks that go on with nothing at hand would train on empty batches for ever."""
    assert decide([report(ended=True), report(ended=True)], 3, SETTINGS, None) is None
    assert decide([report(ended=True), report(5)], 3, SETTINGS, None) is not None
    assert (
        decide([report(), report()], 3, SETTINGS, None) is not None
    )  # all were left out: an empty step


def test_the_first_error_of_a_rank_is_everyones() -> None:
    """Ranks that raise different errors, or of which one goes on, hang or confuse."""
    with pytest.raises(GlobalBatchError, match="disk gone"):
        decide([report(5), report(error="disk gone"), report(error="other")], 3, SETTINGS, None)


def test_extra_columns_that_only_some_ranks_have() -> None:
    """The ranks that lack them would cut the words that they receive at the wrong places."""
    extra = Column("advantages", "float32", TOKEN, extra=True)
    decision = decide([report(5, schema=(extra,)), report()], 3, SETTINGS, None)
    assert decision is not None
    assert decision.schema == (extra,)
    with pytest.raises(
        GlobalBatchError, match="'advantages' must be in all samples of a global batch or in none"
    ):
        decide([report(5, schema=(extra,)), report(7)], 3, SETTINGS, None)


def raising(error: BaseException) -> Callable[[ScheduleRequest], Schedule]:
    def scheduler(request: ScheduleRequest) -> Schedule:
        raise error

    return scheduler


def too_full(request: ScheduleRequest) -> Schedule:
    zeros = np.zeros(request.lengths.size, np.int64)
    return Schedule(zeros, zeros, request.num_ranks, 1)


def in_place(request: ScheduleRequest) -> Schedule:
    request.lengths.sort()
    return too_full(request)


@pytest.mark.parametrize(
    ("scheduler", "words"),
    [
        (raising(MemoryError("all of it")), "MemoryError: all of it"),
        (raising(SystemExit(3)), "SystemExit: 3"),
        (too_full, "CapacityError: microbatch 0 of rank 0 has 128 tokens"),
        (in_place, "ValueError"),
        (lambda request: None, "scheduler 'mine'"),
        (lambda request: 7, "scheduler 'mine'"),
        (lambda request: Schedule(None, None, 2, 1), "scheduler 'mine'"),  # type: ignore[arg-type]
        (
            lambda request: Schedule(request.lengths * 0.5, request.lengths, 2, 1),
            "scheduler 'mine'",
        ),  # type: ignore[arg-type]
        (
            lambda request: Schedule(request.source_rank[:1], request.source_rank[:1], 2, 1),
            "schedule.rank must be",
        ),
    ],
)
def test_a_scheduler_that_fails_is_one_error(scheduler: Any, words: str) -> None:
    """The other ranks wait for the answer: what is raised past this hangs them."""
    with (
        mock.patch("megatron.packing.step.decide.get_scheduler", return_value=scheduler),
        pytest.raises(GlobalBatchError) as error,
    ):
        decide([report(64), report(64)], 1, replace(SETTINGS, scheduler="mine"), None)
    assert words in str(error.value)


def test_parts_of_a_tree_leave_together_and_count_once() -> None:
    """A record of which a part waited would be divided by the tokens of two steps."""
    whole = decide([report(64, 2), report(2, 2)], 2, SETTINGS, 1)
    parts = np.array([1, 2], np.int64)
    cut = decide([report(64, 2, part=parts), report(2, 2)], 2, SETTINGS, 1)
    assert whole is not None
    assert cut is not None
    assert whole.stats.waiting == 1, "as it is without company"
    assert (cut.stats.waiting, cut.stats.sequences, cut.stats.delays) == (0, 3, [3])


def test_a_schedule_is_made_of_what_trees_cost() -> None:
    """A tree costs fewer pairs than a sequence of its tokens, and its nodes are padded apart."""
    received: list[ScheduleRequest] = []

    def scheduler(request: ScheduleRequest) -> Schedule:
        received.append(request)
        zeros = np.zeros_like(request.source_rank)
        return Schedule(zeros, zeros, request.num_ranks, 1)

    sizes = SampleSizes(*(np.array([value]) for value in (16, 41, 112, 10)))
    with mock.patch("megatron.packing.step.decide.get_scheduler", return_value=scheduler):
        decision = decide([report(7, tree_sizes=sizes), report(3)], 2, SETTINGS, None)
    (request,) = received
    assert request.lengths.tolist() == [16, 4]
    assert request.squares is not None
    assert request.squares.tolist() == [112, 16]
    assert request.sequence_costs.tolist() == pytest.approx([16 + 11.2, 4 + 1.6])
    assert decision is not None
    stats = decision.stats
    assert (stats.tokens, stats.square_sum, stats.path_tokens) == (10, 41 + 9, 13)
    recorded = decision.pack_sizes()
    assert recorded["squares"] == [41, 9]
    assert recorded["padded"] == [16, 4]
    assert [len(each) for each in recorded.values()] == [2] * 5
    assert decision.pack_lengths()[0] == [[7, 3]]
