"""pure. What is decided of packs before any search: some that are beyond doubt, and tokens that all packings waste."""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

_MOST_GAPS = 64
"""Tokens that a pack of two leaves empty, for each of which it is counted how many pairs leave no more."""


class Reduced(NamedTuple):
    """Packs of the longest sequences: if all fit into so many packs, they do with these."""

    pack: IntArray
    """Of each sequence, int64 [N]; -1 of those left."""
    num_packs: int


def reduce(length: IntArray, *, capacity: int) -> Reduced:
    """As many packs as dominance gives. Lengths are int64 [N], descending, each in 1..capacity.

    The longest sequence shares its pack with the longest other one that fits, b, where no set that fits is longer than
    b: any packing may have b changed for its set (Martello and Toth, "Lower bounds and reduction procedures for the bin
    packing problem", 1990). Then the next longest is the longest, up to the first of which that is not known. Up to 2
    milliseconds for 1,024 sequences.
    """
    pack, num_packs = np.full(length.size, -1), 0
    left, ascending = list(range(length.size))[::-1], length[::-1].tolist()
    while left:
        room = capacity - ascending.pop()
        fitting = bisect_right(ascending, room)
        if _is_set_longer(ascending, fitting, room):
            break
        pack[left.pop()] = num_packs
        if fitting:
            del ascending[fitting - 1]
            pack[left.pop(fitting - 1)] = num_packs
        num_packs += 1
    return Reduced(pack, num_packs)


def _is_set_longer(ascending: list[int], fitting: int, room: int) -> bool:
    """Whether several sequences may fit into the room that are longer in all than the longest of the `fitting` ones."""
    if fitting < 2 or ascending[fitting - 1] == room or ascending[0] + ascending[1] > room:
        return False
    if fitting > 2 and sum(ascending[:3]) <= room:
        return True
    first, last = 0, fitting - 1
    while first < last:
        both = ascending[first] + ascending[last]
        if ascending[fitting - 1] < both <= room:
            return True
        if both > room:
            last -= 1
        else:
            first += 1
    return False


def pairs_lack_room(length: IntArray, *, capacity: int, num_packs: int) -> bool:
    """Whether sequences (int64 [N], descending) can't fit because packs of two leave too much room empty.

    Of `num_packs` packs, at least 3 * num_packs - N hold two, if one alone counts twice and none three times. How many
    pairs leave g tokens or less is at most how many can be made at once, in greedy order: sums of those paired lie
    between capacity - g and capacity. All others leave more, those alone at least twice as much.
    """
    num_pairs, spare = 3 * num_packs - length.size, num_packs * capacity - int(length.sum())
    if num_pairs <= 0 or length.size == 0:
        return spare < 0
    longer, shorter = length.tolist(), length[2 * length <= capacity][::-1].tolist()
    for gap in range(min(_MOST_GAPS, (capacity - longer[0]) // 2, capacity // 3)):
        spare -= max(num_pairs - _most_pairs(longer, shorter, capacity - gap, capacity), 0)
        if spare < 0:
            break
    return spare < 0


def _most_pairs(longer: list[int], shorter: list[int], least: int, most: int) -> int:
    """Pairs whose sum is in that range: of the longer ones, descending, each with the shortest one, ascending, left."""
    num_pairs = place = 0
    for tokens in longer:
        if 2 * tokens < least:
            break
        while place < len(shorter) and tokens + shorter[place] < least:
            place += 1
        if place < len(shorter) and tokens + shorter[place] <= most:
            num_pairs += 1
            place += 1
    return num_pairs
