"""What pairs leave empty, against all packings."""

from collections import Counter
from itertools import pairwise

import numpy as np

from megatron.packing.scheduling.pack_pairs import closest_pairs, pairs_lack_room
from tests.unit_tests.packing.brute_force import descending, fits
from tests.unit_tests.packing.stubs import array


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


def test_closest_pairs_are_pairs_that_fit_and_leave_least_first():
    rng = np.random.default_rng(7)
    for _ in range(300):
        capacity = int(rng.integers(20, 200))
        length = descending(rng, 1, capacity + 1, rng.integers(0, 40))
        num_pairs, spare = int(rng.integers(1, 12)), int(rng.integers(0, 100))
        pairs = closest_pairs(length, capacity=capacity, num_pairs=num_pairs, spare=spare)
        assert len(pairs) <= num_pairs
        sequences = [sequence for pair in pairs for sequence in pair]
        assert len(set(sequences)) == len(sequences)
        left = [capacity - int(length[longer] + length[shorter]) for longer, shorter in pairs]
        assert min(left, default=0) >= 0
        # Each round looks at gaps at most an eighth wider than all before.
        assert all(after > before - max(before // 8, 1) for before, after in pairwise(left))


def test_closest_pairs_by_hand():
    """60 with 40 leaves nothing, 70 with 25 leaves 5, and 55 with 44 leaves 1."""
    length = array(70, 60, 55, 44, 40, 25, 3)
    assert closest_pairs(length, capacity=100, num_pairs=3, spare=9) == [(1, 4), (2, 3), (0, 5)]
    assert closest_pairs(length, capacity=100, num_pairs=2, spare=9) == [(1, 4), (2, 3)]
    assert closest_pairs(length, capacity=100, num_pairs=9, spare=0) == [(1, 4)]
    assert closest_pairs(array(), capacity=100, num_pairs=1, spare=9) == []
