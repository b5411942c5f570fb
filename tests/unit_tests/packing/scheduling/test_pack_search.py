"""Packings found and refuted, against all packings; and the compiled form equal to the Python form."""

from collections import Counter
from typing import Any

import numpy as np

from megatron.packing.scheduling.pack_search import search_packing
from megatron.packing.scheduling.pack_values import Values, pack_values
from tests.unit_tests.packing.brute_force import check_packing, descending, fits
from tests.unit_tests.packing.stubs import array, in_python, needs_compiled


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
