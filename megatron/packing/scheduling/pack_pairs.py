"""pure. Packs of two, where most hold two or three: what so many leave empty at least, and those that leave least.

Where N sequences are to fit into K packs, 3 K - N packs or more hold two, if one alone counts twice and none three
times. Threes fill nearly any room; pairs leave what their lengths leave.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

_MOST_WAITING = 32
"""Sequences whose lengths differ by a price or less; where there are more, nothing is told."""
_NEVER = 1 << 62


def pairs_lack_room(length: IntArray, *, capacity: int, num_packs: int) -> bool:
    """Whether sequences (int64 [N], descending) can't fit because packs of two leave too much room empty.

    Whatever price a pair is given: so many pairs leave empty at least what all of them are priced, less the most that
    any number of pairs can leave less than that (Lagrange). Prices are so low that no sequence alone and no empty pack
    leaves less. Up to 15 milliseconds for 1,024 sequences.
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


def closest_pairs(length: IntArray, *, capacity: int, num_pairs: int, spare: int) -> list[tuple[int, int]]:
    """Pairs that leave least of a pack empty: numbers of the longer and the shorter sequence, those that leave least
    first, chosen in greedy order.

    `length` is int64 [N], descending. They are fewer than `num_pairs` where so many would leave more than `spare`
    tokens in all. Up to 10 milliseconds for 1,024 sequences.
    """
    found: list[tuple[int, int]] = []
    left, gap = list(range(length.size)), 0
    tokens = length.tolist()
    while gap <= spare:
        pairs = _pairs_within(tokens, left, capacity - gap, capacity)[: num_pairs - len(found)]
        for longer, shorter in pairs:
            spare -= capacity - tokens[longer] - tokens[shorter]
        found += pairs
        if len(found) == num_pairs:
            break
        paired = {sequence for pair in pairs for sequence in pair}
        left = [sequence for sequence in left if sequence not in paired]
        gap += -(-(gap + 1) // 8)
    return found


def _pairs_within(tokens: list[int], left: list[int], least: int, most: int) -> list[tuple[int, int]]:
    """As many pairs of those left as there can be whose sum is in that range, one sequence longer than half of it."""
    pairs = []
    place = len(left) - 1  # of the shortest one
    for longer in left:
        if 2 * tokens[longer] <= most:
            break
        while tokens[longer] + tokens[left[place]] < least:
            place -= 1
        if tokens[longer] + tokens[left[place]] <= most:
            pairs.append((longer, left[place]))
            place -= 1
    return pairs
