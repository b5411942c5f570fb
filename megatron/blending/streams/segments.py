"""pure. Sequences of a blend whose proportions change: when they are told to, or when children run out."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron.blending.streams.blend import NO_LIMIT, OWED_UNIT, SEQUENCES, Choices, ExactSequence, Ints, RandomSequence
from megatron.blending.streams.order import salted_seed
from megatron.blending.streams.weights import Weight, exact_weights, floored_weights, integer_weights


class _Planned(NamedTuple):
    start: int
    weights: tuple[int, ...]
    limit: int
    """Outputs until the next change that was known from the beginning: a later one must not change what came before."""


@dataclass
class _Stretch:
    start: int
    plan: int
    sequence: ExactSequence | RandomSequence
    before: Ints
    owed: list[int]
    """At the start: how many of each child's outputs were there, and how many more should have been, by OWED_UNIT."""
    end: float


class Segments:
    """Sequences one after the other, each from the output on that was named; the last one has no end.

    Children go on where they stood. In "exact" mode they are about within one output of what all weights so far sum to,
    also where segments are shorter than the turn of a rare child: what it is owed is carried over. It is exactly one
    in the first segment; later, where several children are behind at once or weights were 0, it may be up to two.

    Sequences are made when they are asked for. To begin behind many, each is gone through to its end or period: up to
    about 20 milliseconds, or 4 seconds for weights whose common denominator is 2**20.
    """

    def __init__(self, segments: Sequence[tuple[int, Sequence[Weight]]], seed: int, mode: str = "exact") -> None:
        self._num_children = len(segments[0][1])
        self._seed = seed
        self._mode = mode
        self._stretches: list[_Stretch] = []
        ends = [*(start for start, _ in segments[1:]), None]
        self._plan = [
            _Planned(start, self._whole(weights), NO_LIMIT if end is None else end - start)
            for (start, weights), end in zip(segments, ends)
        ]

    def append(self, start: int, weights: Sequence[Weight]) -> None:
        """Change to `weights` at output `start`, whatever was planned from there on; what comes before stays."""
        self._plan = [planned for planned in self._plan if planned.start < start]
        self._plan.append(_Planned(start, self._whole(weights), NO_LIMIT))
        self._stretches = [stretch for stretch in self._stretches if stretch.start < start]
        if self._stretches:
            self._stretches[-1].end = min(self._stretches[-1].end, start)

    def choose(self, positions: Ints) -> Choices:
        stretches = self._stretches_of(positions)
        if len(self._stretches) == 1:
            return self._stretches[0].sequence.choose(positions)
        children, numbers = np.zeros_like(positions), np.zeros_like(positions)
        for number in np.unique(stretches).tolist():
            stretch, here = self._stretches[number], np.flatnonzero(stretches == number)
            found = stretch.sequence.choose(positions[here] - stretch.start)
            children[here] = found.children
            numbers[here] = found.numbers + stretch.before[found.children]
        return Choices(children, numbers)

    def counts(self, position: int) -> list[int]:
        (number,) = self._stretches_of(np.array([position], np.int64)).tolist()
        return self._counts(self._stretches[number], position).tolist()

    def _whole(self, weights: Sequence[Weight]) -> tuple[int, ...]:
        if len(weights) != self._num_children:
            raise ValueError(f"there must be {self._num_children} weights, but there are {len(weights)}")
        return integer_weights(weights)

    def _counts(self, stretch: _Stretch, position: int) -> Ints:
        return stretch.before + np.array(stretch.sequence.counts(position - stretch.start), np.int64)

    def _stretches_of(self, positions: Ints) -> Ints:
        last = int(positions.max()) if len(positions) else 0
        while not self._stretches or self._stretches[-1].end <= last:
            self._go_on()
        return np.searchsorted([stretch.start for stretch in self._stretches], positions, side="right") - 1

    def _go_on(self) -> None:
        if not self._stretches:
            self._begin(0, np.zeros(self._num_children, np.int64), [0] * self._num_children)
            return
        stretch = self._stretches[-1]
        plan = stretch.plan
        if stretch.end < self._end(plan):
            # One that is not even at its first end, for what was owed, need not repeat itself. The next one does.
            assert isinstance(stretch.sequence, ExactSequence)
            if stretch.sequence.is_even():
                stretch.end = self._end(plan)
                return
        else:
            plan += 1
        end = int(stretch.end)
        before = self._counts(stretch, end)
        weights = self._plan[stretch.plan].weights
        given = (before - stretch.before).tolist()
        due = [(end - stretch.start) * weight * OWED_UNIT // sum(weights) for weight in weights]
        owed = [old + new - count * OWED_UNIT for old, new, count in zip(stretch.owed, due, given)]
        self._begin(plan, before, owed)

    def _begin(self, plan: int, before: Ints, owed: list[int]) -> None:
        start, end = int(before.sum()), self._end(plan)
        weights, limit = self._plan[plan].weights, self._plan[plan].limit
        seed = salted_seed(self._seed, f"segment {len(self._stretches)}")
        sequence: ExactSequence | RandomSequence
        if self._mode == "exact":
            sequence = ExactSequence(weights, seed, owed if any(owed) else None, limit)
            if sequence.is_owed:
                end = min(end, start + sequence.length)
        else:
            sequence = SEQUENCES[self._mode](weights, seed)
        self._stretches.append(_Stretch(start, plan, sequence, before, owed, end))

    def _end(self, plan: int) -> float:
        return self._plan[plan + 1].start if plan + 1 < len(self._plan) else math.inf


class UntilExhausted:
    """Each child is read through once, in proportion for as long as it lasts; then the others go on without it.

    A segment lasts until a child runs out; the next is made when it is asked for, in up to a tenth of a second.
    """

    def __init__(self, weights: Sequence[Weight], sizes: Sequence[int | None], seed: int) -> None:
        """`sizes`: how many outputs a child has; None for endless. A child of weight 0 is never read.

        Weights in proportion to the sizes make all children last to the end. What their rounding, where there are too
        many outputs for an exact table, leaves over (about a sample in 2**16 for each child) is blended alike, last.
        """
        self._weights = exact_weights(weights)
        self._sizes = [math.inf if size is None else size for size in sizes]
        self._seed = seed
        used = [size for size, weight in zip(sizes, self._weights) if weight]
        self.length = None if None in used else sum(size or 0 for size in used)
        self._is_by_size = len({w / size if size else -1 for w, size in zip(self._weights, sizes) if w}) == 1
        self._segments: list[tuple[int, Ints, ExactSequence]] = []
        self._end: float = 0
        """Of the last segment that was made."""
        self._used: Ints = np.zeros(len(self._weights), np.int64)

    def choose(self, positions: Ints) -> Choices:
        children, numbers = np.zeros_like(positions), np.zeros_like(positions)
        segments = self._segments_of(positions)
        for segment in np.unique(segments).tolist():
            start, used, sequence = self._segments[segment]
            here = np.flatnonzero(segments == segment)
            found = sequence.choose(positions[here] - start)
            children[here] = found.children
            numbers[here] = found.numbers + used[found.children]
        return Choices(children, numbers)

    def counts(self, position: int) -> list[int]:
        if position == self.length:
            return [int(size) if weight else 0 for weight, size in zip(self._weights, self._sizes)]
        (segment,) = self._segments_of(np.array([position])).tolist()
        start, used, sequence = self._segments[segment]
        return (used + np.array(sequence.counts(position - start), np.int64)).tolist()

    def _segments_of(self, positions: Ints) -> Ints:
        while len(positions) and positions.max() >= self._end:
            self._add_segment()
        return np.searchsorted([start for start, _, _ in self._segments], positions, side="right") - 1

    def _add_segment(self) -> None:
        left = [size - int(used) if weight else 0 for weight, size, used in zip(self._weights, self._sizes, self._used)]
        by_weight = [weight if count else 0 for weight, count in zip(self._weights, left)]
        shares = floored_weights(left if self._is_by_size else by_weight, least=1 if self.length is None else 0)
        sequence = ExactSequence(shares, salted_seed(self._seed, f"segment {len(self._segments)}"))
        start = int(self._end)
        self._segments.append((start, self._used, sequence))
        length = self._first_end(sequence, shares, left)
        self._end += length
        if length < math.inf:
            self._used = self._used + np.array(sequence.counts(int(length)), np.int64)

    def _first_end(self, sequence: ExactSequence, shares: Sequence[int], left: Sequence[float]) -> float:
        """Until which output of a sequence no child has run out."""
        # All at once, if they are in proportion: known without making a table of them.
        num_left, total = sum(count for count, share in zip(left, shares) if share), sum(shares)
        if num_left < math.inf and all(
            num_left * share == count * total for count, share in zip(left, shares) if share
        ):
            return num_left
        ends = [
            sequence.position_of(child, int(count) - 1) + 1
            for child, (count, share) in enumerate(zip(left, shares))
            if share and count < math.inf
        ]
        return min(ends, default=math.inf)
