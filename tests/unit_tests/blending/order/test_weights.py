"""What a user says about proportions."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.blending.loading.token_weights import weights_by_tokens
from megatron.blending.order.weights import WeightSchedule, integer_weights


@pytest.mark.parametrize(
    ("weights", "whole"),
    [
        ((0.5, 0.3, 0.2), (5, 3, 2)),
        ((5, 2, 1), (5, 2, 1)),
        ((0.1, 0.2), (1, 2)),
        ((1, 0), (1, 0)),
        ((Fraction(1, 3), Fraction(1, 6)), (2, 1)),
        ((60, 40), (3, 2)),
    ],
)
def test_decimals_are_taken_as_written(weights, whole):
    """0.1 in binary is not a tenth: a period of 2**55 would be rounded for nothing."""
    assert integer_weights(weights) == whole


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=20).filter(any))
def test_rounding_keeps_who_is_there(weights):
    """A rare source that is rounded to 0 is never read, and nobody notices."""
    whole = integer_weights(weights, max_period=2**16)
    assert [weight > 0 for weight in whole] == [weight > 0 for weight in weights]
    assert sum(whole) <= 2**16
    total = sum(weights)
    for weight, rounded in zip(weights, whole):
        assert abs(rounded / sum(whole) - weight / total) < 1.001 * len(weights) / 2**16


@pytest.mark.parametrize(
    ("weights", "fault"),
    [
        ((1, -0.5), "weight 1 must be at least 0, but is -0.5"),
        ((0, 0.0), r"weights must not all be 0, but are \[0, 0.0\]"),
        ((1, float("nan")), "weight 1 must be a number, but is nan"),
        (("1",), "weight 0 must be a number, but is '1'"),
    ],
)
def test_refused_at_construction(weights, fault):
    """energon finds out at the first batch, on the ranks that get there."""
    with pytest.raises(ValueError, match=fault):
        integer_weights(weights)


def test_weights_by_tokens():
    """By sample, 5:3:2 was 27/30/43 % of the tokens on energon's data."""
    assert weights_by_tokens((0.5, 0.5), (100, 400)) == (0.005, 0.00125)
    assert weights_by_tokens((1, 0), (100, float("nan"))) == (0.01, 0.0)
    with pytest.raises(ValueError, match="mean tokens of source 1 must be above 0, but are 0"):
        weights_by_tokens((1, 1), (3, 0))


def test_schedules():
    steps = WeightSchedule(((0, (1, 1)), (10, (3, 1))), outputs_per_step=4)
    assert steps.segments() == [(0, (1, 1)), (40, (3, 1))]
    ramp = WeightSchedule(((0, (1, 0)), (8, (0, 1))), kind="linear", num_pieces=4).segments()
    assert [start for start, _ in ramp] == [0, 2, 4, 6, 8]
    assert [weights[0] / sum(weights) for _, weights in ramp] == [0.875, 0.625, 0.375, 0.125, 0]


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"points": ((5, (1,)),)}, "must start at step 0"),
        ({"points": ((0, (1,)), (0, (1,)))}, "its steps increase"),
        ({"points": ((0, (1,)),), "kind": "cosine"}, "kind must be one of step, linear"),
        ({"points": ((0, (1, 1)), (5, (1,)))}, "as many weights"),
        ({"points": ((0, (0, 0)),)}, "must not all be 0"),
        ({"points": {0: (1, 1)}}, r"must be pairs \(step, weights\), but are {0: \(1, 1\)}; write"),
        ({"points": {}}, r"must be pairs \(step, weights\), but are {}"),
        ({"points": (0, (1, 1))}, r"must be pairs \(step, weights\)"),
        ({"points": ((0, 1),)}, r"must be pairs \(step, weights\)"),
        ({"points": ((0, {"a": 1}),)}, r"must be pairs \(step, weights\)"),
        ({"points": None}, r"must be pairs \(step, weights\), but are None"),
        (
            {"points": ((0, (1,)), (1e3, (2,)))},
            r"each step of a schedule must be a whole number, but is 1000\.0",
        ),
        (
            {"points": ((0, (1,)), ("5", (2,)))},
            "each step of a schedule must be a whole number, but is '5'",
        ),
        (
            {"points": ((0, (1,)),), "outputs_per_step": 2.5},
            "outputs_per_step must be a whole number, but is 2.5",
        ),
        (
            {"points": ((0, (1,)),), "num_pieces": True},
            "num_pieces must be a whole number, but is True",
        ),
    ],
)
def test_schedules_are_refused(options, fault):
    with pytest.raises(ValueError, match=fault):
        WeightSchedule(**options)


@pytest.mark.slow
def test_linear_schedules_keep_rare_sources():
    """In 4096ths of all, one of 1e-5 was read 25 times too often, and of thousands each was up to
    49 times off.
    """
    points = ((0, (0.7, 0.3, 1e-5)), (1000, (0.3, 0.7, 1e-5)))
    for _, weights in WeightSchedule(points, kind="linear").segments():
        assert weights[2] / sum(weights) == pytest.approx(1e-5, rel=0.06)
    many = tuple(range(1, 2001))
    for _, weights in WeightSchedule(((0, many), (10, many[::-1])), kind="linear").segments():
        assert min(weights) > 0
