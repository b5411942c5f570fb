"""pure. Which child of a blend gives each output, and how many of that child's came before: a function of the position.

Invariants of `ExactSequence`, for weights w that sum to P:
- at every prefix of k outputs, child c gave more than k * w_c / P - 1 and less than k * w_c / P + 1 of them;
- the numbers of a child's outputs are 0, 1, 2, ... without a gap.
What a child is behind at the start, where the weights changed, is added to k * w_c / P.

The order is earliest deadline first. Neighbours are then exchanged at random where the bound allows it.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.random import RandomState

from megatron.blending.streams.deadlines import (
    NEVER,
    Behind,
    EarliestDeadlineFirst,
    Ints,
    Windows,
    exchange_neighbours,
)
from megatron.blending.streams.order import salted_seed
from megatron.blending.streams.permutation import permute_indices

_TABLE_LENGTH = 4096
_DRAWN_TOGETHER = 2**16
_KEPT_DRAWS = 64
_KEPT_TABLES = 4


class Choices(NamedTuple):
    """For each position asked for: which child, and the number of its output."""

    children: Ints
    numbers: Ints


class ExactSequence:
    """Endless, in constant proportions. Its table grows as far as it is asked for, up to a period of at most 2**20.

    About 2 microseconds for each entry of the table, once; 20 nanoseconds per position.
    """

    def __init__(
        self,
        weights: Sequence[int],
        seed: int,
        behind: Behind | None = None,
        limit: int = NEVER,
        spare: Sequence[int] = (),
    ) -> None:
        """`behind`: of each child at the start; below an output, and 0 together. None for 0 of each.

        It then repeats itself after `length` outputs only if they have each child's share: see `is_even`. `limit`: if
        no more outputs than this are of use, no more are made. `spare`: children of weight 0 with an output, which
        stands where no other child's is released.
        """
        shared = math.gcd(*weights)
        self._weights = [weight // shared for weight in weights]
        self._sum = sum(self._weights)
        # Several periods, unlike each other, and an odd number of them.
        self._num_periods = -(-_TABLE_LENGTH // self._sum) | 1
        self._seed = seed
        self._chunk = min(limit, _TABLE_LENGTH)
        self.length = self._length = self._sum * self._num_periods
        self._per_length: Ints = np.array([weight * self._num_periods for weight in self._weights], np.int64)
        self._children = np.zeros(0, np.int64)
        self._numbers = np.zeros(0, np.int64)
        self.is_behind = behind is not None
        none = [0] * len(weights)
        self._windows = Windows(self._weights, behind or Behind(none, none))
        self._order = EarliestDeadlineFirst(self._windows, spare=spare)

    def choose(self, positions: Ints) -> Choices:
        turns, places = np.divmod(positions, self._length)
        if len(places):
            self._grow(int(places.max()) + 1)
        children = self._children[places]
        numbers: Any = self._numbers[places] + turns * self._per_length[children]
        return Choices(children, numbers)

    def counts(self, position: int) -> list[int]:
        turns, place = divmod(position, self._length)
        if self.is_behind and turns and not place:
            # The first turn may not be even.
            turns, place = turns - 1, self._length
        self._grow(place)
        found = np.bincount(self._children[:place], minlength=len(self._weights)) + turns * self._per_length
        return found.tolist()

    def is_even(self) -> bool:
        """Whether the first `length` outputs have each child's share. Needs the whole table."""
        self._grow(self._length)
        return bool((np.bincount(self._children, minlength=len(self._weights)) == self._per_length).all())

    def position_of(self, child: int, number: int) -> int:
        """Return where output `number` of a child stands. Needs the whole table."""
        turns, rest = divmod(number, int(self._per_length[child]))
        self._grow(self._length)
        at = np.flatnonzero((self._children == child) & (self._numbers == rest))
        return turns * self._length + int(at[0])

    def _grow(self, length: int) -> None:
        while len(self._children) < min(length, self._length):
            start = len(self._children)
            end = min(start + self._chunk, self._length)
            children, numbers = self._arranged(start, end)
            draws = RandomState(salted_seed(self._seed, f"exchange {start}") & 0xFFFFFFFF)
            children, numbers = exchange_neighbours(children, numbers, start, self._windows, draws)
            self._children = np.concatenate([self._children, children])
            self._numbers = np.concatenate([self._numbers, numbers])

    def _arranged(self, start: int, end: int) -> tuple[Ints, Ints]:
        if self._num_periods == 1 or self.is_behind:
            return self._order.take(start, end)
        # A whole period, which repeats itself.
        places = np.arange(start, end)
        if not start:
            self._first = self._order.take(0, self._sum)
        children, numbers = (column[places % self._sum] for column in self._first)
        return children, numbers + places // self._sum * np.array(self._weights, np.int64)[children]


class RandomSequence:
    """Endless; each output is drawn from the weights, independently: as energon does it.

    Counts of 2**16 outputs are drawn together (multinomial), and spread over them by a permutation. The numbers of a
    child are in the order of its outputs, so that a change of weights may come after any of them: to know one, the
    outputs before it in the 2**16 are put in order, which takes milliseconds, once.
    """

    def __init__(self, weights: Sequence[int], seed: int) -> None:
        self._shares = np.array(weights, np.float64) / sum(weights)
        self._seed = seed
        self._before: dict[int, Ints] = {0: np.zeros(len(weights), np.int64)}
        self._tables: dict[int, Choices] = {}
        """Of draws, the first outputs; numbers count from the start of the draw."""

    def choose(self, positions: Ints) -> Choices:
        draws, places = np.divmod(positions, _DRAWN_TOGETHER)
        children, numbers = np.zeros_like(positions), np.zeros_like(positions)
        for draw in np.unique(draws).tolist():
            here = np.flatnonzero(draws == draw)
            table = self._table(draw, int(places[here].max()) + 1)
            children[here] = found = table.children[places[here]]
            numbers[here] = self._counts_before(draw)[found] + table.numbers[places[here]]
        return Choices(children, numbers)

    def counts(self, position: int) -> list[int]:
        draw, place = divmod(position, _DRAWN_TOGETHER)
        chosen = self._table(draw, place).children[:place]
        return (self._counts_before(draw) + np.bincount(chosen, minlength=len(self._shares))).tolist()

    def _table(self, draw: int, length: int) -> Choices:
        known = self._tables.pop(draw, None)
        if known is None or len(known.children) < length:
            # In powers of two, so that asking for one after the other costs twice as much as for all.
            places = np.arange(min(_DRAWN_TOGETHER, max(_TABLE_LENGTH, 1 << (length - 1).bit_length())))
            ranks = permute_indices(places, _DRAWN_TOGETHER, self._seed, draw)
            children = np.searchsorted(np.cumsum(self._drawn(draw)), ranks, side="right")
            order = np.argsort(children, kind="stable")
            counts = np.bincount(children, minlength=len(self._shares))
            numbers = np.empty_like(places)
            numbers[order] = places - np.repeat(np.cumsum(counts) - counts, counts)
            known = Choices(children, numbers)
        # The one that was used last stands last.
        self._tables[draw] = known
        if len(self._tables) > _KEPT_TABLES:
            del self._tables[next(iter(self._tables))]
        return known

    def _drawn(self, draw: int) -> Ints:
        # RandomState, unlike numpy's newer generators, is promised never to change.
        state = RandomState(salted_seed(self._seed, f"draw {draw}") & 0xFFFFFFFF)
        return state.multinomial(_DRAWN_TOGETHER, self._shares).astype(np.int64)

    def _counts_before(self, draw: int) -> Ints:
        known = max(number for number in self._before if number <= draw)
        while known < draw:
            self._before[known + 1] = self._before[known] + self._drawn(known)
            known += 1
            if len(self._before) > _KEPT_DRAWS:
                # Kept for going back: every 256th, and what is near.
                old = next((number for number in self._before if number % 256 and number < known - 8), None)
                if old is not None:
                    del self._before[old]
        return self._before[draw]


SEQUENCES: dict[str, type[ExactSequence] | type[RandomSequence]] = {"exact": ExactSequence, "random": RandomSequence}
