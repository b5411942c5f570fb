"""pure. Proportions say which child of a blend gives each output, and how many of that child's came
before.

A child's share W(k) is what its weights, of 1 together, sum to over the first k outputs.
Invariants, at every k:
- a child gave floor(W(k)) or ceil(W(k)) outputs, for weights that are constant or planned, and for
  finite children;
- the numbers of its outputs are 0, 1, 2, ...

The order repeats itself when every child gave its share of a period. So what is walked through once
is the first period, of at most a million outputs, and what stands near a change of weights: 50 to
150 nanoseconds for each output in C++ (see shares.py), of which only each child's count at every
4096th is kept. Where a position is asked for, the 4096 outputs around it are made: 2 ms.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import lru_cache, partial
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.random import RandomState

from megatron.blending.order.finite import Segments, until_exhausted
from megatron.blending.order.permutation import permute_indices
from megatron.blending.order.reading import salted_seed
from megatron.blending.order.shares import NEVER, Shares

__all__ = ["BlendMode", "Choices", "Ints", "Proportions", "Segments", "until_exhausted"]

Ints = npt.NDArray[np.int64]
BlendMode = Literal["exact", "random"]

_MAX_AT_ONCE = 4096
_NUM_EXCHANGES = 16
_MIN_PERIOD = 2048  # a shorter pattern could give one rank always the same child
_DRAWN_TOGETHER = 2**16


class Choices(NamedTuple):
    """Choices tell the child of each position, and the number of its output."""

    children: Ints
    numbers: Ints


class _Table(NamedTuple):
    """A stretch that is made as a table when it is asked for."""

    start: int
    end: int
    before: Ints
    """Each child's outputs before the start."""
    table: partial[Choices]
    """Numbers count from the start."""

    def choose(self, positions: Ints) -> Choices:
        children, numbers = (column[positions - self.start] for column in self.table())
        return Choices(children, numbers + self.before[children])

    def counts(self, position: int) -> Ints:
        children = self.table().children[: position - self.start]
        return self.before + np.bincount(children, minlength=len(self.before))


class _Repeated(NamedTuple):
    """A stretch that repeats others, which follow one another from `parts[0].start` on."""

    start: int
    end: int
    before: Ints
    parts: Sequence[_Table]
    per_turn: Ints
    """Each child's outputs in the parts together."""

    def choose(self, positions: Ints) -> Choices:
        # Parts at 0 to 9 that repeat from 100 on: position 123 is place 3 of turn 2.
        turns, places = np.divmod(positions - self.start, int(self.per_turn.sum()))
        children, numbers = _choose(self.parts, places + self.parts[0].start)
        moved = (self.before - self.parts[0].before)[children]
        return Choices(children, numbers + moved + turns * self.per_turn[children])

    def counts(self, position: int) -> Ints:
        turns, place = divmod(position - self.start, int(self.per_turn.sum()))
        place += self.parts[0].start
        part = self.parts[bisect_right(self.parts, place, key=lambda part: part.start) - 1]
        return part.counts(place) + self.before - self.parts[0].before + turns * self.per_turn


_Stretch = _Table | _Repeated
"""Consecutive outputs."""


def _choose(stretches: Sequence[_Table | _Repeated], positions: Ints) -> Choices:
    """Returns what stands at positions that the stretches have."""
    starts = np.array([stretch.start for stretch in stretches])
    at = np.searchsorted(starts, positions, side="right") - 1
    children, numbers = np.empty_like(positions), np.empty_like(positions)
    for number in np.unique(at).tolist():
        here = np.flatnonzero(at == number)
        children[here], numbers[here] = stretches[number].choose(positions[here])
    return Choices(children, numbers)


def _exact_stretches(shares: Shares, start: int, before: Ints, seed: int) -> Iterator[_Stretch]:
    """Yields what comes from `start` on, where the shares begin."""
    place, counts = 0, np.zeros_like(before)
    for number, weights in enumerate(shares.weights):
        end = [*shares.starts[1:], NEVER][number]
        # Several periods, which the exchanges make unlike each other, and an odd number of them:
        # weights 3 2 -> 411 periods of 5 outputs.
        period = np.array(weights, np.int64) * (-(-_MIN_PERIOD // sum(weights)) | 1)
        mark, at_mark = place, counts
        parts: list[_Table] = []
        while place < end:
            if place == mark + period.sum():
                limit = shares.first_cut(number)
                if limit > place and (counts - at_mark == period).all():
                    first, last = start + place, start + limit
                    yield (repeated := _Repeated(first, last, before + counts, parts, period))
                    # The rest of the segment depends on the next one.
                    place, mark = limit, NEVER
                    counts = counts if limit == NEVER else repeated.counts(last) - before
                    continue
                mark, at_mark, parts = place, counts, []
            upto = int(min(place + _MAX_AT_ONCE, end, mark + period.sum()))
            table = partial(_exchanged, shares, place, upto, tuple(counts.tolist()), seed, start)
            parts.append(_Table(start + place, start + upto, before + counts, table))
            yield parts[-1]
            place, counts = upto, shares.advanced(place, upto, counts)


@lru_cache(maxsize=64)
def _exchanged(
    shares: Shares, start: int, end: int, counts: tuple[int, ...], seed: int, base: int
) -> Choices:
    """Returns some outputs, neighbours exchanged at random where their intervals allow it."""
    before = np.array(counts, np.int64)
    children, numbers, releases, deadlines = shares.order(start, end, before)
    draws = RandomState(salted_seed(seed, f"exchange {base + start}") & 0xFFFFFFFF)
    order = np.arange(len(children))
    for turn in range(_NUM_EXCHANGES if (children != children[0]).any() else 0):
        # Even turns compare the pairs (0 1) (2 3) ..., odd turns the pairs (1 2) (3 4) ...
        places = np.arange(turn % 2, len(children) - 1, 2)
        here, there = order[places], order[places + 1]
        # An exchange moves `here` one position later and `there` one earlier. Both must stay within
        # their intervals, which keeps every prefix within one output of the shares.
        may = (deadlines[here] > start + places) & (releases[there] <= start + places)
        chosen = (
            may & (children[here] != children[there]) & (draws.random_sample(len(places)) < 0.5)
        )
        order[places[chosen]], order[places[chosen] + 1] = there[chosen], here[chosen]
    return Choices(children[order], (numbers - before[children])[order])


def _random_stretches(shares: Shares, start: int, before: Ints, seed: int) -> Iterator[_Stretch]:
    """Yields outputs drawn independently: the counts of 2**16 together (multinomial), then put in a
    random order.
    """
    for weights, end in zip(
        shares.weights, [*(start + first for first in shares.starts[1:]), NEVER]
    ):
        while start < end:
            # RandomState, unlike numpy's newer generators, is promised never to change.
            state = RandomState(salted_seed(seed, f"draw from {start}") & 0xFFFFFFFF)
            drawn = state.multinomial(_DRAWN_TOGETHER, np.array(weights) / sum(weights))
            table = partial(_drawn_table, tuple(drawn.tolist()), seed, start)
            yield (stretch := _Table(start, min(start + _DRAWN_TOGETHER, end), before, table))
            is_whole = end - start >= _DRAWN_TOGETHER  # else it ends with its segment
            before = before + drawn if is_whole else stretch.counts(end)
            start = stretch.end


@lru_cache(maxsize=8)
def _drawn_table(drawn: tuple[int, ...], seed: int, at: int) -> Choices:
    ranks = permute_indices(np.arange(_DRAWN_TOGETHER), _DRAWN_TOGETHER, seed, at)
    children = np.repeat(np.arange(len(drawn)), drawn)[ranks]
    # Children 1 0 1: the stable sort lists the places 1 (child 0), 0 and 2 (child 1), which get the
    # numbers 0, 0 and 1.
    numbers = np.empty_like(children)
    numbers[np.argsort(children, kind="stable")] = np.concatenate(list(map(np.arange, drawn)))
    return Choices(children, numbers)


class Proportions:
    """Choices of a blend. Stretches are made when asked for, in order; then a
    position takes 20 ns.
    """

    def __init__(self, segments: Segments, seed: int, mode: BlendMode = "exact") -> None:
        self._make = partial(
            {"exact": _exact_stretches, "random": _random_stretches}[mode], seed=seed
        )
        none = [Fraction(0)] * len(segments[0][1])
        if any(len(weights) != len(none) for _, weights in segments):
            raise ValueError(
                f"there must be {len(none)} weights, but they are {list(segments[-1][1])}"
            )
        self._stretches: list[_Stretch] = []
        self._starts: list[int] = []
        self._more = self._make(Shares(segments, none), 0, np.zeros(len(none), np.int64))

    def choose(self, positions: Ints) -> Choices:
        """Returns what stands at each of many positions."""
        self._reach(int(positions.max(initial=0)))
        return _choose(self._stretches, positions)

    def counts(self, position: int) -> list[int]:
        """Returns how many of the first outputs are each child's."""
        self._reach(position)
        return self._stretches[bisect_right(self._starts, position) - 1].counts(position).tolist()

    def _reach(self, position: int) -> None:
        while not self._stretches or self._stretches[-1].end <= position:
            self._stretches.append(next(self._more))
            self._starts.append(self._stretches[-1].start)
