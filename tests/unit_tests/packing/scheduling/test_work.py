"""Costs in integers: the same on every machine, and as fine as costs can be told apart."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.packing.scheduling.cost import PackCost
from megatron.packing.scheduling.work import Work, stable_order
from tests.unit_tests.packing.stubs import array


def test_work_by_hand():
    """The longest first, equal ones in global order; units are a power of two of the cost's."""
    work = Work.of(array(2, 4, 2, 8), PackCost(1.0, 0.5, 3.0))
    assert work.order.tolist() == [3, 1, 0, 2]
    assert work.length.tolist() == [8, 4, 2, 2]
    # Costs 40, 12, 4, 4; 4 * 40 = 160 is below 2^8: units of 2^-34.
    assert work.unit == 2.0**-34
    assert work.cost.tolist() == [40 << 34, 12 << 34, 4 << 34, 4 << 34]
    assert work.fixed == 3 << 34
    assert work.total == 60 << 34
    assert work.pack_costs(array(0, 3, 1, 1), 2, 2).tolist() == [[43 << 34, 11 << 34], [3 << 34, 15 << 34]]


@pytest.mark.parametrize("cost", [PackCost(1e-30, 0.0), PackCost(1e15, 1e12, 1e25), PackCost(1 / 3, 1 / 7, 1e-9)])
@pytest.mark.parametrize("lengths", [[], [1], [1] * 1000, [131072, *range(1, 500)], [2**21] * 64])
def test_costs_keep_their_order_and_their_size(cost, lengths):
    """Sums that leave int64, or float64's 53 bits, would be wrong; costs that fall with length break all placement."""
    work = Work.of(array(*lengths), cost)
    assert work.cost.size == 0 or work.cost.min() >= 1
    assert (np.diff(work.cost) <= 0).all()
    assert work.total <= 2**42 + len(lengths)
    assert work.fixed < 2**43
    exact = cost.of_sequences(work.length)
    assert np.abs(work.cost * work.unit - exact).max(initial=0) <= work.unit
    assert abs(work.fixed * work.unit - cost.fixed) <= work.unit


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(-3, 3) | st.integers(-(2**62), 2**62 - 1), max_size=40))
def test_stable_order_is_a_stable_argsort(values):
    """Ties broken in another order on another machine give another schedule there. Values too large for the quick way
    are among these.
    """
    numbers = array(*values)
    assert stable_order(numbers).tolist() == np.argsort(numbers, kind="stable").tolist()
