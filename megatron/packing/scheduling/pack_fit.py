"""pure. Whether sequences fit into so many packs: a packing, a proof that there is none, or neither after all searches.

Most packings are found at once. Otherwise packs that are beyond doubt are taken away (`pack_reduction`), and what is
left is searched (`pack_search`); then sequences get values (`pack_values`), which prove that there is no packing, or
lead other searches to it; then values are made anew for what is left after each part of the packs.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.packing.scheduling.pack_reduction import pairs_lack_room, reduce_packs
from megatron.packing.scheduling.pack_search import Answer, search_packing
from megatron.packing.scheduling.pack_values import Values, pack_values
from megatron.packing.scheduling.repartition import fit_by_pairs

IntArray = npt.NDArray[np.int64]

_STEPS_PER_SEQUENCE, _STEPS_PER_PACK = 1000, 400
"""To find a packing, where hardly more than the first set of each pack is tried."""
_STEPS_TO_REFUTE, _MOST_TO_REFUTE = 200_000, 512
"""And of at most so many sequences: of more, hardly any are refuted in a time that a schedule may take."""
_DIVERSE = ((1, 1000), (1, 400), (2, 600))
_VALUE_SEARCHES = ((1_000_000, ((0, 1000), (1, 400))), (16_000_000, _DIVERSE), (64_000_000, _DIVERSE))
"""Steps for values; swerves and steps for each pack in searches by them, which find different packings. Better values
are looked for where those before decide nothing.
"""
_STEPS_FOR_PARTS, _STEPS_OF_THREES, _MOST_STEPS = 32_000, 4000, 8_000_000
"""And for values made anew, for each sequence left; where packs hold three or more, of which values tell less; in all.
"""
_NUM_PARTS = 10
"""Such a part of the packs left is filled at once, in as many ways as room is weighed."""
_ROOM_WEIGHTS = 0, 1, 4
_FEW_PACKS, _TRIES, _TRIES_OF_FEW = 60, ((1, 400),), ((8, 400), (2, 600), (0, 1000), (1, 400))
"""Swerves and steps for each pack in searches for all packs left, and where there are so few."""


def fit_into(length: IntArray, *, capacity: int, num_packs: int, is_thorough: bool = True) -> Answer:
    """Whether sequences of `length` (int64 [N], descending, each in 1..capacity) fit into `num_packs` packs.

    Mostly 1 to 10 milliseconds beside `find_packing`, up to 20 unless `is_thorough`; else up to 50 for 64 sequences,
    150 for 256 and 600 for 1,024, where values are made anew. Some forty times that in Python.
    """
    answer = find_packing(length, capacity=capacity, num_packs=num_packs)
    if not answer.is_open:
        return answer
    pack, num_reduced = reduce_packs(length, capacity=capacity)
    left = np.flatnonzero(pack < 0)
    answer = _decide(length[left], capacity, num_packs - num_reduced, is_thorough)
    if answer.pack is None:
        return answer
    pack[left] = num_reduced + answer.pack
    return Answer(pack, False)


def find_packing(length: IntArray, *, capacity: int, num_packs: int) -> Answer:
    """`fit_into` as far as it is quick: packs made over two by two (see `repartition`) find most packings that there
    are of three sequences or more to a pack, a search that goes nearly straight down most others. Up to a millisecond
    for 64 sequences, 3 for 256, 10 for 1,024, where neither finds any.
    """
    pack = fit_by_pairs(length, capacity=capacity, num_packs=num_packs)
    if pack is not None:
        return Answer(pack, False)
    return search_packing(
        length,
        capacity=capacity,
        num_packs=num_packs,
        swerves=1,
        steps_per_pack=_STEPS_PER_PACK,
        budget=_STEPS_PER_SEQUENCE * length.size,
    )


def is_refuted(length: IntArray, *, capacity: int, num_packs: int, steps: int, steps_for_values: int) -> bool:
    """Whether it is proven that sequences (as in `fit_into`) need more packs, by a search and by values of so many
    steps.
    """
    pack, num_reduced = reduce_packs(length, capacity=capacity)
    rest, num_left = length[pack < 0], num_packs - num_reduced
    if pairs_lack_room(rest, capacity=capacity, num_packs=num_left):
        return True
    search = partial(search_packing, rest, capacity=capacity, num_packs=num_left)
    if search(swerves=steps, steps_per_pack=steps, budget=steps).is_proof:
        return True
    return pack_values(rest, capacity=capacity, num_packs=num_left, budget=steps_for_values).num_packs > num_left


def _decide(length: IntArray, capacity: int, num_packs: int, is_thorough: bool) -> Answer:
    if pairs_lack_room(length, capacity=capacity, num_packs=num_packs):
        return Answer(None, True)
    answer = Answer(None, False)
    search = partial(search_packing, length, capacity=capacity, num_packs=num_packs)
    if length.size <= _MOST_TO_REFUTE:
        answer = search(swerves=_STEPS_TO_REFUTE, steps_per_pack=_STEPS_TO_REFUTE, budget=_STEPS_TO_REFUTE)
    for budget, tries in _VALUE_SEARCHES if is_thorough else _VALUE_SEARCHES[:1]:
        if not answer.is_open:
            return answer
        values = pack_values(length, capacity=capacity, num_packs=num_packs, budget=budget)
        if values.num_packs > num_packs:
            return Answer(None, True)
        answer = _search_by(values, length, capacity, num_packs, tries)
    if answer.is_open and is_thorough:
        steps = _STEPS_FOR_PARTS if length.size < 3 * num_packs else _STEPS_OF_THREES
        answer = _fill_in_parts(length, capacity, num_packs, steps)
    return answer


def _search_by(
    values: Values, length: IntArray, capacity: int, num_packs: int, tries: tuple[tuple[int, int], ...]
) -> Answer:
    answer = Answer(None, False)
    for (swerves, steps_per_pack), room_weight in product(tries, (0, 1)):
        if answer.is_open:
            answer = search_packing(
                length,
                capacity=capacity,
                num_packs=num_packs,
                swerves=swerves,
                steps_per_pack=steps_per_pack,
                budget=_STEPS_PER_SEQUENCE * length.size,
                values=values,
                room_weight=room_weight,
            )
    return answer


class _Part(NamedTuple):
    """Some packs, filled, and the values of what they leave."""

    pack: IntArray
    """Of each sequence that was left before, int64; -1 of those left now."""
    values: Values
    spare: float
    """Packs left above those that values need."""


def _fill_in_parts(length: IntArray, capacity: int, num_packs: int, steps: int) -> Answer:
    """A packing by values that are made anew for what each part of the packs leaves; of several ways to fill a part the
    one that leaves most to spare. Proves nothing.
    """
    pack, left, num_filled = np.full(length.size, -1), np.arange(length.size), 0
    values = pack_values(length, capacity=capacity, num_packs=num_packs, budget=min(steps * length.size, _MOST_STEPS))
    while True:
        num_left = num_packs - num_filled
        tries = _TRIES_OF_FEW if num_left <= _FEW_PACKS else _TRIES
        found = _search_by(values, length[left], capacity, num_left, tries).pack
        if found is not None:
            pack[left] = num_filled + found
            return Answer(pack, False)
        num_more = -(-num_left // _NUM_PARTS)
        parts = _parts(values, length[left], capacity, num_left, num_more, steps)
        if not parts:
            return Answer(None, False)
        best = max(parts, key=lambda part: part.spare)
        pack[left] = np.where(best.pack < 0, -1, num_filled + best.pack)
        left, values = left[best.pack < 0], best.values
        num_filled += num_more


def _parts(values: Values, length: IntArray, capacity: int, num_packs: int, num_filled: int, steps: int) -> list[_Part]:
    """Ways to fill so many packs of `num_packs`, without those that are seen to leave too much."""
    parts = []
    for room_weight in _ROOM_WEIGHTS:
        pack = search_packing(
            length,
            capacity=capacity,
            num_packs=num_packs,
            swerves=0,
            steps_per_pack=_STEPS_PER_PACK,
            budget=_STEPS_PER_SEQUENCE * length.size,
            values=values,
            room_weight=room_weight,
            most_filled=num_filled,
        ).pack
        if pack is not None:
            left, num_left = length[pack < 0], num_packs - num_filled
            budget = min(steps * left.size, _MOST_STEPS)
            of_left = pack_values(left, capacity=capacity, num_packs=num_left, budget=budget)
            spare = num_left - int(of_left.value.sum()) / of_left.most
            if spare >= 0:
                parts.append(_Part(pack, of_left, spare))
    return parts
