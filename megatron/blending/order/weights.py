"""pure. A user gives the proportions of a blend as weights, which may change over training
steps."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from numbers import Rational
from typing import Any

from megatron.blending.arguments import check_one_of, check_whole, shown

MAX_PERIOD = 2**20
"""Weights whose common denominator is larger are rounded to it: by at most a sample in a million.
"""

Weight = float | int | Fraction


def integer_weights(weights: Sequence[Weight], max_period: int = MAX_PERIOD) -> tuple[int, ...]:
    """Returns whole numbers in the proportions of `weights`, as written in decimals: `(0.5, 0.3,
    0.2) -> (5, 3, 2)`.

    Where they would sum to more than `max_period` they are rounded, by largest remainder; none but
    a weight of 0 becomes 0. ValueError for a weight that is negative or no number, and if all are
    0.
    """
    if all(type(weight) is int and weight >= 0 for weight in weights):  # most are, and many times
        divisor = math.gcd(*weights)  # type: ignore[arg-type]
        if divisor and sum(weights) // divisor <= max_period:
            return tuple(weight // divisor for weight in weights)  # type: ignore[misc]
    exact = [exact_weight(weight, number) for number, weight in enumerate(weights)]
    if not (total := sum(exact)):
        raise ValueError(
            f"weights must not all be 0, but are {list(weights)}; give a source a weight"
        )
    shares = [weight / total for weight in exact]
    period = math.lcm(*(share.denominator for share in shares))
    if period <= max_period:
        return tuple(int(share * period) for share in shares)
    return _rounded(shares, max_period)


def _rounded(shares: Sequence[Fraction], total: int) -> tuple[int, ...]:
    """Returns whole numbers that sum to `total`, in the proportions of shares, which sum to 1.

    `[9/16, 5/16, 2/16], 8 -> (5, 2, 1)`: 4, 2 and 1, and the largest remainder gets the one left.
    """
    whole = [max(int(share * total), 1 if share else 0) for share in shares]
    missing = total - sum(whole)
    by_remainder = sorted(
        range(len(shares)), key=lambda child: whole[child] - shares[child] * total
    )
    for child in by_remainder[: max(missing, 0)]:
        whole[child] += 1
    # Those that were raised to 1 are paid for by the largest.
    whole[whole.index(max(whole))] += min(missing, 0)
    return tuple(whole)


def exact_weight(weight: Weight, number: int) -> Fraction:
    """Returns weight `number` as it is written in decimals; ValueError for what is none."""
    is_number = isinstance(weight, (int, float, Rational)) or hasattr(weight, "__float__")
    if not is_number or isinstance(weight, bool) or not math.isfinite(weight):
        raise ValueError(f"weight {number} must be a number, but is {shown(weight)}")
    if weight < 0:
        raise ValueError(f"weight {number} must be at least 0, but is {weight}")
    return Fraction(weight) if isinstance(weight, Rational) else Fraction(repr(float(weight)))


@dataclass(frozen=True)
class WeightSchedule:
    """Weights that change: from each point on (`kind="step"`), or evenly between points
    (`"linear"`).
    """

    points: tuple[tuple[int, tuple[Weight, ...]], ...]
    """(training step, weights of all children), the first at step 0."""
    outputs_per_step: int = 1
    """Outputs of the blend that a step takes over all ranks: the global batch, in batches or
    samples.
    """
    kind: str = "step"
    num_pieces: int = 128
    """Between two points a linear change is made in so many equal parts, or in each step if there
    are fewer.
    """

    def __post_init__(self) -> None:
        self._check_form()
        for name in ("outputs_per_step", "num_pieces"):
            check_whole(name, getattr(self, name))
        check_one_of("schedule kind", self.kind, ("step", "linear"))
        steps = [step for step, _ in self.points]
        for step in steps:
            check_whole("each step of a schedule", step, 0)
        if not steps or steps[0] != 0 or sorted(set(steps)) != steps:
            raise ValueError(
                f"schedule must start at step 0 and its steps increase, but they are {steps}"
            )
        if len({len(weights) for _, weights in self.points}) != 1:
            raise ValueError(
                "each point of a schedule must give as many weights as there are children"
            )
        for _, weights in self.points:
            integer_weights(weights)

    def _check_form(self) -> None:
        points: Any = self.points
        for pair in points if isinstance(points, (list, tuple)) else [points]:
            is_pair = isinstance(pair, (list, tuple)) and len(pair) == 2
            if (
                not is_pair
                or isinstance(pair[1], (str, Mapping))
                or not hasattr(pair[1], "__len__")
            ):
                written = "write ((0, (1, 1)), (1000, (1, 3)))"
                raise ValueError(
                    f"schedule points must be pairs (step, weights), but are "
                    f"{shown(points)}; {written}"
                )

    def segments(self) -> list[tuple[int, tuple[Weight, ...]]]:
        """Returns (first output, weights) of each stretch of constant weights."""
        found: list[tuple[int, tuple[Weight, ...]]] = []
        for (step, weights), (next_step, next_weights) in zip(self.points, self.points[1:]):
            num_pieces = min(self.num_pieces, next_step - step) if self.kind == "linear" else 1
            # From step 0 to 100 in 4 pieces: starts 0 25 50 75, each with the weights at its
            # middle, 1/8 3/8 5/8 7/8 of the way.
            for piece in range(num_pieces):
                start = step + (next_step - step) * piece // num_pieces
                middle = (
                    Fraction(2 * piece + 1, 2 * num_pieces)
                    if self.kind == "linear"
                    else Fraction(0)
                )
                found.append(
                    (start * self.outputs_per_step, _between(weights, next_weights, middle))
                )
        last_step, last_weights = self.points[-1]
        return [*found, (last_step * self.outputs_per_step, last_weights)]


def _between(start: Sequence[Weight], end: Sequence[Weight], part: Fraction) -> tuple[Weight, ...]:
    """Returns weights on the way between two points, in 4096ths, or finer to a hundredth of the
    smallest.
    """
    if not part:
        return tuple(start)
    whole = [integer_weights(weights) for weights in (start, end)]
    before, after = ([Fraction(weight, sum(weights)) for weight in weights] for weights in whole)
    shares = [a + (b - a) * part for a, b in zip(before, after)]
    parts = int(100 / min(filter(None, shares))).bit_length()
    return integer_weights(shares, min(max(4096, 2**parts), MAX_PERIOD))
