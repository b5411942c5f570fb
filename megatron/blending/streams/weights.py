"""pure. What a user says about proportions, as integers that a sequence can be made of; and as they change over steps.

Weights are shares of samples, unless they went through `weights_by_tokens`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from numbers import Integral, Rational
from typing import Any

MAX_PERIOD = 2**20
"""Weights whose common denominator is larger are rounded to it: by at most a sample in a million."""

Weight = float | int | Fraction


def integer_weights(weights: Sequence[Weight], max_period: int = MAX_PERIOD) -> tuple[int, ...]:
    """Return whole numbers in the proportions of `weights`, as written in decimals: `(0.5, 0.3, 0.2) -> (5, 3, 2)`.

    Where they would sum to more than `max_period`, they are rounded to sum to it, by largest remainder; none but a
    weight of 0 becomes 0. ValueError for a weight that is negative or no number, and if all are 0.
    """
    whole = [weight for weight in weights if type(weight) is int and weight >= 0]
    if len(whole) == len(weights):
        # Such as this function returns; as fractions they would take ten times as long.
        shared = math.gcd(*whole)
        if shared and sum(whole) // shared <= max_period:
            return tuple(weight // shared for weight in whole)
    shares = exact_weights(weights)
    period = math.lcm(*(share.denominator for share in shares))
    if period <= max_period:
        return tuple(int(share * period) for share in shares)
    return _rounded(shares, max_period)


def exact_weights(weights: Sequence[Weight]) -> list[Fraction]:
    """Return shares of 1, of weights as written in decimals; ValueError as `integer_weights`."""
    exact = [_fraction(weight, number) for number, weight in enumerate(weights)]
    total = sum(exact)
    if not total:
        raise ValueError(f"weights must not all be 0, but are {list(weights)}; give a source a weight")
    return [weight / total for weight in exact]


def floored_weights(weights: Sequence[Weight], least: int, period: int = 2**16) -> tuple[int, ...]:
    """As `integer_weights`, but what must be rounded is rounded down, so that no child is ahead by much of its own.

    `least`: of a weight that is not 0.
    """
    shares = exact_weights(weights)
    if math.lcm(*(share.denominator for share in shares)) <= MAX_PERIOD:
        return integer_weights(weights)
    return tuple(max(int(share * period), least if share else 0) for share in shares)


def weights_by_tokens(weights: Sequence[Weight], mean_tokens: Sequence[float]) -> tuple[float, ...]:
    """Return weights in samples that give `weights` in tokens, where samples of each source have `mean_tokens`."""
    if len(weights) != len(mean_tokens):
        raise ValueError(f"there must be a mean for each of {len(weights)} weights, but there are {len(mean_tokens)}")
    for number, (weight, mean) in enumerate(zip(weights, mean_tokens)):
        if weight and not 0 < mean < math.inf:
            raise ValueError(f"mean tokens of source {number} must be above 0, but are {mean}; check its samples")
    return tuple(float(weight) / mean if weight else 0.0 for weight, mean in zip(weights, mean_tokens))


@dataclass(frozen=True)
class WeightSchedule:
    """Weights that change: from each point on (`kind="step"`), or evenly between points (`"linear"`)."""

    points: tuple[tuple[int, tuple[Weight, ...]], ...]
    """(training step, weights of all children), the first at step 0."""
    outputs_per_step: int = 1
    """How many outputs of the blend a step takes over all ranks: the global batch, in batches or samples."""
    kind: str = "step"
    num_pieces: int = 128
    """Between two points a linear change is made in so many equal parts, or in each step if there are fewer."""

    def __post_init__(self) -> None:
        self._check_types()
        steps = [step for step, _ in self.points]
        if not steps or steps[0] != 0 or sorted(set(steps)) != steps:
            raise ValueError(f"schedule must start at step 0 and its steps increase, but they are {steps}")
        if self.kind not in ("step", "linear"):
            raise ValueError(f"schedule kind must be 'step' or 'linear', but is {self.kind!r}")
        if self.outputs_per_step < 1 or self.num_pieces < 1:
            raise ValueError("outputs_per_step and num_pieces must be at least 1")
        if len({len(weights) for _, weights in self.points}) != 1:
            raise ValueError("each point of a schedule must give as many weights as there are children")
        for _, weights in self.points:
            integer_weights(weights)

    def _check_types(self) -> None:
        points: Any = self.points
        pairs = points if isinstance(points, (list, tuple)) else [points]
        for pair in pairs:
            is_pair = isinstance(pair, (list, tuple)) and len(pair) == 2
            if not is_pair or isinstance(pair[1], (str, Mapping)) or not hasattr(pair[1], "__len__"):
                raise ValueError(
                    f"schedule points must be pairs (step, weights), but are {points!r}; "
                    "write ((0, (1, 1)), (1000, (1, 3)))"
                )
        whole = [("outputs_per_step", self.outputs_per_step), ("num_pieces", self.num_pieces)]
        for name, value in [*(("each step of a schedule", step) for step, _ in points), *whole]:
            if not isinstance(value, Integral) or isinstance(value, bool):
                raise ValueError(f"{name} must be a whole number, but is {value!r}; write it as one, such as 1000")

    def segments(self) -> list[tuple[int, tuple[Weight, ...]]]:
        """Return (first output, weights) of each stretch of constant weights."""
        found: list[tuple[int, tuple[Weight, ...]]] = []
        for (step, weights), (next_step, next_weights) in zip(self.points, self.points[1:]):
            num_pieces = min(self.num_pieces, next_step - step) if self.kind == "linear" else 1
            for piece in range(num_pieces):
                start = step + (next_step - step) * piece // num_pieces
                share = Fraction(2 * piece + 1, 2 * num_pieces) if self.kind == "linear" else Fraction(0)
                found.append((start * self.outputs_per_step, _between(weights, next_weights, share)))
        last_step, last_weights = self.points[-1]
        return [*found, (last_step * self.outputs_per_step, last_weights)]


def _fraction(weight: Weight, number: int) -> Fraction:
    is_number = isinstance(weight, (int, float, Rational)) or hasattr(weight, "__float__")
    if not is_number or isinstance(weight, bool) or not math.isfinite(weight):
        raise ValueError(f"weight {number} must be a number, but is {weight!r}")
    if weight < 0:
        raise ValueError(f"weight {number} must be at least 0, but is {weight}")
    return Fraction(weight) if isinstance(weight, Rational) else Fraction(repr(float(weight)))


def _rounded(shares: Sequence[Fraction], period: int) -> tuple[int, ...]:
    whole = [max(int(share * period), 1 if share else 0) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda child: whole[child] - shares[child] * period)
    largest = max(range(len(shares)), key=lambda child: shares[child])
    missing = period - sum(whole)
    for child in by_remainder[: max(missing, 0)]:
        whole[child] += 1
    # Children that were raised to 1 are paid for by the largest.
    whole[largest] += min(missing, 0)
    return tuple(whole)


def _between(start: Sequence[Weight], end: Sequence[Weight], share: Fraction) -> tuple[Weight, ...]:
    """Weights on the way between two points, as shares of 1 in 4096ths, which makes a short table for each of many
    pieces; or in such parts, of 2**-20 at the least, as are a hundredth of the smallest.
    """
    if not share:
        return tuple(start)
    whole = [integer_weights(weights, max_period=MAX_PERIOD) for weights in (start, end)]
    before, after = ([Fraction(weight, sum(weights)) for weight in weights] for weights in whole)
    shares = [a + (b - a) * share for a, b in zip(before, after)]
    parts = int(100 / min(filter(None, shares))).bit_length()
    return _rounded(shares, min(max(4096, 2**parts), MAX_PERIOD))
