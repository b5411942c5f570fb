"""Placements made over: literal results, and the compiled form equal to the numpy form to the bit."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from megatron.packing.scheduling.repacking import deal, fill_empty, match, place_by_cost, renumber, split_ranks
from megatron.packing.scheduling.work import pack_costs, stable_order
from tests.unit_tests.packing.stubs import array, in_python, needs_compiled


def random_placement(rng) -> tuple[Any, ...]:
    """Costs, lengths and packs of sequences; ranks and microbatches. Some of thousands, for other ways to sort."""
    size = int(rng.choice([0, 1, 10, 60, 300, 5000], p=[0.05, 0.1, 0.4, 0.35, 0.09, 0.01]))
    num_ranks, num_microbatches = int(rng.integers(1, 9)), int(rng.integers(1, 6))
    length = np.sort(rng.integers(1, int(rng.choice([2, 50, 5000])), size))[::-1].copy()
    cost = length * (1 + int(rng.choice([0, 1, 2**15])) * length)
    return cost, length, rng.integers(0, num_ranks * num_microbatches, size), num_ranks, num_microbatches


def random_deal(rng) -> np.ndarray:
    cost, _, pack, *shape = random_placement(rng)
    return deal(cost, pack, *shape)


def random_split(rng) -> np.ndarray:
    cost, length, pack, num_ranks, num_microbatches = random_placement(rng)
    return split_ranks(
        *(cost, length, pack),
        num_ranks=num_ranks,
        capacity=int(length.max(initial=1) * rng.choice([1, 2, 5, 1000])),
        weights=rng.integers(1, int(rng.choice([2, 1001])), num_microbatches),
        only_where_lower=bool(rng.integers(2)),
    )


def random_fill_empty(rng) -> np.ndarray:
    _, _, pack, num_ranks, num_microbatches = random_placement(rng)
    fill_empty(pack, num_ranks * num_microbatches)
    return pack


def random_place_by_cost(rng) -> np.ndarray:
    costs = rng.integers(0, int(rng.choice([2, 10, 2**40])), (int(rng.integers(1, 5)), int(rng.integers(1, 40))))
    return place_by_cost(costs, rng.permutation(costs.shape[1]))


def random_match(rng) -> np.ndarray:
    _, length, part, num_ranks, num_microbatches = random_placement(rng)
    size = num_ranks * num_microbatches
    place = rng.integers(0, size, part.size)
    return match(part, place, length * int(rng.choice([1, 2**40])), size, int(rng.choice([1, 8, 100])) * size)


def random_pack_costs(rng) -> np.ndarray:
    cost, _, pack, num_ranks, num_microbatches = random_placement(rng)
    return pack_costs(cost, pack, num_ranks * num_microbatches, int(rng.integers(0, 100)))


def random_order(rng) -> np.ndarray:
    high = int(rng.choice([1, 2, 1000, 2**17, 2**33, 2**62]))
    return stable_order(rng.integers(-high, high, int(rng.choice([0, 1, 2, 255, 256, 5000]))))


CASES: dict[str, Callable[[np.random.Generator], np.ndarray]] = {
    "deal": random_deal,
    "split_ranks": random_split,
    "fill_empty": random_fill_empty,
    "place_by_cost": random_place_by_cost,
    "match": random_match,
    "pack_costs": random_pack_costs,
    "stable_order": random_order,
}


@needs_compiled
@pytest.mark.parametrize("name", CASES)
def test_compiled_and_numpy_form_are_equal(name):
    """Ranks with and without a compiler would follow different schedules: tokens sent to ranks that expect others."""
    sizes = set()
    for case in range(1000):
        compiled = CASES[name](np.random.default_rng([10, case]))
        with in_python():
            in_numpy = CASES[name](np.random.default_rng([10, case]))
        assert compiled.dtype == in_numpy.dtype == np.int64
        assert compiled.tolist() == in_numpy.tolist(), case
        sizes.add(compiled.size)
    assert len(sizes) >= 5


def test_deal_by_hand(form):
    """Packs of 9, 6, 5, 4 on two ranks of two: 9 + 4 and 6 + 5."""
    pack = deal(array(9, 6, 5, 4), array(0, 1, 2, 3), 2, 2)
    assert pack.tolist() == [0, 2, 3, 1]
    assert deal(array(9, 6, 5, 4), array(1, 0, 0, 1), 2, 1).tolist() == [0, 1, 1, 0]


def test_split_ranks_by_hand(form):
    """Each rank anew, in proportion to the weights; a rank for which capacity is too tight stays as it was."""
    cost = array(6, 5, 5, 4, 2, 2)
    pack = array(0, 3, 2, 0, 0, 3)

    def split(capacity: int, *weights: int, **options: Any) -> list[int]:
        other = split_ranks(cost, cost, pack, num_ranks=2, capacity=capacity, weights=array(*weights), **options)
        return other.tolist()

    assert split(7, 1, 1) == [0, 2, 3, 1, 1, 2]
    assert split(6, 1, 1) == [0, 3, 2, 1, 1, 3]
    # Of 12 on rank 0 the second pack is to hold three parts of four: the first begins with 2 * (12 // 4) = 6.
    assert split(12, 1, 3) == [1, 3, 3, 0, 1, 2]
    # 6 + 4 + 2 in one pack cost less in two, but 5 + 2 and 5 do not cost less as 5 + 2 and 5.
    assert split(7, 1, 1, only_where_lower=True) == [0, 3, 2, 1, 1, 3]


def test_fill_empty_by_hand(form):
    """The shortest that share a pack, to the last empty pack first; nothing where sequences are too few."""
    pack = array(0, 0, 1, 1, 1)
    fill_empty(pack, 4)
    assert pack.tolist() == [0, 0, 1, 2, 3]
    pack = array(0, 0, 0)
    fill_empty(pack, 4)
    assert pack.tolist() == [0, 0, 0]


def test_place_by_cost_by_hand(form):
    """The costliest to the first place in the order, equal ones as they come."""
    costs = np.array([[5, 7, 5], [1, 2, 3]])
    place = place_by_cost(costs, array(1, 0, 2))
    assert place.tolist() == [[0, 1, 2], [2, 0, 1]]
    assert renumber(array(0, 1, 2, 3, 4, 5), place).tolist() == [0, 1, 2, 5, 3, 4]


def test_match_by_hand(form):
    """Part 0 shares 3 + 2 with place 1, part 1 shares 4 with it: part 0 gets it, and part 1 what is left."""
    part, place, weight = array(0, 1, 0, 2), array(1, 1, 1, 2), array(3, 4, 2, 1)
    assert match(part, place, weight, 3, 9).tolist() == [1, 0, 2]
    assert match(array(0, 1), array(1, 1), array(3, 4), 2, 1).tolist() == [0, 1]
    assert match(array(), array(), array(), 2, 9).tolist() == [0, 1]


def test_pack_costs_by_hand(form):
    """A pack of another schedule would be counted in memory that belongs to something else."""
    assert pack_costs(array(5, 4, 3), array(1, 0, 1), 3, 10).tolist() == [14, 18, 10]
    for packs in (array(0, 3, 0), array(0, -1, 0)):
        with pytest.raises(ValueError, match="packs must be 0 to 2, but span"):
            pack_costs(array(5, 4, 3), packs, 3)
