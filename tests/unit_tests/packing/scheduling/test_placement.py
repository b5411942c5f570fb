"""Putting sequences on ranks and into packs, compiled and by the plain ways without a compiler."""

import numpy as np
import pytest

from megatron.packing.scheduling.placement import (
    PackGrid,
    bisect_ranks,
    deal,
    first_fit,
    largest_rank,
    place_longest_first,
    split_ranks,
    sums_of_packs,
    trade,
)
from megatron.packing.scheduling.tight_packs import best_fit, complete_packs, tight_packs
from tests.unit_tests.packing.brute_force import check_packing, descending
from tests.unit_tests.packing.requests import request
from tests.unit_tests.packing.stubs import array, in_python, needs_compiled

plain_and_compiled = pytest.mark.usefixtures("form")


def costs(*values: float) -> np.ndarray:
    return np.array(values, np.float64)


@plain_and_compiled
def test_place_longest_first_by_hand():
    """Costliest first to the cheapest rank, there to the emptiest pack; a full rank is passed over
    until one fits.
    """
    lengths = array(6, 5, 4, 3, 3, 1)
    found = place_longest_first(lengths, lengths.astype(float), PackGrid(2, 2, 9))
    assert found is not None
    assert found.tolist() == [0, 2, 3, 1, 1, 3]
    assert place_longest_first(array(5, 5, 5), costs(5, 5, 5), PackGrid(2, 1, 9)) is None
    passed_over = place_longest_first(array(5, 5, 2), costs(5, 5, 2), PackGrid(2, 1, 6), limit=6.0)
    assert passed_over is not None
    assert passed_over.tolist() == [0, 1, -1]
    begun = place_longest_first(
        array(4, 3, 2),
        costs(4, 3, 2),
        PackGrid(2, 1, 9),
        begun=array(-1, 1, -1),
        loads=np.array([2.0, 0.0]),
    )
    assert begun is not None
    assert begun.tolist() == [0, 1, 1]


@plain_and_compiled
def test_first_fit_by_hand():
    """The limits of cost and tokens, of the rank and of its first sequence, and who opens a
    rank."""
    pack, in_use = first_fit(array(6, 5, 4, 3), costs(6, 5, 4, 3), PackGrid(3, 1, 10), limit=10.0)
    assert (pack.tolist(), in_use) == ([0, 1, 0, 1], 2)
    pack, in_use = first_fit(
        array(6, 5, 4, 3), costs(6, 5, 4, 3), PackGrid(3, 2, 10), limit=9.0, opens_above=4.5
    )
    assert (pack.tolist(), in_use) == ([0, 2, 3, 1], 2)
    # A rank whose first sequence costs 6 holds 20 - 2 * 6 = 8 in all.
    pack, _ = first_fit(
        array(6, 4, 2), costs(6, 4, 2), PackGrid(1, 3, 10), limit=10.0, ceiling=20.0, overhead=2.0
    )
    assert pack.tolist() == [0, -1, 1]


@plain_and_compiled
def test_best_fit_by_hand():
    """The fullest pack that can take it: first-fit would put the 3 beside the 5, and need a fourth
    pack.
    """
    pack, num_packs = best_fit(array(6, 5, 5, 3, 3), 10)
    assert (pack.tolist(), num_packs) == ([0, 1, 1, 0, 2], 3)
    assert best_fit(array(), 10)[1] == 0


@plain_and_compiled
def test_all_ways_keep_capacity():
    """A pack over capacity is out of memory on one GPU hours later."""
    rng = np.random.default_rng(3)
    found = 0
    for _ in range(60):
        length = descending(rng, 1, 60, rng.integers(1, 60))
        cost = length * (1.0 + length)
        packs = PackGrid(
            int(rng.integers(1, 6)), int(rng.integers(1, 6)), int(rng.integers(60, 200))
        )
        check_packing(best_fit(length, packs.capacity)[0], length, packs.capacity, length.size)
        pack = place_longest_first(length, cost, packs)
        if pack is None:
            continue
        found += 1
        dealt = place_longest_first(length, cost, packs.each_alone())
        ways = [pack, trade(length, cost, pack, packs), split_ranks(length, cost, pack, packs)]
        ways += [] if dealt is None else [deal(cost, dealt, packs)]
        bisected = bisect_ranks(length, cost, packs, largest_rank(cost, pack, packs))
        ways += [] if bisected is None else [bisected]
        for way in ways:
            check_packing(way, length, packs.capacity, packs.num_packs)
        assert bisected is None or largest_rank(cost, bisected, packs) < largest_rank(
            cost, pack, packs
        )
        assert largest_rank(cost, ways[1], packs) <= largest_rank(cost, pack, packs)
        assert (ways[2] // packs.num_microbatches == pack // packs.num_microbatches).all()
    assert found > 20


@plain_and_compiled
def test_split_ranks_by_weights():
    """A pipeline's shape is worth what packs follow it."""
    length = np.ones(40, np.int64)
    split = split_ranks(
        length, np.ones(40), np.repeat([0, 1], 20), PackGrid(1, 2, 40), weights=np.array([1.0, 3.0])
    )
    assert np.bincount(split).tolist() == [10, 30]
    even = split_ranks(length, np.ones(40), split, PackGrid(1, 2, 40), only_where_lower=True)
    assert np.bincount(even).tolist() == [20, 20]


@needs_compiled
def test_trade_evens_out_what_no_single_move_can():
    """Without trades one for another, 7 5 | 4 4 stays as it is; by them it becomes 7 4 | 5 4."""
    length = array(7, 5, 4, 4)
    packs = PackGrid(2, 1, 12)
    traded = trade(length, length.astype(float), array(0, 0, 1, 1), packs)
    assert sums_of_packs(length.astype(float), traded, packs).ravel().tolist() in ([11, 9], [9, 11])


@needs_compiled
def test_others_trade_where_the_costliest_rank_finds_none():
    """Costs are squares: 7 3 2 finds no trade as long as 4 4 3 and 6 4 2 are as they are."""
    length = array(7, 6, 4, 4, 4, 3, 3, 2, 2)
    pack, packs = array(0, 2, 1, 2, 1, 0, 1, 0, 2), PackGrid(3, 1, 12)
    cost = length.astype(float) ** 2
    highest = [
        largest_rank(cost, trade(length, cost, pack, packs, aim=aim), packs) for aim in (62.0, 61.0)
    ]
    assert highest == [62, 57]


@needs_compiled
def test_bin_completion_finds_what_best_fit_does_not():
    """A microbatch that need not be: 10 7 | 8 7 5 | 6 6 6 5 fit into three packs of 20, best-fit
    takes four.
    """
    length = array(10, 8, 7, 7, 6, 6, 6, 5, 5)
    assert best_fit(length, 20)[1] == 4
    with in_python():
        assert tight_packs(request(length, 3, 20), 1).num_microbatches == 2
    pack = complete_packs(length, 20, 3)
    assert pack is not None
    check_packing(pack, length, 20, 3)
    assert tight_packs(request(length, 3, 20), 1).num_microbatches == 1
    assert complete_packs(array(6, 6, 6, 2), 10, 2) is None


@needs_compiled
@pytest.mark.parametrize("seed", range(30))
def test_bin_completion_fills_packs_that_are_known_to_exist(seed):
    """Cut from full packs, so that there is a packing, and every token free is one too many
    elsewhere.
    """
    rng = np.random.default_rng(seed)
    cuts = [np.sort(rng.choice(np.arange(1, 100), 3, replace=False)) for _ in range(8)]
    length = np.sort(np.concatenate([np.diff([0, *cut, 100]) for cut in cuts]))[::-1].astype(
        np.int64
    )
    pack = complete_packs(length, 102, 8)
    assert pack is not None
    check_packing(pack, length, 102, 8)
