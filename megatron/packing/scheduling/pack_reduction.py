"""pure. Packs that are beyond doubt, before any search for others; see `pack_fit`."""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


class Reduced(NamedTuple):
    """Packs of the longest sequences: if all fit into so many packs, they do with these."""

    pack: IntArray
    """Of each sequence, int64 [N]; -1 of those left."""
    num_packs: int


def reduce_packs(length: IntArray, *, capacity: int) -> Reduced:
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
