"""Packings found and refuted, against all packings; and the compiled form equal to the Python form."""

from collections import Counter
from typing import Any
from unittest import mock

import numpy as np

from megatron.packing.scheduling import pack_search
from megatron.packing.scheduling.pack_search import fit_into, search_packing
from megatron.packing.scheduling.pack_values import Values, pack_values
from megatron.packing.scheduling.placement import best_fit
from tests.unit_tests.packing.brute_force import descending, fits
from tests.unit_tests.packing.stubs import array, in_python, needs_compiled

# Of a lognormal distribution: 32 packs by L2 and by tokens, of which they are 98.2 %; but 33 are needed.
NEEDS_33 = array(
    *[7845, 7584, 7540, 7232, 6925, 6393, 6191, 6121, 6034, 5937, 5918, 5872, 5720, 5698, 5388, 5347, 4866, 4855],
    *[4832, 4804, 4748, 4630, 4493, 4486, 4477, 4369, 4256, 4047, 4019, 3914, 3910, 3836, 3828, 3700, 3698, 3541],
    *[3407, 3398, 3397, 3019, 3003, 2990, 2780, 2777, 2750, 2573, 2538, 2341, 2205, 2036, 2017, 1897, 1780, 1553],
    *[1511, 1476, 1461, 1413, 1279, 1272, 1261, 1214, 1068, 1043],
)


def check_packing(pack, length, capacity, num_packs):
    assert pack.shape == length.shape
    assert pack.min(initial=0) >= 0
    assert pack.max(initial=-1) < num_packs
    assert np.bincount(pack, weights=length, minlength=1).max() <= capacity


def random_values(rng, length) -> Values:
    """Which prove nothing, but are to be counted alike."""
    value = length * int(rng.choice([1, 10**4])) + rng.integers(0, 99, length.size)
    return Values(value, int(value.max(initial=1) * rng.choice([1, 1.5, 2, 4])))


def test_answers_are_right(form):
    """A wrong proof makes every schedule take more microbatches than it needs; a wrong packing runs out of memory."""
    rng = np.random.default_rng(1)
    seen: Counter[str] = Counter()
    for _ in range(2500):
        capacity = int(rng.integers(1, 40))
        length = descending(rng, 1 + capacity // int(rng.choice([4, 8, 99])), capacity + 1, rng.integers(0, 11))
        num_packs = max(-(-int(length.sum()) // capacity) + int(rng.integers(0, 2)), 1)
        possible = fits(length.tolist(), (capacity,) * num_packs)
        values = pack_values(length, capacity=capacity, num_packs=num_packs, budget=3000) if rng.integers(2) else None
        for swerves, steps, budget in ((10**6, 10**6, 10**6), (0, 3, 40), (0, 10, 10**6)):
            answer = search_packing(
                length,
                capacity=capacity,
                num_packs=num_packs,
                swerves=swerves,
                steps_per_pack=steps,
                budget=budget,
                values=values,
                room_counts=bool(rng.integers(2)),
            )
            if answer.pack is not None:
                assert possible
                check_packing(answer.pack, length, capacity, num_packs)
            assert not (answer.is_proof and possible), (length, capacity, num_packs)
            # There are no more sets for a pack than are looked for: a search without limits always has an answer.
            assert answer.is_proof or answer.pack is not None or budget < 10**6 or swerves < 10**6
            seen["packing" if answer.pack is not None else "proof" if answer.is_proof else "open"] += 1
    assert min(seen[answer] for answer in ("packing", "proof", "open")) > 300, seen


@needs_compiled
def test_compiled_and_python_form_are_equal():
    """Ranks with and without a compiler would follow different schedules: tokens sent to ranks that expect others."""
    seen: Counter[str] = Counter()
    for case in range(1500):
        rng = np.random.default_rng([9, case])
        length = descending(rng, int(rng.choice([1, 50, 300])), int(rng.choice([400, 1001])), rng.integers(0, 50))
        capacity = int(length.max(initial=1) * rng.choice([1, 1, 1.5, 2, 4]))
        options: dict[str, Any] = {
            "capacity": capacity,
            "num_packs": -(-int(length.sum()) // capacity) + int(rng.choice([0, 0, 1, 2])),
            "swerves": int(rng.choice([0, 1, 3, 10**6])),
            "steps_per_pack": int(rng.choice([5, 100, 10**6])),
            "budget": int(rng.choice([100, 3000, 30_000])),
            "values": random_values(rng, length) if rng.integers(2) else None,
            "room_counts": bool(rng.integers(2)),
        }
        compiled = search_packing(length, **options)
        with in_python():
            python = search_packing(length, **options)
        assert compiled.is_proof == python.is_proof, (case, options)
        assert (compiled.pack is None) == (python.pack is None), (case, options)
        if compiled.pack is not None and python.pack is not None:
            assert compiled.pack.dtype == python.pack.dtype == np.int64
            assert compiled.pack.tolist() == python.pack.tolist()
        seen["packing" if compiled.pack is not None else "proof" if compiled.is_proof else "open"] += 1
    assert min(seen[answer] for answer in ("packing", "proof", "open")) > 150, seen


def test_what_no_simple_bound_refutes_is_refuted(form):
    """The steps that a search may take once decided it: half the microbatches of a step hung on this proof."""
    assert fit_into(NEEDS_33, capacity=7845, num_packs=32).is_proof
    assert fit_into(NEEDS_33, capacity=7845, num_packs=33).pack is not None


def test_a_packing_is_found_that_best_fit_misses(form):
    """Packs of 10 + 5 + 5, 7 + 7 + 6 and 8 + 6 + 6; best-fit puts 8 beside 10 and needs a fourth."""
    length = array(10, 8, 7, 7, 6, 6, 6, 5, 5)
    assert best_fit(length, capacity=20)[1] == 4
    answer = fit_into(length, capacity=20, num_packs=3)
    assert answer.pack is not None
    check_packing(answer.pack, length, 20, 3)


def test_values_decide_what_a_search_leaves_open(form):
    """Three to thirty percent of a step, where sequences fill nearly all room by twos and threes."""
    rng = np.random.default_rng(67)
    refuted = descending(rng, 1, 8193, 128)
    assert fit_into(refuted, capacity=8192, num_packs=61).is_proof
    rng = np.random.default_rng(6)
    found = np.sort(np.maximum(rng.integers(1024, 8193, 128) * rng.integers(1024, 8193, 128) // 8192, 1024))[
        ::-1
    ].copy()
    assert int(found.sum()) > 44.8 * 8192
    assert best_fit(found, capacity=8192)[1] > 45
    pack = fit_into(found, capacity=8192, num_packs=45).pack
    assert pack is not None
    check_packing(pack, found, 8192, 45)
    with mock.patch.object(pack_search, "_VALUE_SEARCHES", ()):
        assert fit_into(refuted, capacity=8192, num_packs=61).is_open
        assert fit_into(found, capacity=8192, num_packs=45).is_open


def test_sets_that_waste_least_value_come_first(form):
    """Beside 6 stands 5, or 3 and 3; the packing found tells which was tried first."""
    length = array(6, 5, 3, 3)
    options: dict[str, Any] = {"capacity": 12, "num_packs": 2, "swerves": 0, "steps_per_pack": 99, "budget": 999}

    def packing(values: Values | None, **more: bool) -> list[int]:
        found = search_packing(length, **options, values=values, **more).pack
        assert found is not None
        return found.tolist()

    assert packing(None) == [0, 0, 1, 1]
    assert packing(Values(array(3, 1, 2, 2), 7)) == [0, 1, 0, 0]
    # 5 wastes no value and 1 token of 7 to spare; 3 and 3 no token, and 2 of 32: less, even counted twice.
    assert packing(Values(array(30, 50, 24, 24), 80)) == [0, 0, 1, 1]
    assert packing(Values(array(30, 50, 24, 24), 80), room_counts=True) == [0, 1, 0, 0]


def test_search_by_hand(form):
    """Sets of few sequences come first, of those the fullest; a swerve takes a later one."""
    length = array(7, 4, 3, 3, 2, 1)  # beside 7: the 3, not 2 and 1
    answer = fit_into(length, capacity=10, num_packs=2)
    assert answer.pack is not None
    assert answer.pack.tolist() == [0, 1, 0, 1, 1, 1]
    assert fit_into(array(6, 6, 6), capacity=10, num_packs=2).is_proof
    assert fit_into(array(), capacity=10, num_packs=0).pack is not None
