"""A rank's plan: what its peers receive is what the schedule said."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.packing.layout import Alignment, PackLayout
from megatron.packing.lengths import LengthTable
from megatron.packing.sample import LABELS_EXPLICIT
from megatron.packing.scheduling.cost import PackCost
from megatron.packing.scheduling.problem import Schedule, ScheduleRequest
from megatron.packing.stats import packing_stats
from megatron.packing.step_plan import StepPlan

ALIGNMENT = Alignment(sequence=4, pack=8)


def plans(lengths, kinds, rank, microbatch, num_ranks, num_microbatches) -> list[StepPlan]:
    """The plan of every rank."""
    length, kind, ranks, microbatches = (np.array(x, dtype=np.int64) for x in (lengths, kinds, rank, microbatch))
    schedule = Schedule(ranks, microbatches, num_ranks, num_microbatches)
    zeros = np.zeros_like(length)
    request = ScheduleRequest(
        lengths=ALIGNMENT.padded_length(length),
        source_rank=zeros,
        source_draw=zeros,
        num_ranks=num_ranks,
        num_draws=1,
        capacity=64,
        cost=PackCost(linear=0.1, quadratic=1 / 3, fixed=0.7),
    )
    stats = packing_stats(
        request=request, schedule=schedule, length=length, alignment=ALIGNMENT, num_dropped=0, num_cut=0
    )
    table = LengthTable(length=length, kind=kind, draw=zeros, source_rank=zeros, checksums=zeros)
    return [StepPlan.for_rank(r, table, schedule, stats) for r in range(num_ranks)]


@st.composite
def random_plans(draw):
    n = draw(st.integers(0, 12))
    num_ranks, num_microbatches = draw(st.integers(1, 4)), draw(st.integers(1, 4))

    def values(low, high):
        return draw(st.lists(st.integers(low, high), min_size=n, max_size=n))

    return plans(
        values(1, 60),
        values(0, 7),
        values(0, num_ranks - 1),
        values(0, num_microbatches - 1),
        num_ranks,
        num_microbatches,
    )


def test_literal_plan():
    """Sequences in another microbatch than the schedule's, or another order, give tokens to the wrong layout."""
    _, plan = plans(
        lengths=[3, 9, 5, 7],
        kinds=[0, 0, LABELS_EXPLICIT, 0],
        rank=[1, 0, 1, 1],
        microbatch=[2, 0, 0, 2],
        num_ranks=2,
        num_microbatches=3,
    )
    assert plan.length.tolist() == [3, 5, 7]
    assert plan.num_words.tolist() == [3 + 1 + 1 + 1, 5 + 5 + 1 + 2, 7 + 1 + 1 + 2]
    assert [members.tolist() for members in plan.members()] == [[1], [], [0, 2]]
    assert plan.layouts(ALIGNMENT) == [
        PackLayout(lengths=(5,), padded_lengths=(8,)),
        PackLayout(lengths=(0,), padded_lengths=(8,)),
        PackLayout(lengths=(3, 7, 0), padded_lengths=(4, 8, 4)),
    ]


@settings(deadline=None)
@given(random_plans())
def test_numbers_round_trip(all_plans):
    """Stages in the middle know only these numbers: a field swapped or rounded gives them other layouts."""
    for plan in all_plans:
        numbers = plan.to_numbers()
        assert numbers.dtype == np.int64
        again = StepPlan.from_numbers(numbers)
        assert again.stats == plan.stats
        for name in ("microbatch", "length", "kind"):
            field = getattr(again, name)
            assert field.dtype == np.int64
            assert field.tolist() == getattr(plan, name).tolist()


@settings(deadline=None)
@given(random_plans())
def test_plans_of_all_ranks_make_up_the_account(all_plans):
    """The account and the layouts are computed apart: padding and tokens reported could be of other packs than run."""
    layouts = [layout for plan in all_plans for layout in plan.layouts(ALIGNMENT)]
    (stats,) = {plan.stats for plan in all_plans}
    assert len(layouts) == stats.num_ranks * stats.num_microbatches
    assert sum(layout.num_tokens for layout in layouts) == stats.num_padded_tokens
    assert sum(sum(layout.lengths) for layout in layouts) == stats.num_tokens
    assert sum(np.count_nonzero(layout.lengths) for layout in layouts) == stats.num_sequences


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_without_sequences(rank):
    """A rank that gets none must still run its share of microbatches, or the others wait for it for ever."""
    plan = StepPlan.from_numbers(plans([], [], [], [], num_ranks=2, num_microbatches=2)[rank].to_numbers())
    assert [layout.num_tokens for layout in plan.layouts(ALIGNMENT)] == [8, 8]
    assert plan.num_words.sum() == 0
