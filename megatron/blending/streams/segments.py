"""pure. Sequences of a blend whose proportions change: when they are told to, or when children run out."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter

import numpy as np

from megatron.blending.streams.blend import Choices, ExactSequence, Ints, RandomSequence
from megatron.blending.streams.order import salted_seed
from megatron.blending.streams.planned import PlannedSequence
from megatron.blending.streams.shares import UNIT, lowest_terms
from megatron.blending.streams.weights import Weight, exact_weights, floored_weights

_Segments = list[tuple[int, Sequence[Weight]]]


@dataclass
class _Part:
    """What one sequence gives: all that was planned together, or from an appended change on."""

    start: int
    segments: _Segments
    """Seen from the start."""
    number: int
    """How many segments begin before."""
    sequence: PlannedSequence | RandomSequence | None = None
    before: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    owed: list[int] = field(default_factory=list)
    """At the start: how many of each child's outputs were there, and how many more should have been, by UNIT."""


class Segments:
    """Weights from each output on that was named; the last ones have no end. Children go on where they stood.

    In "exact" mode they are within one output of what all weights so far sum to, at every prefix: see
    `PlannedSequence`. That holds for weights that are named here. A change that is appended finds outputs that another
    future was planned for. What children are behind there is made up for as far as none of their outputs would come too
    late for it: after one such change they are within two. What children are behind whose weight is 0 is left to the
    others.

    No order can promise one whatever comes. If of 4 children with equal weights each that gives an output loses its
    weight to the others, the last one is 1/4 + 1/3 + 1/2 of an output behind after three; of n, about log(n) - 0.4
    (the game of Dietz and Sleator, 1987, whose cups are filled by one player and emptied by the other).
    """

    def __init__(self, segments: Sequence[tuple[int, Sequence[Weight]]], seed: int, mode: str = "exact") -> None:
        self._num_children = len(segments[0][1])
        self._seed = seed
        self._mode = mode
        self._in_force: _Segments = []
        """All that come to be, seen from output 0; none before it is asked for."""
        for _, weights in segments:
            self._check(weights)
        if mode == "exact":
            self._parts = [_Part(0, list(segments), 0)]
        else:
            self._parts = [_Part(start, [(0, weights)], number) for number, (start, weights) in enumerate(segments)]

    def append(self, start: int, weights: Sequence[Weight]) -> None:
        """Change to `weights` at output `start`, whatever was planned from there on; what comes before stays."""
        self._check(weights)
        self._parts = [part for part in self._parts if part.start < start]
        last = self._parts[-1] if self._parts else None
        number = last.number + sum(last.start + first < start for first, _ in last.segments) if last else 0
        self._in_force = []
        self._parts.append(_Part(start, [(0, weights)], number))

    def choose(self, positions: Ints) -> Choices:
        if len(self._parts) == 1:
            return self._sequence(0).choose(positions)
        parts = self._parts_of(positions)
        children, numbers = np.zeros_like(positions), np.zeros_like(positions)
        for number in np.unique(parts).tolist():
            sequence = self._sequence(number)
            part, here = self._parts[number], np.flatnonzero(parts == number)
            found = sequence.choose(positions[here] - part.start)
            children[here] = found.children
            numbers[here] = found.numbers + part.before[found.children]
        return Choices(children, numbers)

    def counts(self, position: int) -> list[int]:
        (number,) = self._parts_of(np.array([position], np.int64)).tolist()
        return self._counts(number, position).tolist()

    def is_away(self, child: int, position: int, length: int) -> bool:
        """Whether a child has no weight in any of `length` outputs."""
        if not self._in_force:
            ends = [*(part.start for part in self._parts[1:]), math.inf]
            for part, end in zip(self._parts, ends):
                told = ((part.start + start, weights) for start, weights in part.segments)
                self._in_force += [(start, weights) for start, weights in told if start < end]
        first = bisect_right(self._in_force, position, key=itemgetter(0)) - 1
        last = bisect_left(self._in_force, position + length, key=itemgetter(0))
        return not any(weights[child] for _, weights in self._in_force[first:last])

    def _parts_of(self, positions: Ints) -> Ints:
        return np.searchsorted([part.start for part in self._parts], positions, side="right") - 1

    def _check(self, weights: Sequence[Weight]) -> None:
        if len(weights) != self._num_children:
            raise ValueError(f"there must be {self._num_children} weights, but there are {len(weights)}")
        lowest_terms(weights)

    def _counts(self, number: int, position: int) -> Ints:
        sequence, part = self._sequence(number), self._parts[number]
        return part.before + np.array(sequence.counts(position - part.start), np.int64)

    def _sequence(self, number: int) -> PlannedSequence | RandomSequence:
        """Begin a part, and those before it: its children's outputs count from theirs."""
        for at, part in enumerate(self._parts[: number + 1]):
            if part.sequence is None:
                part.before, part.owed = self._at_end(at - 1, part.start)
                part.sequence = self._begin(part)
        sequence = self._parts[number].sequence
        assert sequence is not None
        return sequence

    def _begin(self, part: _Part) -> PlannedSequence | RandomSequence:
        if self._mode == "exact":
            return PlannedSequence(part.segments, self._seed, part.number, part.owed if any(part.owed) else None)
        ((_, weights),) = part.segments
        return RandomSequence(lowest_terms(weights), salted_seed(self._seed, f"segment {part.number}"))

    def _at_end(self, number: int, end: int) -> tuple[Ints, list[int]]:
        """Outputs of each child, and what it is owed."""
        if number < 0:
            return np.zeros(self._num_children, np.int64), [0] * self._num_children
        part, before = self._parts[number], self._counts(number, end)
        if not isinstance(part.sequence, PlannedSequence):
            return before, []
        given = (before - part.before).tolist()
        shares = part.sequence.shares
        due = [late - early for late, early in zip(shares.in_units(end - part.start), shares.in_units(0))]
        return before, [old + new - count * UNIT for old, new, count in zip(part.owed, due, given)]


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
