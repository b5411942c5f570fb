"""pure. Whether sequences fit into so many packs: a packing, a proof that there is none, or neither after all searches.

Most packings are found at once. Otherwise packs that are beyond doubt are taken away (`pack_reduction`), and what is
left is searched (`pack_search`); sequences get values (`pack_values`), which prove that there is no packing, or lead
other searches to it. Where packs hold two or three, some must hold two (`pack_pairs`): either these leave too much room
empty, or those that leave least are taken away, and what is left, by threes, is decided more easily.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product

import numpy as np
import numpy.typing as npt

from megatron.packing.scheduling.pack_pairs import closest_pairs, pairs_lack_room
from megatron.packing.scheduling.pack_reduction import reduce_packs
from megatron.packing.scheduling.pack_search import Answer, search_packing
from megatron.packing.scheduling.pack_values import Values, pack_values
from megatron.packing.scheduling.repartition import fit_by_pairs

IntArray = npt.NDArray[np.int64]

_STEPS_PER_SEQUENCE, _STEPS_PER_PACK = 1000, 400
"""To find a packing, where hardly more than the first set of each pack is tried."""
_STEPS_TO_REFUTE, _MOST_TO_REFUTE = 200_000, 512
"""And of at most so many sequences: of more, hardly any are refuted in a time that a schedule may take."""
_TRIES = ((1, 1000), (1, 400), (2, 600))
"""Swerves and steps for each pack, in searches that find different packings."""
_VALUE_SEARCHES = ((1_000_000, ((0, 1000), (1, 400))), (16_000_000, _TRIES), (64_000_000, _TRIES))
"""Steps for values, and such searches by them. Better values are looked for where those before decide nothing."""
_MORE_PAIRS = 0, 1, 2
"""As many pairs as there must be are taken away, or so many of 60 packs more."""


def fit_into(length: IntArray, *, capacity: int, num_packs: int, is_thorough: bool = True) -> Answer:
    """Whether sequences of `length` (int64 [N], descending, each in 1..capacity) fit into `num_packs` packs.

    Mostly that takes 1 to 10 milliseconds more than `find_packing`. Where it stays open it is given up after some 20,
    or if `is_thorough` after 100 for 256 sequences, 300 for 1,024; in Python after some forty times that.
    """
    answer = find_packing(length, capacity=capacity, num_packs=num_packs)
    if not answer.is_open:
        return answer
    return _reduced(length, capacity, num_packs, partial(_decide, capacity=capacity, is_thorough=is_thorough))


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


def fit_quickly(length: IntArray, *, capacity: int, num_packs: int) -> Answer:
    """`fit_into` for thousands of sequences, by what is quick for them: dominance, pairs, and packs made over two by
    two. Up to 50 milliseconds for 8,192.
    """
    return _reduced(length, capacity, num_packs, partial(_with_closest_pairs, capacity=capacity, fit=find_packing))


def is_refuted(length: IntArray, *, capacity: int, num_packs: int, steps: int, steps_for_values: int) -> bool:
    """Whether it is proven that sequences (as in `fit_into`) need more packs, by a search and by values of so many
    steps.
    """

    def decide(rest: IntArray, num_left: int) -> Answer:
        search = partial(search_packing, rest, capacity=capacity, num_packs=num_left)
        answer = search(swerves=steps, steps_per_pack=steps, budget=steps)
        if answer.is_proof:
            return answer
        values = pack_values(rest, capacity=capacity, num_packs=num_left, budget=steps_for_values)
        return Answer(None, values.num_packs > num_left)

    return _reduced(length, capacity, num_packs, decide).is_proof


def _reduced(length: IntArray, capacity: int, num_packs: int, decide: Callable[[IntArray, int], Answer]) -> Answer:
    """What `decide` says of the sequences that dominance leaves, and of so many packs, unless pairs refute it."""
    pack, num_reduced = reduce_packs(length, capacity=capacity)
    left, num_left = np.flatnonzero(pack < 0), num_packs - num_reduced
    if pairs_lack_room(length[left], capacity=capacity, num_packs=num_left):
        return Answer(None, True)
    answer = decide(length[left], num_left)
    if answer.pack is None:
        return answer
    pack[left] = num_reduced + answer.pack
    return Answer(pack, False)


def _decide(length: IntArray, num_packs: int, *, capacity: int, is_thorough: bool) -> Answer:
    answer = Answer(None, False)
    search = partial(search_packing, length, capacity=capacity, num_packs=num_packs)
    if length.size <= _MOST_TO_REFUTE:
        answer = search(swerves=_STEPS_TO_REFUTE, steps_per_pack=_STEPS_TO_REFUTE, budget=_STEPS_TO_REFUTE)
    for number, (budget, tries) in enumerate(_VALUE_SEARCHES if is_thorough else _VALUE_SEARCHES[:1]):
        if not answer.is_open:
            return answer
        values = pack_values(length, capacity=capacity, num_packs=num_packs, budget=budget)
        if values.num_packs > num_packs:
            return Answer(None, True)
        answer = _search_by(values, length, capacity, num_packs, tries)
        if number == 0 and answer.is_open and length.size < 3 * num_packs:
            fit = partial(fit_into, is_thorough=is_thorough)
            answer = _with_closest_pairs(length, num_packs, capacity=capacity, fit=fit)
    return answer


def _with_closest_pairs(length: IntArray, num_packs: int, *, capacity: int, fit: Callable[..., Answer]) -> Answer:
    """A packing that has the pairs that leave least room empty, and `fit`'s of what is left; proves nothing."""
    spare, fewest = num_packs * capacity - int(length.sum()), max(3 * num_packs - length.size, 0)
    nums = [fewest + num_packs * part // 60 for part in _MORE_PAIRS] if fewest else [0]
    pairs = closest_pairs(length, capacity=capacity, num_pairs=nums[-1], spare=spare)
    for num_pairs in nums:
        if num_pairs > len(pairs):
            break
        pack = np.full(length.size, -1)
        pack[np.array(pairs[:num_pairs], np.int64).reshape(-1, 2)] = np.arange(num_pairs)[:, None]
        left = np.flatnonzero(pack < 0)
        found = fit(length[left], capacity=capacity, num_packs=num_packs - num_pairs).pack
        if found is not None:
            pack[left] = num_pairs + found
            return Answer(pack, False)
    return Answer(None, False)


def _search_by(
    values: Values, length: IntArray, capacity: int, num_packs: int, tries: tuple[tuple[int, int], ...]
) -> Answer:
    answer = Answer(None, False)
    for (swerves, steps_per_pack), room_counts in product(tries, (False, True)):
        if answer.is_open:
            answer = search_packing(
                length,
                capacity=capacity,
                num_packs=num_packs,
                swerves=swerves,
                steps_per_pack=steps_per_pack,
                budget=_STEPS_PER_SEQUENCE * length.size,
                values=values,
                room_counts=room_counts,
            )
    return answer
