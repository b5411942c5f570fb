"""pure. What weights that change sum to, at any output: exactly, in whole numbers of a bounded size."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megatron.blending.streams.deadlines import NEVER, Behind
from megatron.blending.streams.weights import Weight, integer_weights

UNIT = 2**40
"""Of shares that are told: rounded down to 1 / UNIT of an output."""

_CHECKED_TOGETHER = 2**16


class Segment(NamedTuple):
    """A stretch of constant weights."""

    start: int
    end: int
    """NEVER of the last one."""
    weights: tuple[int, ...]
    total: int
    """Of the weights: an output adds weights / total to the shares."""
    whole: list[int]
    """Of each child's share at the start."""
    rest: Behind
    """What the share is above that, times `total`."""
    units: list[int]
    """The share at the start, in units of 1 / UNIT."""


class Shares:
    """Each child's share W(k): what its weights, of 1 together, sum to over the first k outputs; and what it is at 0.

    About 10 microseconds per segment and child, once, where the sums of the weights have a small common multiple.
    """

    def __init__(self, segments: Sequence[tuple[int, Sequence[Weight]]], at_start: Sequence[int] | None = None) -> None:
        """`segments`: (first output, weights), the first at 0. `at_start`: shares at 0, in units of 1 / UNIT."""
        self.segments: list[Segment] = []
        amounts, unit = (list(at_start), UNIT) if at_start else ([0] * len(segments[0][1]), 1)
        ends = [*(start for start, _ in segments[1:]), NEVER]
        for (start, given), end in zip(segments, ends):
            weights = lowest_terms(given)
            total = sum(weights)
            whole = [amount // unit for amount in amounts]
            rests = [amount % unit * total for amount in amounts]
            rest = Behind([amount // unit for amount in rests], [-(-amount // unit) for amount in rests])
            units = [amount * UNIT // unit for amount in amounts]
            self.segments.append(Segment(start, end, weights, total, whole, rest, units))
            factor = math.lcm(unit, total) // unit
            unit *= factor
            amounts = [
                amount * factor + (end - start) * weight * (unit // total) for amount, weight in zip(amounts, weights)
            ]
        self._starts = [segment.start for segment in self.segments]
        self._whole = list(zip(*(segment.whole for segment in self.segments)))

    def segment_at(self, output: int) -> int:
        return bisect_left(self._starts, output + 1) - 1

    def in_units(self, output: int) -> list[int]:
        """Return each child's share, in units of 1 / UNIT."""
        segment = self.segments[self.segment_at(output)]
        num = output - segment.start
        return [units + num * weight * UNIT // segment.total for units, weight in zip(segment.units, segment.weights)]

    def behind(self, number: int, output: int, counts: Sequence[int]) -> Behind:
        """How much each share is above `counts` at an output of segment `number`, times the sum of its weights."""
        segment = self.segments[number]
        added = [
            (output - segment.start) * weight + (whole - count) * segment.total
            for weight, whole, count in zip(segment.weights, segment.whole, counts)
        ]
        low, high = ([rest + more for rest, more in zip(bound, added)] for bound in segment.rest)
        return Behind(low, high)

    def is_between(self, number: int, child: int) -> bool:
        """Whether a share is no whole number at the start of a segment: an output's window goes on there."""
        return self.segments[number].rest.high[child] > 0

    def release(self, number: int, child: int, output: int) -> int:
        """Where a child's output is released, if that is within segment `number`, where it has weight, or before."""
        segment = self.segments[number]
        ahead = (output - segment.whole[child]) * segment.total - segment.rest.high[child]
        return segment.start + ahead // segment.weights[child]

    def deadline(self, child: int, output: int) -> int:
        """Where at last a child's output must stand; NEVER if its share does not come to it."""
        number = bisect_left(self._whole[child], output + 1) - 1
        segment = self.segments[number]
        if not segment.weights[child]:
            return NEVER
        due = (output + 1 - segment.whole[child]) * segment.total - segment.rest.low[child]
        return segment.start - (-due // segment.weights[child]) - 1

    def can_go_on(self, number: int, counts: Sequence[int]) -> bool:
        """Whether every output that is left can be had by its deadline, from the start of segment `number` on.

        It can if at every k so many are due by then at most (Hall, 1935): the windows of what is not begun need no
        more places than they have. No more is to be seen once all that children are ahead is less than an output.
        """
        first, given = self.segments[number].start, np.array(counts, np.int64)
        for segment in self.segments[number:]:
            low, weights = np.array(segment.rest.low, np.int64), np.array(segment.weights, np.int64)
            above = np.array(segment.whole, np.int64) - given
            # After a period all with weight have come to what they had; after one more it repeats itself.
            length = min(segment.end - segment.start, 2 * segment.total)
            done, step = 0, 16
            while done < length:
                shares = above + (low + done * weights) / segment.total
                if np.maximum(-shares, 0).sum() < 1 - 1e-6:
                    return True
                places = np.arange(done, min(done + step, length) + 1)
                due = above + (low + places[:, None] * weights) // segment.total
                if (np.maximum(due, 0).sum(axis=1) > places + segment.start - first).any():
                    return False
                done, step = done + step, min(2 * step, max(1, _CHECKED_TOGETHER // len(counts)))
        return True


def lowest_terms(weights: Sequence[Weight]) -> tuple[int, ...]:
    """Return whole numbers in the proportions of weights, the smallest ones."""
    whole = integer_weights(weights)
    shared = math.gcd(*whole)
    return tuple(weight // shared for weight in whole)
