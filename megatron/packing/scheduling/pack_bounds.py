"""pure. How many packs sequences need at the least; see `bounds`."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.packing.scheduling import native
from megatron.packing.scheduling.native import address as _at
from megatron.packing.scheduling.pack_fit import fit_into, fit_quickly, is_refuted
from megatron.packing.scheduling.placement import best_fit

IntArray = npt.NDArray[np.int64]

_MOST_SEARCHED, _MOST_SEARCHED_QUICKLY = 1024, 8192
"""Sequences; of more, a search would take longer than the microbatches that it might save are worth."""
_MOST_MULTIPLES = 32
"""Microbatches, in multiples, beside which one multiple more hardly counts: it adds nothing but fixed costs."""
_NUM_PROBES, _STEPS_PER_PROBE = 8, 50_000
"""Searches for how many of the longest sequences need more packs."""
_STEPS_FOR_VALUES = 16_000, 400
"""And for values, for each sequence: where the tokens of all sequences have room, and where they don't."""
_MOST_COUNTED = 4096
_MOST_IN_ROOM = 7
"""Sequences beside a long one: of so many or fewer it is counted how often they fit."""


class Span(NamedTuple):
    """Numbers of microbatches from `first` to `last`; None: any from `first` on."""

    first: int
    last: int | None

    @property
    def is_single(self) -> bool:
        return self.first == self.last


class Fewest(NamedTuple):
    """Microbatches per rank that every schedule needs."""

    num_microbatches: int
    pack: IntArray | None
    """Pack of each sequence, int64 [N], below num_ranks * num_microbatches: no schedule needs more. None where that was
    not asked or stays open.
    """


def fewest_microbatches(length: IntArray, num_ranks: int, capacity: int, multiple: int) -> Fewest:
    """`microbatch_lower_bound`, or more where best-fit decreasing finds no packing for so many and it is proven that
    there is none.

    Nearly always best-fit does, or capacity is so large that it would, which costs nothing; to decide it takes
    milliseconds, at the worst a few hundred (see `fit_into`, and `fit_quickly` for more than 1,024 sequences).
    """
    number = microbatch_lower_bound(length, num_ranks, capacity, multiple)
    # Of the packs of best-fit, at most one is filled up to no more than half.
    if length.size > _MOST_SEARCHED_QUICKLY or (number * num_ranks - 1) * capacity >= 2 * int(length.sum()):
        return Fewest(number, None)
    pack, num_packs = best_fit(length, capacity=capacity)
    while num_packs > number * num_ranks:
        if number > _MOST_MULTIPLES * multiple:
            return Fewest(number, None)
        fit = fit_into if length.size <= _MOST_SEARCHED else fit_quickly
        answer = fit(length, capacity=capacity, num_packs=number * num_ranks)
        if not answer.is_proof:
            return Fewest(number, answer.pack)
        number += multiple
    return Fewest(number, pack)


def microbatch_lower_bound(length: IntArray, num_ranks: int, capacity: int, multiple: int) -> int:
    """Microbatches per rank that every schedule needs, a positive multiple of `multiple`, for packs of at most
    `capacity` tokens.

    `length` is int64 [N], descending, each in 1..capacity. Bound L2 of Martello and Toth, "Lower bounds and reduction
    procedures for the bin packing problem" (1990). O(N).
    """
    packs = int(packs_needed(length, capacity).max(initial=0))
    return max(1, math.ceil(packs / (num_ranks * multiple))) * multiple


def longest_that_need_more(length: IntArray, needed: IntArray, capacity: int, num_packs: int) -> int:
    """So many of the longest sequences need more than `num_packs` packs; above N if all may fit.

    `needed` is `packs_needed`, which says so of some number. Where best-fit decreasing does not find packings for all
    smaller ones, proofs are looked for that there are none (see `is_refuted`): a few milliseconds each, up to
    20 where the tokens of all sequences would have room.
    """
    number = int(np.searchsorted(needed, num_packs + 1)) + 1
    if length.size > _MOST_SEARCHED or best_fit(length[: number - 1], capacity=capacity)[1] <= num_packs:
        return number
    fits, fails = num_packs, number - 1  # best-fit
    while fails - fits > 1:
        middle = (fits + fails) // 2
        if best_fit(length[:middle], capacity=capacity)[1] <= num_packs:
            fits = middle
        else:
            fails = middle
    steps_for_values = _STEPS_FOR_VALUES[0 if int(length.sum()) <= num_packs * capacity else 1] * length.size
    probe = fails
    for _ in range(_NUM_PROBES):
        is_proven = is_refuted(
            length[:probe],
            capacity=capacity,
            num_packs=num_packs,
            steps=_STEPS_PER_PROBE,
            steps_for_values=steps_for_values,
        )
        if is_proven:
            number = probe
        else:
            fails = probe + 1
        if fails >= number:
            break
        probe = (fails + number) // 2
    return number


def packs_needed(length: IntArray, capacity: int) -> IntArray:
    """Packs of at most `capacity` tokens that the i longest sequences need at the least, i = 1 ... N, int64 [N].

    `length` is int64 [N], descending, each in 1..capacity. Let t be the shortest of those i. Two sequences longer than
    capacity / 2 never share a pack; one longer than capacity - t has no room for t tokens, so that those of t to
    capacity / 2 tokens fit only beside the ones in between, or into packs of their own (Martello and Toth); and no
    pack holds more than capacity / t of them. Of those above capacity / 3, a pack holds at most two: for each length,
    as many as there are more of that length than of rooms for it, beside longer ones, must share packs by twos. Of up
    to 4096 sequences that is also counted for those which several of fit: see `_packs_for_room`.
    """
    packs = _packs_needed(length, capacity)
    if length.size <= _MOST_COUNTED:
        num_long = int(np.searchsorted(-length, -(capacity // 2)))
        end = int(np.searchsorted(-length, -(capacity // (_MOST_IN_ROOM + 1) // 2)))
        packs[num_long:end] = np.maximum(packs[num_long:end], _packs_for_room(length[:end], num_long, capacity))
    return np.maximum.accumulate(packs)


def _packs_for_room(length: IntArray, num_long: int, capacity: int) -> IntArray:
    """Packs that the `num_long` sequences longer than capacity / 2 and the i next ones need, i = 1, 2, ..., int64.

    Beside a long one of l tokens stand at most (capacity - l) / t of t tokens or more, elsewhere at most capacity / t;
    with t the shortest, all must have room.
    """
    short, rooms = length[num_long:], capacity - length[:num_long]
    num_beside = np.zeros_like(short)
    for several in range(1, _MOST_IN_ROOM + 1):
        num_beside += num_long - np.searchsorted(rooms, several * short)
    num_left = np.maximum(np.arange(1, short.size + 1) - num_beside, 0)
    return num_long - (-num_left // (capacity // short))


def _packs_needed(length: IntArray, capacity: int) -> IntArray:
    if native.LIBRARY is not None:
        needed = np.empty(length.size, np.int64)
        native.LIBRARY.packs_needed(length.size, _at(length), capacity, _at(needed))
        return needed
    sums = np.concatenate(([0], np.cumsum(length)))
    count = np.arange(1, length.size + 1)
    num_long = int(np.searchsorted(-length, -(capacity // 2)))
    num_large = np.minimum(num_long, count)
    num_alone = np.minimum(np.searchsorted(-length, -(capacity - length)), num_large)
    room_beside_large = (num_large - num_alone) * capacity - (sums[num_large] - sums[num_alone])
    overflow = np.maximum(sums[1:] - sums[num_large] - room_beside_large, 0)
    packs = np.maximum(num_large + -(-overflow // capacity), -(-count // (capacity // np.maximum(length, 1))))
    end = int(np.searchsorted(-length, -(capacity // 3)))
    middle = length[num_long:end]
    rooms = num_long - np.searchsorted(-length[:num_long], middle - capacity)
    unpaired = np.maximum(np.arange(1, middle.size + 1) - rooms, 0)
    packs[num_long:end] = np.maximum(packs[num_long:end], num_long - (-unpaired // 2))
    return np.maximum.accumulate(packs)
