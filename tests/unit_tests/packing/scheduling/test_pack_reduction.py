"""What is decided of packs before any search, against all packings."""

from collections import Counter

import numpy as np

from megatron.packing.scheduling.pack_reduction import pairs_lack_room, reduce_packs
from tests.unit_tests.packing.brute_force import check_packing, descending, fits
from tests.unit_tests.packing.stubs import array


def test_what_is_left_fits_if_all_do():
    """A pack too good to be part of a packing makes a step a microbatch longer than it need be."""
    rng = np.random.default_rng(5)
    seen: Counter[str] = Counter()
    for _ in range(4000):
        capacity = int(rng.integers(10, 80))
        length = descending(rng, 1 + capacity // 6, capacity * 3 // 4, rng.integers(4, 11))
        pack, num_packs = reduce_packs(length, capacity=capacity)
        reduced = pack >= 0
        check_packing(pack[reduced], length[reduced], capacity, num_packs)
        assert np.unique(pack[reduced]).size == num_packs
        fewest = next(number for number in range(length.size + 1) if fits(length.tolist(), (capacity,) * number))
        assert fits(length[~reduced].tolist(), (capacity,) * (fewest - num_packs)), (length, capacity)
        seen["all" if reduced.all() else "some" if reduced.any() else "none"] += 1
    assert min(seen.values()) > 200, seen


def test_reduction_by_hand():
    """9 alone, 7 with 3, which fills it; beside 6 stands 3 or 2 and 2, and both may be best."""
    pack, num_packs = reduce_packs(array(9, 7, 6, 3, 3, 2, 2), capacity=10)
    assert pack.tolist() == [0, 1, -1, 1, -1, -1, -1]
    assert num_packs == 2
    assert reduce_packs(array(9, 7, 6, 4, 2, 2), capacity=10).pack.tolist() == [0, 1, 2, 2, 1, 3]
    assert reduce_packs(array(), capacity=10).num_packs == 0


def test_pairs_lack_room_only_where_there_is_no_packing():
    """Sequences that fit and are said not to cost a microbatch more; here it is known of all."""
    rng = np.random.default_rng(6)
    seen: Counter[str] = Counter()
    for _ in range(6000):
        capacity = int(rng.integers(10, 60))
        length = descending(rng, 1 + capacity // int(rng.choice([4, 6])), capacity, rng.integers(0, 10))
        num_packs = -(-int(length.sum()) // capacity) + int(rng.integers(-1, 2))
        refuted = pairs_lack_room(length, capacity=capacity, num_packs=num_packs)
        possible = num_packs >= 0 and fits(length.tolist(), (capacity,) * num_packs)
        assert not (refuted and possible), (length, capacity, num_packs)
        has_room = int(length.sum()) <= num_packs * capacity
        seen["refuted" if refuted and has_room else "possible" if possible else "other"] += 1
    assert min(seen.values()) > 200, seen


def test_pairs_that_leave_too_much():
    """Four packs hold 11 sequences, so that one is a pair or less; the best pair leaves 2 tokens, of 1 to spare."""
    length = array(51, 47, 40, 40, 40, 37, 30, 30, 30, 27, 27)
    assert int(length.sum()) == 399
    assert pairs_lack_room(length, capacity=100, num_packs=4)
    assert not pairs_lack_room(length[1:], capacity=100, num_packs=4)
    assert pairs_lack_room(array(51, 47), capacity=100, num_packs=0)
    assert not pairs_lack_room(array(), capacity=100, num_packs=0)
