"""Packs that are beyond doubt, against all packings."""

from collections import Counter

import numpy as np

from megatron.packing.scheduling.pack_reduction import reduce_packs
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
    # 100 with three, 92 with 54 and 54: two packs, though no two beside 100 are longer than 92.
    assert reduce_packs(array(100, 92, 54, 54, 37, 33, 30), capacity=200).num_packs == 0
