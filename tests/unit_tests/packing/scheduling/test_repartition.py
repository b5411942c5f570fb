"""Packs made over two by two: within the limits each, and the compiled form equal to the Python form."""

from collections import Counter
from typing import Any

import numpy as np

from megatron.packing.scheduling.pack_search import search_packing
from megatron.packing.scheduling.placement import best_fit, spread, trade
from megatron.packing.scheduling.repartition import fit_by_pairs, repartition
from megatron.packing.scheduling.work import pack_costs
from tests.unit_tests.packing.brute_force import descending
from tests.unit_tests.packing.stubs import array, in_python, needs_compiled


def random_case(rng) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Of few sequences and many, to packs and ranks of any number, some far above the limits, some within them."""
    num_ranks, packs_per_rank = int(rng.integers(1, 6)), int(rng.integers(1, 4))
    num_packs = num_ranks * packs_per_rank
    length = descending(rng, 1, int(rng.choice([2, 4, 51, 1001])), rng.integers(0, 60))
    cost = length * (1 + int(rng.choice([0, 1, 2**15])) * length)
    loads = rng.integers(0, 1 + int(cost.max(initial=1)), num_ranks) if rng.integers(2) else None
    mean = (int(cost.sum()) + (0 if loads is None else int(loads.sum()))) // num_ranks
    limits: dict[str, Any] = {
        "num_ranks": num_ranks,
        "packs_per_rank": packs_per_rank,
        "capacity": max(int(length.max(initial=1)), int(length.sum() * rng.uniform(1, 1.3)) // num_packs),
        "limit": int(mean * rng.uniform(0.98, 1.4)) + int(rng.integers(0, 10)),
        "loads": loads,
        "budget": int(rng.choice([0, 100, 3000, 20_000])),
    }
    return (cost, length, rng.integers(0, num_packs, length.size)), limits


def test_placements_are_within_the_limits(form):
    """A pack over capacity runs out of memory; a sequence lost is never trained on."""
    seen: Counter[bool] = Counter()
    for case in range(400):
        (cost, length, pack), limits = random_case(np.random.default_rng([5, case]))
        num_packs = limits["num_ranks"] * limits["packs_per_rank"]
        before = pack.copy()
        found = repartition(cost, length, pack, **limits)
        assert pack.tolist() == before.tolist()
        assert 0 <= found.num_splits <= limits["budget"]
        seen[found.pack is None] += 1
        if found.pack is None:
            continue
        assert found.pack.shape == pack.shape
        assert found.pack.dtype == np.int64
        assert np.bincount(found.pack, weights=length, minlength=num_packs).max() <= limits["capacity"]
        costs = pack_costs(cost, found.pack // limits["packs_per_rank"], limits["num_ranks"])
        assert (costs + (0 if limits["loads"] is None else limits["loads"])).max() <= limits["limit"]
        assert set(pack.tolist()) <= set(found.pack.tolist()), "a pack was left empty"
    assert min(seen[False], seen[True]) > 100, seen


@needs_compiled
def test_compiled_and_python_form_are_equal():
    """Ranks with and without a compiler would follow different schedules: tokens sent to ranks that expect others."""
    seen: Counter[bool] = Counter()
    for case in range(1000):
        arrays, limits = random_case(np.random.default_rng([6, case]))
        compiled = repartition(*arrays, **limits)
        with in_python():
            python = repartition(*arrays, **limits)
        assert compiled.num_splits == python.num_splits, (case, limits)
        assert (compiled.pack is None) == (python.pack is None), (case, limits)
        if compiled.pack is not None and python.pack is not None:
            assert compiled.pack.tolist() == python.pack.tolist(), (case, limits)
        seen[compiled.num_splits > 0] += 1
    assert min(seen.values()) > 100, seen


def four_per_pack(seed: int, num_packs: int) -> np.ndarray:
    """Lognormal lengths of 1K to 8K."""
    shares = np.exp(np.random.default_rng(seed).normal(0, 1.1, 32 * num_packs))
    lengths = 4096 * shares[(shares > 0.25) & (shares < 2)][: 4 * num_packs]
    return np.sort(lengths.astype(np.int64))[::-1].copy()


def test_a_packing_is_found_that_other_searches_miss(form):
    """Steps took twice the microbatches, the second half of them nearly empty, where tokens fill 99.8 % of the packs of
    the first half.
    """
    length = four_per_pack(1, 24)
    capacity = int(length.sum()) * 1002 // 24_000
    assert best_fit(length, capacity=capacity)[1] == 25
    for steps, swerves in ((1000 * length.size, 1), (200_000, 200_000)):
        answer = search_packing(
            length, capacity=capacity, num_packs=24, swerves=swerves, steps_per_pack=400, budget=steps
        )
        assert answer.pack is None
    pack = fit_by_pairs(length, capacity=capacity, num_packs=24)
    assert pack is not None
    assert np.bincount(pack, weights=length).max() <= capacity
    assert np.unique(pack).tolist() == list(range(24))
    assert fit_by_pairs(length, capacity=capacity, num_packs=23) is None


def test_what_trades_leave_uneven_is_made_even(form):
    """Packs that tokens fill to 99.5 % were 3 % apart in cost: all ranks waited for the one with the long sequences."""
    length = four_per_pack(2, 32)
    capacity = int(length.sum()) * 1005 // 32_000
    cost = length + length * length // 2**16
    fair = int(cost.sum()) // 32
    assert spread(cost, length, num_ranks=32, capacity=capacity) is None
    pack = fit_by_pairs(length, capacity=capacity, num_packs=32)
    assert pack is not None
    traded = pack.copy()
    trade(cost, length, traded, num_ranks=32, capacity=capacity)
    assert pack_costs(cost, traded, 32).max() > 1.02 * fair
    limit = fair + fair // 200
    found = repartition(cost, length, pack, num_ranks=32, capacity=capacity, limit=limit, budget=200_000)
    assert found.pack is not None
    assert pack_costs(cost, found.pack, 32).max() <= limit
    assert np.bincount(found.pack, weights=length).max() <= capacity


def test_repartition_by_hand(form):
    """7 + 3 and 6 + 4 in packs of 10, from 7 + 6 and 4 + 3; what is within limits stays as it is."""
    length = array(7, 6, 4, 3)
    limits: dict[str, Any] = {"num_ranks": 2, "capacity": 10, "limit": 10, "budget": 1000}
    found = repartition(length, length, array(0, 0, 1, 1), **limits)
    assert found.pack is not None
    assert found.pack.tolist() == [1, 0, 0, 1]
    assert found.num_splits == 64 + 2 + 2**3  # one step of two packs with four sequences
    within = repartition(length, length, array(0, 1, 1, 0), **limits)
    assert within.pack is not None
    assert within.pack.tolist() == [0, 1, 1, 0]
    assert within.num_splits == 0


def test_ranks_start_with_loads(form):
    """Rows are lowered by loads that stand for what other rows may cost: 5 goes where there is room for it."""
    pack = array(0, 0, 1)
    limits: dict[str, Any] = {"num_ranks": 2, "capacity": 9, "limit": 9, "budget": 1000}
    found = repartition(array(5, 1, 1), array(5, 1, 1), pack, loads=array(5, 0), **limits)
    assert found.pack is not None
    assert pack_costs(array(5, 1, 1), found.pack, 2).tolist() in ([1, 6], [2, 5])
    assert repartition(array(5, 1, 1), array(5, 1, 1), pack, loads=array(5, 5), **limits).pack is None


def test_nothing_to_split(form):
    """One pack has no other; no sequences are within any limits."""
    assert repartition(array(9), array(9), array(0), num_ranks=1, capacity=8, limit=9, budget=99).pack is None
    assert repartition(array(), array(), array(), num_ranks=2, capacity=8, limit=9, budget=99).pack is not None
    assert fit_by_pairs(array(), capacity=8, num_packs=0) is not None
