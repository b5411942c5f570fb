"""pure. Which child of a blend gives each output, and how many of that child's came before: a function of the position.

Invariants of `ExactSequence`, for weights w that sum to P:
- at every prefix of k outputs, child c gave more than k * w_c / P - 1 and less than k * w_c / P + 1 of them;
- the numbers of a child's outputs are 0, 1, 2, ... without a gap.
What a child is owed from before, where the weights changed, is added to k * w_c / P.

The order is earliest deadline first, which meets every deadline of the chairman assignment problem (Tijdeman, 1980):
item j of child c may stand at floor(j * P / w_c) to ceil((j + 1) * P / w_c) - 1. Neighbours are then exchanged at
random where the bound allows it, as a short pattern would give one rank always the same child.
"""

import heapq
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.random import RandomState

from megatron.blending.streams.order import salted_seed
from megatron.blending.streams.permutation import permute_indices

Ints = npt.NDArray[np.int64]

_TABLE_LENGTH = 4096
_NUM_EXCHANGES = 16
_DRAWN_TOGETHER = 2**16
_KEPT_DRAWS = 64
_KEPT_TABLES = 4
_LEAST_UNIT = 2**20
OWED_UNIT = 2**40
NO_LIMIT = 2**62


class Choices(NamedTuple):
    """For each position asked for: which child, and the number of its output."""

    children: Ints
    numbers: Ints


class ExactSequence:
    """Endless, in constant proportions. Its table grows as far as it is asked for, up to a period of at most 2**20.

    About 2 microseconds for each entry of the table, once; 20 nanoseconds per position.
    """

    def __init__(
        self, weights: Sequence[int], seed: int, owed: Sequence[int] | None = None, limit: int = NO_LIMIT
    ) -> None:
        """`owed`: outputs that each child is behind at the start, in units of 1 / OWED_UNIT; they sum to about 0.

        It then repeats itself after `length` outputs only if they have each child's share: see `is_even`. `limit`: if
        no more outputs than this are of use, no more are made.
        """
        shared = math.gcd(*weights)
        self._weights = [weight // shared for weight in weights]
        self._sum = sum(self._weights)
        # Several periods, unlike each other, and an odd number of them: see above.
        self._num_periods = -(-_TABLE_LENGTH // self._sum) | 1
        self._seed = seed
        self._chunk = min(limit, _TABLE_LENGTH)
        self.length = self._length = self._sum * self._num_periods
        self._per_length: Ints = np.array([weight * self._num_periods for weight in self._weights], np.int64)
        self._children = np.zeros(0, np.int64)
        self._numbers = np.zeros(0, np.int64)
        self._counts = [0] * len(weights)
        self._ready: list[tuple[int, int]] = []
        # What is due is counted in units of 1 / self._unit: an output adds a child's step to it.
        scale = max(1, _LEAST_UNIT // self._sum) if owed else 1
        self._unit = self._sum * scale
        self._steps = [weight * scale for weight in self._weights]
        self._owed = _balanced(owed, self._weights, self._unit) if owed else [0] * len(weights)
        self.is_owed = any(self._owed)
        self._waiting = [(-self._owed[child] // step, child) for child, step in enumerate(self._steps) if step]
        heapq.heapify(self._waiting)

    def choose(self, positions: Ints) -> Choices:
        turns, places = np.divmod(positions, self._length)
        if len(places):
            self._grow(int(places.max()) + 1)
        children = self._children[places]
        numbers: Any = self._numbers[places] + turns * self._per_length[children]
        return Choices(children, numbers)

    def counts(self, position: int) -> list[int]:
        turns, place = divmod(position, self._length)
        if self.is_owed and turns and not place:
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
            self._exchange(children, numbers, start)
            self._children = np.concatenate([self._children, children])
            self._numbers = np.concatenate([self._numbers, numbers])

    def _arranged(self, start: int, end: int) -> tuple[Ints, Ints]:
        if self._num_periods == 1 or self.is_owed:
            return self._earliest_deadline_first(start, end)
        # A whole period, which repeats itself.
        places = np.arange(start, end)
        if not start:
            self._first = self._earliest_deadline_first(0, self._sum)
        children, numbers = (column[places % self._sum] for column in self._first)
        return children, numbers + places // self._sum * np.array(self._weights, np.int64)[children]

    def _earliest_deadline_first(self, start: int, end: int) -> tuple[Ints, Ints]:
        children, numbers = np.zeros(end - start, np.int64), np.zeros(end - start, np.int64)
        waiting, ready, counts = self._waiting, self._ready, self._counts
        unit, steps, owed = self._unit, self._steps, self._owed
        for place in range(start, end):
            # If all are ahead, which only rounding brings about, the one that is so least.
            while waiting and (waiting[0][0] <= place or not ready):
                child = heapq.heappop(waiting)[1]
                deadline = -((owed[child] - (counts[child] + 1) * unit) // steps[child]) - 1
                heapq.heappush(ready, (deadline, child))
            child = heapq.heappop(ready)[1]
            children[place - start] = child
            numbers[place - start] = counts[child]
            counts[child] += 1
            heapq.heappush(waiting, ((counts[child] * unit - owed[child]) // steps[child], child))
        return children, numbers

    def _exchange(self, children: Ints, numbers: Ints, start: int) -> None:
        if len(self._waiting) + len(self._ready) < 2:
            return
        steps, owed, unit = np.array(self._steps, np.int64), np.array(self._owed, np.int64), self._unit
        draws = RandomState(salted_seed(self._seed, f"exchange {start}") & 0xFFFFFFFF)
        for turn in range(_NUM_EXCHANGES):
            left = np.arange(turn % 2, len(children) - 1, 2)
            here, there = children[left], children[left + 1]
            # Only the prefix that ends between the two changes.
            prefix = start + left + 1
            lag = numbers[left] * unit - prefix * steps[here] - owed[here]
            lead = (numbers[left + 1] + 1) * unit - prefix * steps[there] - owed[there]
            may = (here != there) & (abs(lag) < unit) & (abs(lead) < unit)
            left = left[may & (draws.random_sample(len(left)) < 0.5)]
            for array in (children, numbers):
                array[left], array[left + 1] = array[left + 1], array[left]


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


def _balanced(owed: Sequence[int], weights: Sequence[int], unit: int) -> list[int]:
    """What children with weight are owed, in units of 1 / unit, each less than one output, and 0 together.

    What those without are owed waits until they have weight again; meanwhile it is the others' in proportion.
    """
    total, surplus = sum(weights), sum(amount for amount, weight in zip(owed, weights) if weight)
    even = [amount - surplus * weight // total if weight else 0 for amount, weight in zip(owed, weights)]
    most = max(OWED_UNIT, *(abs(amount) + 1 for amount in even))
    found = [amount * unit // most for amount in even]
    found[max(range(len(weights)), key=weights.__getitem__)] -= sum(found)
    return found


SEQUENCES: dict[str, type[ExactSequence] | type[RandomSequence]] = {"exact": ExactSequence, "random": RandomSequence}
