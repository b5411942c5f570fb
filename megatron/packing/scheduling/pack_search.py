"""pure. Bin completion: a packing into so many packs, a proof that there is none, or neither within its budget.

The longest sequence left opens a pack, and each set of others that may share it is tried, as long as all packs together
leave no more room empty than there is to spare (Korf, "A new algorithm for optimal bin packing", AAAI 2002). A set is
not tried where another one is as good: one with a sequence more, with a longer one instead of one of its own, or with
one instead of two (dominance of Martello and Toth, "Lower bounds and reduction procedures for the bin packing problem",
1990). Sets of few sequences come first, of those the fullest: short ones fill gaps later.

Where sequences have values (see `pack_values`), these are a second thing of which all packs together have only so much
to spare, which is mostly less: a set that wastes more is not tried, and sets that waste least come first. That a set is
not tried where another is as good stays right: where a packing with the one exists, there is a packing with the other,
and every packing is within what there is to spare.

The search exists twice, in C++ (see `native`) and in Python (below), and gives the same result in both forms and on
every machine: its budget counts steps, not time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate, combinations
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.packing.scheduling import native
from megatron.packing.scheduling.native import address as _at
from megatron.packing.scheduling.pack_values import Values

IntArray = npt.NDArray[np.int64]

_MOST_SETS = 50
"""Looked for, for one pack; where there are more, a search that finds nothing proves nothing."""


class Answer(NamedTuple):
    """What a search found."""

    pack: IntArray | None
    """Pack of each sequence, int64 [N]; None where no packing was found."""
    is_proof: bool
    """None was found, for there is none."""

    @property
    def is_open(self) -> bool:
        return self.pack is None and not self.is_proof


def search_packing(
    length: IntArray,
    *,
    capacity: int,
    num_packs: int,
    swerves: int,
    steps_per_pack: int,
    budget: int,
    values: Values | None = None,
    room_counts: bool = False,
) -> Answer:
    """Whether sequences of `length` (int64 [N], descending, each in 1..capacity) fit into `num_packs` packs.

    On each way down it leaves the first set of packs for later ones at most `swerves` times: an n-th later set counts
    n times (limited discrepancy search: Harvey and Ginsberg, IJCAI 1995). A step of the `budget` is one look at a
    sequence; sets for one pack are looked for in `steps_per_pack`, and in more while there is none. By default all
    `values` are 0. Sets come first that waste least of them; where `room_counts`, least of values and of room, each
    beside what there is to spare.
    """
    if num_packs * capacity < int(length.sum()):
        return Answer(None, True)
    values = values or Values(np.zeros_like(length), 0)
    if native.LIBRARY is None:
        search = _Search(length.tolist(), capacity, values, room_counts, steps_per_pack, budget)
        return search.run(num_packs, swerves)
    pack = np.empty(length.size, np.int64)
    options = (room_counts, swerves, _MOST_SETS, steps_per_pack, budget)
    found = native.LIBRARY.search_packing(
        length.size, _at(length), capacity, _at(values.value), values.most, num_packs, *options, _at(pack)
    )
    return Answer(pack if found == 1 else None, found == 0)


class _Set(NamedTuple):
    """Sequences that may share a pack with the longest one left: their places among those left."""

    places: tuple[int, ...]
    room_left: int
    value_left: int


class _Begun(NamedTuple):
    """A pack that sets are being tried for."""

    rest: list[int]
    """Sequences left, descending; the first one opened the pack."""
    sets: Iterator[tuple[int, _Set]]
    spare: int
    """Tokens that this pack and all later ones may leave empty together."""
    spare_value: int
    swerves: int


class _Search:
    """In Python, with the same steps as in C++."""

    def __init__(
        self, length: list[int], capacity: int, values: Values, room_counts: bool, steps_per_pack: int, budget: int
    ) -> None:
        self._length, self._capacity, self._budget = length, capacity, budget
        self._value, self._most_value = values.value.tolist(), values.most
        self._steps_per_pack, self._room_counts = steps_per_pack, room_counts
        self._misses_none = True

    def run(self, num_packs: int, swerves: int) -> Answer:
        size = len(self._length)
        begun: list[_Begun] = []
        taken: list[list[int]] = []
        rest, spare = list(range(size)), num_packs * self._capacity - sum(self._length)
        spare_value = num_packs * self._most_value - sum(self._value)
        while rest:
            sets = iter(enumerate(self._sets(rest, spare, spare_value)))
            begun.append(_Begun(rest, sets, spare, spare_value, swerves))
            if self._budget < 0:
                return Answer(None, False)
            while (later := next(begun[-1].sets, None)) is None or later[0] > begun[-1].swerves:
                self._misses_none &= later is None
                begun.pop()
                if not begun:
                    return Answer(None, self._misses_none)
            number, (places, room_left, value_left) = later
            del taken[len(begun) - 1 :]
            taken.append([begun[-1].rest[place] for place in (0, *places)])
            spare, swerves = begun[-1].spare - room_left, begun[-1].swerves - number
            spare_value = begun[-1].spare_value - value_left
            gone = set(taken[-1])
            rest = [sequence for sequence in begun[-1].rest if sequence not in gone]
        pack = np.empty(size, np.int64)
        for number, sequences in enumerate(taken):
            pack[sequences] = number
        return Answer(pack, False)

    def _sets(self, rest: list[int], spare: int, spare_value: int) -> list[_Set]:
        """That may share a pack with the first of `rest`, with at most `spare` tokens left empty, and `spare_value`."""
        length = [self._length[sequence] for sequence in rest]
        negative = [-tokens for tokens in length]
        left_from = [*accumulate(reversed(length), initial=0)][::-1]
        self._budget -= len(rest)
        enough = self._budget - self._steps_per_pack
        found: list[_Set] = []
        places: list[int] = []
        room, place = self._capacity - length[0], 1
        value_left = self._most_value - self._value[rest[0]]
        while self._budget >= 0:
            self._budget -= 1
            place = bisect_right(negative, -room - 1, place)  # the first one that fits
            if place < len(rest) and room - left_from[place] <= spare:
                places.append(place)
                room -= length[place]
                value_left -= self._value[rest[place]]
                place += 1
                continue
            is_within = room <= spare and value_left <= spare_value
            if is_within and not self._is_dominated(length, negative, places, room):
                found.append(_Set(tuple(places), room, value_left))
            if not places:
                break
            if len(found) == _MOST_SETS or (found and self._budget < enough):
                self._misses_none = False
                break
            last = places.pop()
            room += length[last]
            value_left += self._value[rest[last]]
            place = bisect_right(negative, negative[last], last)  # the next shorter one
        of_room = spare_value if self._room_counts else 0
        of_value = 2 * spare if self._room_counts else 1

        def waste(entry: _Set) -> tuple[int, int, int]:
            wasted = of_value * entry.value_left + of_room * entry.room_left
            return wasted, len(entry.places), entry.room_left

        return sorted(found, key=waste)

    def _is_dominated(self, length: list[int], negative: list[int], places: list[int], room_left: int) -> bool:
        """Whether one more sequence fits in, a longer one instead of one of these, or one instead of two."""
        self._budget -= len(places) * len(places)
        used, size = {0, *places}, len(length)
        unused = next(place for place in range(size - 1, -1, -1) if place not in used or place == 0)
        if unused > 0 and length[unused] <= room_left:
            return True
        for place in places:
            longer = place - 1
            while longer > 0 and (longer in used or length[longer] == length[place]):
                longer -= 1
            if longer > 0 and length[longer] - length[place] <= room_left:
                return True
        for first, second in combinations(places, 2):
            both = length[first] + length[second]
            one = bisect_right(negative, -both - room_left - 1, 1)
            while one < size and one in used:
                one += 1
            if one < size and length[one] >= both:
                return True
        return False
