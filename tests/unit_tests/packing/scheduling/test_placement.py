"""The inner loops: literal results, and the compiled form equal to the Python form to the bit."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from megatron.packing.scheduling.placement import best_fit, fill, first_fit, keep, spread, spread_rest, trade
from tests.unit_tests.packing.stubs import array, in_python, needs_compiled

IntArray = npt.NDArray[np.int64]


def descending(rng, size: int, longest: int) -> tuple[IntArray, IntArray]:
    """Costs and lengths, both descending, with many ties in some cases."""
    length = np.sort(rng.integers(1, longest + 1, size))[::-1].astype(np.int64)
    return length * (1 + int(rng.integers(0, 3)) * length), length


def random_spread(rng) -> tuple[Any, ...]:
    cost, length = descending(rng, int(rng.integers(0, 40)), int(rng.choice([1, 3, 50])))
    num_ranks, packs_per_rank = int(rng.integers(1, 9)), int(rng.integers(1, 6))
    capacity = int(length.max(initial=1) * rng.choice([1, 1.5, 3, 100]))
    options: dict[str, Any] = {"num_ranks": num_ranks, "packs_per_rank": packs_per_rank, "capacity": capacity}
    if rng.random() < 0.5:
        options["loads"] = rng.integers(0, 100, num_ranks)
        options["tokens"] = rng.integers(0, capacity + 1, num_ranks * packs_per_rank)
    return spread(cost, length, **options), True


def random_spread_rest(rng) -> tuple[Any, ...]:
    cost, length = descending(rng, int(rng.integers(0, 40)), int(rng.choice([1, 3, 50])))
    num_ranks, packs_per_rank = int(rng.integers(1, 9)), int(rng.integers(1, 6))
    pack = np.where(rng.random(cost.size) < rng.random(), -1, rng.integers(0, num_ranks * packs_per_rank, cost.size))
    costliest = spread_rest(
        *(cost, length, pack),
        num_ranks=num_ranks,
        packs_per_rank=packs_per_rank,
        capacity=int(length.max(initial=1) * rng.choice([1, 1.5, 3, 100])),
        loads=None if rng.random() < 0.5 else rng.integers(0, 100, num_ranks),
    )
    return pack, costliest


def random_first_fit(rng) -> tuple[Any, ...]:
    cost, length = descending(rng, int(rng.integers(0, 60)), int(rng.choice([1, 3, 50])))
    num_ranks = int(rng.integers(1, 12))
    limit = int(cost.max(initial=1) * rng.uniform(0.5, 2) + rng.uniform(0, 1.2) * cost.sum() / num_ranks)
    options: dict[str, Any] = {}
    if rng.random() < 0.5:
        options |= {"ceiling": int(limit * rng.uniform(0.8, 3)), "overhead": int(rng.integers(0, 4))}
        options["opens_above"] = int(cost.max(initial=1) * rng.uniform(-0.1, 1))
    return first_fit(
        *(cost, length),
        num_ranks=num_ranks,
        packs_per_rank=int(rng.integers(1, 6)),
        capacity=int(length.max(initial=1) * rng.choice([0.7, 1, 2, 100])) + 1,
        limit=limit,
        **options,
    )


def random_fill(rng) -> tuple[Any, ...]:
    cost, length = descending(rng, int(rng.integers(0, 60)), int(rng.choice([1, 3, 50])))
    num_packs = int(rng.integers(1, 12))
    pack = fill(
        *(cost, length),
        num_packs=num_packs,
        capacity=int(length.max(initial=1) * rng.choice([0.7, 1, 2, 100])) + 1,
        limit=int(cost.max(initial=1) * rng.uniform(0.5, 2) + rng.uniform(0, 1.2) * cost.sum() / num_packs),
    )
    return pack, True


def random_best_fit(rng) -> tuple[Any, ...]:
    _, length = descending(rng, int(rng.integers(0, 60)), int(rng.choice([1, 3, 50])))
    return best_fit(length, capacity=int(length.max(initial=1) * rng.uniform(1, 4)))


def random_keep(rng) -> tuple[Any, ...]:
    cost, length = descending(rng, int(rng.integers(0, 60)), int(rng.choice([1, 3, 50])))
    num_ranks = int(rng.integers(1, 9))
    pack = keep(
        *(cost, length, rng.integers(0, num_ranks, cost.size)),
        num_ranks=num_ranks,
        packs_per_rank=int(rng.integers(1, 6)),
        capacity=int(length.max(initial=1) * rng.choice([1, 2, 100])),
        limit=int(cost.sum() / num_ranks * rng.uniform(0.3, 1.5)),
    )
    return pack, True


def random_trade(rng) -> tuple[Any, ...]:
    cost, length = descending(rng, int(rng.integers(1, 40)), int(rng.choice([3, 50])))
    num_ranks, packs_per_rank = int(rng.integers(1, 12)), int(rng.integers(1, 4))
    pack = rng.integers(0, num_ranks * packs_per_rank, cost.size)
    capacity = int(np.bincount(pack, weights=length).max() * rng.choice([1, 1.2, 10]))
    trade(
        *(cost, length, pack),
        num_ranks=num_ranks,
        packs_per_rank=packs_per_rank,
        capacity=capacity,
        loads=None if rng.random() < 0.5 else rng.integers(-int(cost.sum()), int(cost.sum()) + 1, num_ranks),
        partners=int(rng.choice([1, 2, 8])),
        budget=int(rng.choice([0, 100, 1000, 200_000])),
    )
    return pack, True


CASES: dict[str, Callable[..., tuple[Any, ...]]] = {
    "spread": random_spread,
    "spread_rest": random_spread_rest,
    "first_fit": random_first_fit,
    "fill": random_fill,
    "best_fit": random_best_fit,
    "keep": random_keep,
    "trade": random_trade,
}


@needs_compiled
@pytest.mark.parametrize("name", CASES)
def test_compiled_and_python_form_are_equal(name):
    """Ranks with and without a compiler would follow different schedules: tokens sent to ranks that expect others."""
    seen = set()
    for case in range(2000):
        numbers, other = CASES[name](np.random.default_rng([9, case]))
        with in_python():
            numbers_in_python, other_in_python = CASES[name](np.random.default_rng([9, case]))
        assert other == other_in_python, case
        if numbers is None:
            assert numbers_in_python is None, case
            seen.add("nothing")
            continue
        assert numbers_in_python.dtype == numbers.dtype == np.int64
        assert numbers_in_python.tolist() == numbers.tolist(), case
        seen.add("a sequence left out" if numbers.min(initial=0) < 0 else "all placed")
        seen |= {"nothing"} if other is None else set()
    failures = {
        "spread": {"nothing"},
        "spread_rest": {"nothing", "a sequence left out"},
        "best_fit": set(),
        "trade": set(),
    }.get(name, {"a sequence left out"})
    assert seen == failures | {"all placed"}


def places(cost: IntArray, **options: Any) -> list[int] | None:
    """What `spread` does with sequences that cost as much as they are long."""
    pack = spread(cost, cost, **options)
    return None if pack is None else pack.tolist()


def test_spread_by_hand(form):
    """Each to the cheapest rank, ties to the first; within the rank to the pack with the fewest tokens."""
    assert places(array(5, 4, 3, 3, 2), num_ranks=2, capacity=100) == [0, 1, 1, 0, 1]
    assert places(array(5, 4, 3, 3, 2), num_ranks=2, packs_per_rank=2, capacity=100) == [0, 2, 3, 1, 3]
    begun = {"loads": array(0, 20), "tokens": array(90, 0)}
    assert places(array(5, 4, 3, 3, 2), num_ranks=2, capacity=100, **begun) == [0, 0, 1, 1, 1]


def test_spread_without_room(form):
    """A rank without room waits, and is back when sequences are short enough."""
    assert places(array(9, 6, 6, 5, 5, 4, 4), num_ranks=2, packs_per_rank=2, capacity=10) == [0, 2, 3, 1, 1, 2, 3]
    assert places(array(3, 3, 3), num_ranks=1, capacity=8) is None
    assert places(array(), num_ranks=3, capacity=1) == []


def test_spread_rest_by_hand(form):
    """What has a pack stays there and counts; without room for the rest nothing is changed."""
    cost = length = array(5, 4, 3, 3, 2)
    pack = array(0, -1, 1, -1, -1)
    assert spread_rest(cost, length, pack, num_ranks=2, capacity=100) == 9  # 5 + 3, and 3 + 4 + 2
    assert pack.tolist() == [0, 1, 1, 0, 1]
    pack = array(0, -1, 1, -1, -1)
    assert spread_rest(cost, length, pack, num_ranks=2, capacity=100, loads=array(9, 0)) == 14
    assert pack.tolist() == [0, 1, 1, 1, 1]
    pack = array(0, -1, 1, -1, -1)
    assert spread_rest(cost, length, pack, num_ranks=2, packs_per_rank=1, capacity=8) is None
    assert pack.tolist() == [0, -1, 1, -1, -1]
    assert spread_rest(cost, length, array(0, 0, 2, 2, 3), num_ranks=2, packs_per_rank=2, capacity=1) == 9


def test_costs_and_tokens_of_any_size(form):
    """Costs that leave no room for a rank's number beside them take wider integers: ties would be broken otherwise."""
    cost, length = array(*[2**58] * 6), array(*[2**57] * 6)
    options: dict[str, Any] = {"num_ranks": 5, "packs_per_rank": 3, "capacity": 2**60}
    spread_out = spread(cost, length, **options)
    assert spread_out is not None
    assert spread_out.tolist() == [0, 3, 6, 9, 12, 1]
    pack, in_use = first_fit(cost, length, **options, limit=2**59)
    assert (pack.tolist(), in_use) == ([0, 1, 3, 4, 6, 7], 3)
    home = array(0, 0, 0, 0, 4, 4)
    assert keep(cost, length, home, **options, limit=2**60).tolist() == [0, 1, 2, 0, 12, 13]


def test_first_fit_by_hand(form):
    """The first rank with room for cost and tokens, new ranks in turn; -1 where there is none."""
    cost = length = array(6, 5, 4, 3, 2)
    pack, in_use = first_fit(cost, length, num_ranks=3, capacity=100, limit=10)
    assert (pack.tolist(), in_use) == ([0, 1, 0, 1, 1], 2)
    pack, in_use = first_fit(cost, length, num_ranks=1, capacity=100, limit=10)
    assert (pack.tolist(), in_use) == ([0, -1, 0, -1, -1], 1)
    pack, in_use = first_fit(cost, length, num_ranks=3, packs_per_rank=2, capacity=6, limit=12)
    assert (pack.tolist(), in_use) == ([0, 1, 2, 3, 3], 2)


def test_fill_by_hand(form):
    """The cheapest pack with room for its tokens; none where that has no room for its cost."""
    cost = array(6, 5, 4, 4, 1, 1)
    pack = fill(cost, cost, num_packs=2, capacity=100, limit=9)
    assert pack.tolist() == [0, 1, 1, -1, 0, 0]
    pack = fill(cost, array(5, 5, 1, 1, 1, 1), num_packs=2, capacity=6, limit=100)
    assert pack.tolist() == [0, 1, 1, 0, -1, -1]
    assert fill(array(), array(), num_packs=2, capacity=6, limit=100).tolist() == []


def test_first_fit_in_pipelines_by_hand(form):
    """The first sequence of a rank, its costliest, takes `overhead` times its cost of the ceiling; short ones open no
    rank.
    """
    cost = length = array(6, 5, 4, 3, 2)
    options = {"num_ranks": 9, "capacity": 100, "limit": 10, "ceiling": 15, "overhead": 1}
    pack, in_use = first_fit(cost, length, **options)  # rooms of 15 - 6 = 9 and 15 - 5 = 10
    assert (pack.tolist(), in_use) == ([0, 1, 1, 0, 2], 3)
    pack, in_use = first_fit(cost, length, **options, opens_above=4)
    assert (pack.tolist(), in_use) == ([0, 1, 1, 0, -1], 2)
    pack, in_use = first_fit(cost, length, **(options | {"ceiling": 11}))  # 11 - 6 is no room for 6
    assert pack.tolist()[:2] == [-1, 0]


def test_best_fit_by_hand(form):
    """The fullest pack with room, among equals the first."""
    pack, num_packs = best_fit(array(7, 6, 4, 3, 3, 3), capacity=10)
    assert (pack.tolist(), num_packs) == ([0, 1, 1, 0, 2, 2], 3)
    assert best_fit(array(), capacity=10)[1] == 0


def test_keep_by_hand(form):
    """Own rank or nowhere: up to the limit of cost, and into the emptiest pack only if that has room."""
    cost = length = array(5, 4, 4, 2, 1)
    home = array(0, 0, 1, 0, 0)
    options = {"num_ranks": 2, "packs_per_rank": 1}
    assert keep(cost, length, home, **options, capacity=100, limit=8).tolist() == [0, -1, 1, 0, 0]
    assert keep(cost, length, home, **options, capacity=7, limit=100).tolist() == [0, -1, 1, 0, -1]
    assert keep(cost, length, home, num_ranks=2, packs_per_rank=2, capacity=5, limit=9).tolist() == [0, 1, 2, -1, -1]


def test_trade_by_hand(form):
    """What lowers the higher of the two costs most: a gift or an exchange."""

    def traded(cost, pack, **options) -> list[int]:
        numbers = array(*pack)
        trade(array(*cost), array(*cost), numbers, **({"packs_per_rank": 1, "capacity": 100} | options))
        return numbers.tolist()

    assert traded([4, 3, 2, 1], [0, 0, 0, 1], num_ranks=2) == [1, 0, 0, 1]  # 9 and 1: 4 goes over
    assert traded([5, 4, 2, 1], [0, 0, 1, 1], num_ranks=2) == [1, 0, 0, 1]  # 9 and 3: 5 for 2 leaves 6, 6
    assert traded([5, 4, 2, 1], [0, 0, 1, 1], num_ranks=2, budget=5) == [0, 0, 1, 1]  # 2 * (2 + 1) pairs to look at
    assert traded([5, 4], [0, 0], num_ranks=2, capacity=9) == [1, 0]
    assert traded([5, 4], [0, 0], num_ranks=2, capacity=4) == [0, 1]  # the 5 has no room there
    assert traded([5, 4], [0, 1], num_ranks=2, packs_per_rank=2) == [0, 1]  # a pack would be left empty
    assert traded([4, 3, 2, 1], [0, 0, 0, 1], num_ranks=2, loads=array(-4, 4)) == [0, 0, 0, 1]  # 5 and 5 with loads
    assert traded([4, 3, 2, 1], [0, 0, 0, 1], num_ranks=2, loads=array(0, -8)) == [
        1,
        1,
        1,
        0,
    ]  # 9 and -7 become 1 and 1


def test_trade_never_makes_it_worse():
    """A trade that a capacity or an empty pack forbids would be found only as out of memory or lost time."""
    rng = np.random.default_rng(6)
    better = 0
    for _ in range(500):
        cost, length = descending(rng, int(rng.integers(2, 40)), 50)
        num_ranks, packs_per_rank = int(rng.integers(2, 9)), int(rng.integers(1, 4))
        num_packs = num_ranks * packs_per_rank
        before = rng.integers(0, num_packs, cost.size)
        capacity = int(np.bincount(before, weights=length).max())
        after = before.copy()
        trade(cost, length, after, num_ranks=num_ranks, packs_per_rank=packs_per_rank, capacity=capacity)
        assert np.bincount(after, weights=length).max() <= capacity
        used = [np.bincount(pack, minlength=num_packs) > 0 for pack in (before, after)]
        assert (used[1] | ~used[0]).all()
        highest = [np.bincount(pack // packs_per_rank, weights=cost).max() for pack in (before, after)]
        assert highest[1] <= highest[0]
        better += highest[1] < highest[0]
    assert better > 400
