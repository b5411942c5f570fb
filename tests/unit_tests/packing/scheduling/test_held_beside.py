"""What packs hold beside their costliest sequence, against all that they can hold."""

import itertools

import numpy as np

from megatron.packing.scheduling.held_beside import HeldBeside, most_held


def test_tables_against_all_ways_to_fill_a_pack():
    """Too little held would make a bound of what is none."""
    for case in range(400):
        rng = np.random.default_rng([3, case])
        num_tiers, room, capacity = (int(rng.integers(1, high)) for high in (5, 25, 25))
        size, price = (np.sort(rng.integers(0, high, num_tiers))[::-1].astype(np.int64) for high in (12, 10))
        tokens = np.minimum(np.sort(rng.integers(0, 12, num_tiers))[::-1], capacity).astype(np.int64)
        count = rng.integers(1, 6, num_tiers).astype(np.int64)
        by_cost, by_tokens = HeldBeside(size, price, count, room), HeldBeside(tokens, price, count, capacity)
        ways = np.array(list(itertools.product(*[range(number + 1) for number in count.tolist()])))
        sizes, all_tokens, prices = ways @ size, ways @ tokens, ways @ price
        for tier in range(num_tiers):
            none_costlier = ~ways[:, :tier].any(axis=1)
            most = [prices[none_costlier & (sizes <= left)].max() for left in range(room + 1)]
            assert by_cost.of(tier).tolist() == most
        beside = by_cost.most_beside(room)
        tiers = np.flatnonzero(beside >= 0)
        assert (tiers == np.flatnonzero(size <= room)).all()
        for tier, held in zip(tiers.tolist(), by_cost.held_beside(tiers, room), strict=True):
            assert price[held].sum() == beside[tier]
            assert size[held].sum() <= room - size[tier]
            assert all(other >= tier and held.count(other) <= count[other] for other in held)
        held_at_most = most_held(price, by_cost, by_tokens)
        for left in range(room + 1):
            assert held_at_most[left] >= prices[(sizes <= left) & (all_tokens <= capacity)].max()


def test_both_limits_count_beside_the_costliest():
    """A pack of cost 10 and 10 tokens: of 9 and its like there is room for one by cost, of 2 and its like by tokens."""
    price, count = np.array([9, 2]), np.array([2, 20])
    by_cost = HeldBeside(np.array([9, 1]), price, count, 10)
    by_tokens = HeldBeside(np.array([2, 2]), price, count, 10)
    assert most_held(price, by_cost, by_tokens)[10] == 11
    assert most_held(price, by_cost, by_tokens)[8] == 10
