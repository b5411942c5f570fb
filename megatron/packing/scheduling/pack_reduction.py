"""pure. What is decided of packs before any search: some that are beyond doubt, and tokens that all packings waste."""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

_MOST_WAITING = 32
"""Sequences whose lengths differ by a price or less; where there are more, nothing is told."""
_NEVER = 1 << 62


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


def pairs_lack_room(length: IntArray, *, capacity: int, num_packs: int) -> bool:
    """Whether sequences (int64 [N], descending) can't fit because packs of two leave too much room empty.

    Of `num_packs` packs, at least 3 * num_packs - N hold two, if one alone counts twice and none three times. Whatever
    price a pair is given: so many pairs leave empty at least what all of them are priced, less the most that any
    number of pairs can leave less than that (Lagrange). Prices are so low that no sequence alone and no empty pack
    leaves less. Up to 10 milliseconds for 1,024 sequences.
    """
    num_pairs, spare = 3 * num_packs - length.size, num_packs * capacity - int(length.sum())
    if num_pairs <= 0 or length.size == 0 or spare < 0:
        return spare < 0
    short = length[2 * length <= capacity]
    places = np.concatenate((short, capacity - length))
    is_room = np.arange(places.size) >= short.size
    order = np.lexsort((is_room, places))
    ascending, rooms = places[order].tolist(), is_room[order].tolist()
    # At the least what decides if pairs leave nothing above it; then half as high again each time.
    price, best = spare // num_pairs + 1, 0
    while price <= min((capacity - int(length[0])) // 2, capacity // 3):
        most_waiting = int((np.arange(1, short.size + 1) - np.searchsorted(-short, -short - price)).max(initial=0))
        if most_waiting > _MOST_WAITING:
            break
        waste = price * num_pairs - _most_saved(ascending, rooms, price, most_waiting)
        if waste > spare:
            return True
        if waste < best:  # and less at any higher price
            break
        price, best = price + -(-price // 2), waste
    return False


def _most_saved(ascending: list[int], is_room: list[bool], price: int, most_waiting: int) -> int:
    """The most that pairs can leave less than the price, in all: pairs of a sequence and the room beside a longer one.

    In ascending order, by how many sequences wait for a room: no more than `most_waiting`, as one that waits for
    `price` tokens saves nothing.
    """
    saved = [0] + [-_NEVER] * most_waiting
    for tokens, has_room in zip(ascending, is_room, strict=True):
        if has_room:
            for waiting in range(most_waiting):
                saved[waiting] = max(saved[waiting], saved[waiting + 1] + price - tokens)
        else:
            for waiting in range(most_waiting, 0, -1):
                saved[waiting] = max(saved[waiting], saved[waiting - 1] + tokens)
    return saved[0]
