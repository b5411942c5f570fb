"""The account of a global batch: literal numbers, and none changed on their way to other ranks."""

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.packing.cost import PackCost
from megatron.packing.layout import Alignment
from megatron.packing.schedule import Schedule
from megatron.packing.stats import PackingStats, packing_stats

COUNTS = st.integers(0, 2**63 - 1)
COSTS = st.floats(0, allow_nan=False)


def array(*values) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def account(lengths, rank, microbatch, num_ranks=2, num_microbatches=2, **changed) -> PackingStats:
    options: dict[str, Any] = {
        "alignment": Alignment(sequence=4, pack=8),
        "cost": PackCost(linear=1.0, quadratic=0.5),
        "capacity": 16,
        "num_dropped": 0,
        "num_cut": 0,
    }
    schedule = Schedule(array(*rank), array(*microbatch), num_ranks, num_microbatches)
    return packing_stats(length=array(*lengths), schedule=schedule, **(options | changed))


def test_literal_account():
    """The reported utilisation, padding and balance rest on these numbers; nothing else would notice a wrong one."""
    # Packs: rank 0 [4 + 8 -> 16, dummy 8], rank 1 [dummy 8, 4 -> 8]. Costs: 7.5, 17.5, 4.
    stats = account([3, 5, 2], rank=[0, 0, 1], microbatch=[0, 0, 1], num_dropped=6, num_cut=7)
    assert stats == PackingStats(
        num_sequences=3,
        num_tokens=10,
        square_sum=9 + 25 + 4,
        num_padded_tokens=16 + 8 + 8 + 8,
        num_microbatches=2,
        num_ranks=2,
        capacity=16,
        num_dropped=6,
        num_cut=7,
        max_rank_cost=25.0,
        cost_lower_bound=17.5,
    )
    assert stats.fill == 10 / (2 * 2 * 16)
    assert stats.padding == 1 - 10 / 40
    assert stats.balance == 25 / 17.5


def test_empty_batch():
    """A batch of dummy packs only (all samples dropped) must be accounted for, not divide by zero."""
    stats = account([], rank=[], microbatch=[], num_dropped=3)
    assert (stats.num_sequences, stats.num_tokens, stats.square_sum, stats.num_padded_tokens) == (0, 0, 0, 4 * 8)
    assert (stats.balance, stats.fill, stats.padding) == (1.0, 0.0, 1.0)


def test_square_sums_are_exact():
    """Above 2**53 a float sum drops the last digits, and FLOPs differ by rank."""
    stats = account([2**31 - 1, 2], rank=[0, 1], microbatch=[0, 0], capacity=2**31)
    assert stats.square_sum == 4611686014132420609 + 4
    assert type(stats.square_sum) is int


@settings(deadline=None)
@given(
    st.fixed_dictionaries(
        {field.name: COSTS if field.type == "float" else COUNTS for field in fields(PackingStats)},
    )
)
def test_numbers_round_trip(values):
    """Stages in the middle know the account only by these numbers: a float cast to int, or the other way round,
    gives them another one than the owners have.
    """
    stats = PackingStats(**values)
    numbers = stats.to_numbers()
    assert numbers.dtype == np.int64
    again = PackingStats.from_numbers(numbers)
    assert again == stats
    assert all(type(getattr(again, field.name)).__name__ == field.type for field in fields(again))


@pytest.mark.parametrize("square_sum", [2**62 - 1, 2**62, 2**62 + 1, 2**63 - 1])
def test_large_square_sums_round_trip(square_sum):
    """Sums of squares near the end of int64 are where a float on the way would round."""
    stats = account([3], rank=[0], microbatch=[0])
    values = {field.name: getattr(stats, field.name) for field in fields(stats)} | {"square_sum": square_sum}
    assert PackingStats.from_numbers(PackingStats(**values).to_numbers()).square_sum == square_sum
