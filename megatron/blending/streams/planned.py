"""pure. The exact sequence of a blend whose weights change as is known from the beginning.

Invariants, for shares W (what the weights sum to, see `Shares`), at every prefix of k outputs:
- child c gave more than W_c(k) - 1 and less than W_c(k) + 1 of them;
- the numbers of a child's outputs are 0, 1, 2, ... without a gap.

Within a segment, windows are as if its weights lasted for ever, but of one output at most of each child: the one whose
window goes on behind the segment's end, so that later weights say its deadline. As such an output takes no part before
it is released, all goes on in constant proportions, repeating itself, up to the first of these releases: a period from
the end, or nearer. Only the rest, which a table holds, looks ahead.

A child of weight 0 gives nothing, though part of its output may be owed to it. For the others this is as if they were
ahead by what all such are behind; below one output it is harmless. So where weights fall to 0, as many of the outputs
that they cut as make up whole ones stand before that, those first of which most is due. In rare cases (of a hundred
random schedules that switch small blends off and on every few outputs: fewer than one) that would break the bound:
then such a child gives the output that was begun, and no more, while its weight is 0.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.random import RandomState

from megatron.blending.streams.blend import Choices, ExactSequence
from megatron.blending.streams.deadlines import (
    NEVER,
    EarliestDeadlineFirst,
    Ints,
    Windows,
    exchange_neighbours,
)
from megatron.blending.streams.order import salted_seed
from megatron.blending.streams.shares import UNIT, Segment, Shares, lowest_terms
from megatron.blending.streams.weights import Weight

_MOST_HALVINGS = 6

_SHORT = 4096
"""A segment of so few outputs is one table."""


class _Table(NamedTuple):
    """A sequence as long as its columns."""

    children: Ints
    numbers: Ints

    def choose(self, positions: Ints) -> Choices:
        return Choices(self.children[positions], self.numbers[positions])


class _Stretch(NamedTuple):
    """Part of a segment, or all of it: what repeats itself, or what has a table."""

    start: int
    end: int
    segment: int
    sequence: ExactSequence | _Table
    before: Ints
    """Each child's outputs before the start."""

    def counts(self, position: int) -> Ints:
        place = position - self.start
        if isinstance(self.sequence, ExactSequence):
            return self.before + np.array(self.sequence.counts(place), np.int64)
        return self.before + np.bincount(self.sequence.children[:place], minlength=len(self.before))


class PlannedSequence:
    """Endless. Stretches are made when they are asked for, from the first one on.

    About 2 microseconds for each table entry and 0.5 milliseconds for each segment, once; tables are as long as a
    period at most, for what repeats itself, and again for what looks ahead: some milliseconds, but 4 seconds for
    weights whose common denominator is 2**20. 20 nanoseconds per position.
    """

    def __init__(
        self,
        segments: Sequence[tuple[int, Sequence[Weight]]],
        seed: int,
        first_number: int = 0,
        owed: Sequence[int] | None = None,
    ) -> None:
        """`segments`: (first output, weights), the first at 0. `first_number`: of the first one, for what is random.

        `owed`: outputs that each child is behind at the start, in units of 1 / UNIT; they sum to about 0. So much of it
        is made up for as no output would come too late for: all, or a half, a quarter, ... of what each child is owed.
        """
        self.shares = _shares_with(segments, owed) if owed else Shares(segments)
        self._seed = seed
        self._first_number = first_number
        self._stretches: list[_Stretch] = []
        self._starts: Ints = np.zeros(0, np.int64)

    def choose(self, positions: Ints) -> Choices:
        self._go_to(int(positions.max()) if len(positions) else 0)
        if len(self._stretches) == 1:
            return self._stretches[0].sequence.choose(positions)
        stretches = np.searchsorted(self._starts, positions, side="right") - 1
        children, numbers = np.zeros_like(positions), np.zeros_like(positions)
        for number in np.unique(stretches).tolist():
            stretch, here = self._stretches[number], np.flatnonzero(stretches == number)
            found = stretch.sequence.choose(positions[here] - stretch.start)
            children[here] = found.children
            numbers[here] = found.numbers + stretch.before[found.children]
        return Choices(children, numbers)

    def counts(self, position: int) -> list[int]:
        self._go_to(position)
        number = int(np.searchsorted(self._starts, position, side="right")) - 1
        return self._stretches[number].counts(position).tolist()

    def _go_to(self, position: int) -> None:
        if self._stretches and position < self._stretches[-1].end:
            return
        while not self._stretches or self._stretches[-1].end <= position:
            self._go_on()
        self._starts = np.array([stretch.start for stretch in self._stretches], np.int64)

    def _go_on(self) -> None:
        start, before = 0, np.zeros(len(self.shares.segments[0].weights), np.int64)
        if self._stretches:
            stretch = self._stretches[-1]
            start, before = stretch.end, stretch.counts(stretch.end)
            constant_end = self._constant_end(stretch.segment)
            if start < constant_end and isinstance(stretch.sequence, ExactSequence) and stretch.sequence.is_even():
                self._stretches[-1] = stretch._replace(end=constant_end)
                return
        number = self.shares.segment_at(start)
        constant_end = self._constant_end(number)
        if start < constant_end:
            end, sequence = self._constant(number, start, constant_end, before)
            self._stretches.append(_Stretch(start, end, number, sequence, before))
        else:
            table = self._looking_ahead(number, start, before)
            self._stretches.append(_Stretch(start, self.shares.segments[number].end, number, table, before))

    def _constant_end(self, number: int) -> int:
        """Where the first output is released whose window goes on behind a segment's end, or nearer to its start."""
        segment = self.shares.segments[number]
        if segment.end == NEVER:
            return NEVER
        if segment.end - segment.start <= _SHORT:
            return segment.start
        following = self.shares.segments[number + 1]
        cut = [
            self.shares.release(number, child, following.whole[child])
            for child in np.flatnonzero(segment.weights).tolist()
            if self.shares.is_between(number + 1, child)
        ]
        return max(segment.start, min(cut, default=segment.end))

    def _constant(self, number: int, start: int, end: int, before: Ints) -> tuple[int, ExactSequence]:
        segment = self.shares.segments[number]
        behind = self.shares.behind(number, start, before.tolist())
        seed = self._seed_at(segment, number, start)
        if not any(behind.high) and not any(behind.low):
            return end, ExactSequence(segment.weights, seed, limit=end - start)
        spare = sorted(self._begun(number, before), key=lambda child: self.shares.deadline(child, int(before[child])))
        sequence = ExactSequence(segment.weights, seed, behind, end - start, spare)
        return min(end, start + sequence.length), sequence

    def _looking_ahead(self, number: int, start: int, before: Ints) -> _Table:
        segment, counts = self.shares.segments[number], before.tolist()
        begun = self._begun(number, before)
        early = self._due_before_pause(number, counts)
        windows = self._windows(number, start, counts, early)
        length = segment.end - start
        order = EarliestDeadlineFirst(windows, spare=sorted(begun, key=windows.last_deadlines.__getitem__))
        children, numbers = order.take(0, length)
        if begun or early:
            after = (before + np.bincount(children, minlength=len(counts))).tolist()
            if order.is_late or not self.shares.can_go_on(number + 1, after):
                windows = self._windows(number, start, counts, [])
                children, numbers = EarliestDeadlineFirst(windows, begun=begun).take(0, length)
        draws = RandomState(salted_seed(self._seed_at(segment, number, start), "exchange 0") & 0xFFFFFFFF)
        return _Table(*exchange_neighbours(children, numbers, 0, windows, draws))

    def _windows(self, number: int, start: int, counts: Sequence[int], early: Sequence[int]) -> Windows:
        """Windows from `start` to a segment's end, by which children `early` must give the output that it cuts."""
        segment, following = self.shares.segments[number], self.shares.segments[number + 1]
        length = segment.end - start
        last_deadlines = [self.shares.deadline(child, whole) - start for child, whole in enumerate(following.whole)]
        for child in early:
            last_deadlines[child] = length - 1
        return Windows(segment.weights, self.shares.behind(number, start, counts), length, last_deadlines)

    def _begun(self, number: int, before: Ints) -> list[int]:
        """Children of weight 0 with an output that is released and not there."""
        segment = self.shares.segments[number]
        return [
            child
            for child, weight in enumerate(segment.weights)
            if not weight and self.shares.is_between(number, child) and before[child] == segment.whole[child]
        ]

    def _due_before_pause(self, number: int, counts: Sequence[int]) -> list[int]:
        """Children whose weight is 0 after a segment and that give before its end what this cuts."""
        segment, following = self.shares.segments[number], self.shares.segments[number + 1]
        without = [child for child, weight in enumerate(following.weights) if not weight]
        cut = [child for child in without if segment.weights[child] and self.shares.is_between(number + 1, child)]
        cut.sort(key=lambda child: following.whole[child] * UNIT - following.units[child])
        given = [following.whole[child] if segment.weights[child] else counts[child] for child in without]
        behind = sum(following.units[child] for child in without) - sum(given) * UNIT
        # Units were rounded down.
        return cut[: max(0, (behind + len(without)) // UNIT)]

    def _seed_at(self, segment: Segment, number: int, start: int) -> int:
        salt = f"segment {self._first_number + number}"
        return salted_seed(self._seed, salt if start == segment.start else f"{salt} from {start - segment.start}")


def _shares_with(segments: Sequence[tuple[int, Sequence[Weight]]], owed: Sequence[int]) -> Shares:
    """Shares that begin with what is owed, or with the largest part of it that can still be had in time."""
    weights = lowest_terms(segments[0][1])
    for halvings in range(_MOST_HALVINGS):
        shares = Shares(segments, _balanced([amount >> halvings for amount in owed], weights))
        if shares.can_go_on(0, [0] * len(weights)):
            return shares
    return Shares(segments)


def _balanced(owed: Sequence[int], weights: Sequence[int]) -> list[int]:
    """What children with weight are owed, each less than one output, and 0 together; all in units of 1 / UNIT.

    What those without are owed waits until they have weight again; meanwhile it is the others' in proportion.
    """
    total, surplus = sum(weights), sum(amount for amount, weight in zip(owed, weights) if weight)
    even = [amount - surplus * weight // total if weight else 0 for amount, weight in zip(owed, weights)]
    most = max(UNIT, *(abs(amount) + 1 for amount in even))
    found = [amount * UNIT // most for amount in even]
    found[max(range(len(weights)), key=weights.__getitem__)] -= sum(found)
    return found
