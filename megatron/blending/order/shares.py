"""pure. Shares of a blend's children, and the order that keeps each within one output of its share.

A child's share W(k) is what its weights, of 1 together, sum to over the first k outputs. Output j
of a child may stand from the first place t where W(t + 1) > j, its release, to the last t where
W(t) < j + 1, its deadline. An order that keeps all of these intervals exists (the chairman
assignment problem, Tijdeman, 1980), and earliest deadline first finds it. With weights (1/2, 1/3,
1/6) the intervals of six outputs are

    child 0: 0-1, 2-3, 4-5      child 1: 0-2, 3-5      child 2: 0-5

    and their order is 0 1 0 1 0 2.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.blending.order import compiled
from megatron.blending.order.finite import Segments
from megatron.blending.order.weights import integer_weights

Ints = npt.NDArray[np.int64]
NEVER = 2**62
_FITS = 2**61
"""Larger numbers are computed in Python, which has no largest one."""


class Shares:
    """Shares of each child at any output, and the intervals of its outputs that follow, in
    whole numbers.

    An output that is begun when its child loses its weight for good stands before that, or never:
    as many do as leave the others less than one output more, those that are released first. A pause
    may have the output that it cuts.
    """

    def __init__(self, segments: Segments, at_start: Sequence[Fraction]) -> None:
        self.weights = [integer_weights(weights) for _, weights in segments]
        begins = [Fraction(start) for start, _ in segments]
        self.starts = [math.ceil(start) for start in begins]
        sums = [sum(weights) for weights in self.weights]
        self.unit = math.lcm(
            *{share.denominator for share in at_start},
            *{
                total * begin.denominator * end.denominator
                for total, begin, end in zip(sums, begins, [*begins[1:], Fraction(0)])
            },
        )
        # In `unit`: of each segment and child the slope, the share at output 0 if it went on so,
        # and the share at the segment's start.
        largest = self.unit * (self.starts[-1] + 2 + sum(map(abs, at_start)))
        dtype: Any = np.int64 if largest < _FITS else object
        table = np.array(self.weights, dtype)
        self._slopes = table * np.array([self.unit // total for total in sums], dtype)[:, None]
        lengths = [end - begin for begin, end in pairwise(begins)]
        grown = [self._scaled(slopes, length) for slopes, length in zip(self._slopes, lengths)]
        first = np.array([int(share * self.unit) for share in at_start], dtype)
        self._at_starts = np.cumsum(np.array([first, *grown], dtype), axis=0)
        covered = [self._scaled(slopes, begin) for slopes, begin in zip(self._slopes, begins)]
        self._offsets = self._at_starts - np.array(covered, dtype)
        self._is_compiled = dtype is np.int64 and compiled.EARLIEST_DEADLINE_FIRST is not None
        self._lines: dict[int, tuple[list[int], list[int], list[Any]]] = {}
        self._cut: dict[tuple[int, int], tuple[int, int]] = {}
        self._cut_at_last()

    def _scaled(self, slopes: npt.NDArray[Any], length: Fraction) -> npt.NDArray[Any]:
        # Divided first, as the product may not fit in 64 bits. By the choice of `unit` there is no
        # remainder.
        return slopes // length.denominator * length.numerator

    def at(self, output: int) -> list[Fraction]:
        """Returns each child's share of the first outputs."""
        number = bisect_right(self.starts, output) - 1
        lines = zip(self._slopes[number].tolist(), self._offsets[number].tolist())
        return [Fraction(slope * output + offset, self.unit) for slope, offset in lines]

    def interval(self, child: int, output: int) -> tuple[int, int]:
        """Returns release and deadline of a child's output."""
        if (child, output) in self._cut:
            return self._cut[child, output]
        if child not in self._lines:
            columns = self._slopes, self._offsets, self._at_starts[1:]
            slopes, offsets, at_starts = (column[:, child].tolist() for column in columns)
            self._lines[child] = slopes, offsets, at_starts
        slopes, offsets, at_starts = self._lines[child]
        # Weights (1/2, 1/3, 1/6) have unit 6, and child 0 slope 3. Its output 1 begins at 6 and
        # ends at 11 -> release 6 // 3 = 2, deadline 11 // 3 = 3.
        begin, end = output * self.unit, (output + 1) * self.unit - 1
        # The segment in which the child's share reaches `output` whole outputs, then the place on
        # its line: share(t) = slope * t + offset.
        line = bisect_right(at_starts, begin)
        release = (begin - offsets[line]) // slopes[line] if slopes[line] else NEVER
        line = bisect_right(at_starts, end)
        deadline = (end - offsets[line]) // slopes[line] if slopes[line] else NEVER
        return release, deadline

    def first_cut(self, number: int) -> int:
        """Returns where the first output is released whose interval continues behind a segment."""
        if number + 1 == len(self.starts):
            return NEVER
        shares = self._at_starts[number + 1]
        cut = np.flatnonzero((self._slopes[number] != 0) & (shares % self.unit != 0)).tolist()
        released = [self.interval(child, int(shares[child]) // self.unit)[0] for child in cut]
        return min([self.starts[number + 1], *released])

    def order(self, start: int, end: int, counts: Ints) -> tuple[Ints, Ints, Ints, Ints]:
        """Returns (children, numbers, releases, deadlines) of some outputs, the earliest deadline
        first.

        counts: each child's outputs before `start`.
        """
        found = np.empty((end - start, 4), np.int64)
        self._place(start, end, counts, found)
        children, numbers, releases, deadlines = found.T
        return children, numbers, releases, deadlines

    def advanced(self, start: int, end: int, counts: Ints) -> Ints:
        """Returns each child's outputs before `end`, given those before `start`."""
        return self._place(start, end, counts, None)

    def _place(self, start: int, end: int, counts: Ints, found: Ints | None) -> Ints:
        place: Any = compiled.EARLIEST_DEADLINE_FIRST
        largest = self.unit * (int(counts.max()) + end - start + 2)
        if not self._is_compiled or self._cut or largest >= _FITS:
            return _earliest_deadline_first(self, start, end, counts, found)
        counts, lines = counts.copy(), (self._slopes, self._offsets, self._at_starts)
        place(len(counts), len(self.starts), self.unit, *lines, start, end, counts, found=found)
        return counts

    def _cut_at_last(self) -> None:
        num_segments = len(self.starts)
        last = np.where(
            (self._slopes != 0).any(axis=0),
            num_segments - 1 - (self._slopes[::-1] != 0).argmax(axis=0),
            -1,
        )
        owed = 0
        for number, end in enumerate(self.starts[1:]):
            shares = self._at_starts[number + 1]
            ending = np.flatnonzero((last == number) & (shares % self.unit != 0)).tolist()
            cut = {child: int(shares[child]) for child in ending}
            # Fractions that end here are carried on: of 0.5, 0.75 and 0.75 outputs two stand before
            # the end, and none is owed.
            num_early, owed = divmod(
                owed + sum(share % self.unit for share in cut.values()), self.unit
            )
            released = sorted(
                (self.interval(child, share // self.unit)[0], child) for child, share in cut.items()
            )
            for at, (release, child) in enumerate(released):
                interval = (release, end - 1) if at < num_early else (NEVER, NEVER)
                self._cut[child, cut[child] // self.unit] = interval


def _earliest_deadline_first(
    shares: Shares, start: int, end: int, counts: Ints, found: Ints | None
) -> Ints:
    """Does what the function of core.cpp does; returns `counts` before `end`, and fills `found`."""
    before = counts.tolist()
    later = [(*shares.interval(child, count), child) for child, count in enumerate(before)]
    heapq.heapify(later)
    ready: list[tuple[int, int, int]] = []
    placed = []
    for place in range(start, end):
        # With rounded weights no output may be released at this place; the next release is taken
        # then.
        while later and (later[0][0] <= place or not ready):
            release, deadline, child = heapq.heappop(later)
            heapq.heappush(ready, (deadline, child, release))
        deadline, child, release = heapq.heappop(ready)
        placed.append((child, before[child], release, deadline))
        before[child] += 1
        heapq.heappush(later, (*shares.interval(child, before[child]), child))
    if found is not None:
        found[:] = np.array(placed, np.int64).reshape(-1, 4)
    return np.array(before, np.int64)
