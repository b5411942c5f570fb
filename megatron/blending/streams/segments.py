"""pure. Sequences of a blend whose proportions change: when they are told to, or when children run out."""

import math
from collections.abc import Sequence

import numpy as np

from megatron.blending.streams.blend import SEQUENCES, Choices, ExactSequence, Ints, RandomSequence
from megatron.blending.streams.order import salted_seed
from megatron.blending.streams.weights import Weight, exact_weights, floored_weights, integer_weights


class Segments:
    """Sequences one after the other, each from its start on; the last one has no end.

    A segment starts where it was asked to, or up to a period of the one before it later: where that one's counts are
    in proportion, so that the bound on each prefix holds across.
    """

    def __init__(self, segments: Sequence[tuple[int, Sequence[Weight]]], seed: int, mode: str = "exact") -> None:
        self._num_children = len(segments[0][1])
        self._seed = seed
        self._mode = mode
        self._starts: list[int] = []
        self._sequences: list[ExactSequence | RandomSequence] = []
        self._before: list[Ints] = []
        for start, weights in segments:
            self.append(start, weights)

    def append(self, start: int, weights: Sequence[Weight]) -> int:
        """Change to `weights` at output `start`, or up to a period later; return where."""
        if len(weights) != self._num_children:
            raise ValueError(f"there must be {self._num_children} weights, but there are {len(weights)}")
        before = np.zeros(self._num_children, np.int64)
        if self._sequences:
            period = self._sequences[-1].period
            length = max(-(-(start - self._starts[-1]) // period), 0) * period
            start = self._starts[-1] + length
            before = self._before[-1] + np.array(self._sequences[-1].counts(length), np.int64)
        seed = salted_seed(self._seed, f"segment {len(self._sequences)}")
        self._starts.append(start)
        self._sequences.append(SEQUENCES[self._mode](integer_weights(weights), seed))
        self._before.append(before)
        return start

    def choose(self, positions: Ints) -> Choices:
        if len(self._sequences) == 1:
            return self._sequences[0].choose(positions)
        segments = np.searchsorted(self._starts, positions, side="right") - 1
        children, numbers = np.zeros_like(positions), np.zeros_like(positions)
        for segment in np.unique(segments).tolist():
            here = np.flatnonzero(segments == segment)
            found = self._sequences[segment].choose(positions[here] - self._starts[segment])
            children[here] = found.children
            numbers[here] = found.numbers + self._before[segment][found.children]
        return Choices(children, numbers)

    def counts(self, position: int) -> list[int]:
        segment = int(np.searchsorted(self._starts, position, side="right")) - 1
        within = self._sequences[segment].counts(position - self._starts[segment])
        return (self._before[segment] + np.array(within, np.int64)).tolist()


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
