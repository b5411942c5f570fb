"""pure. The inner loops of schedulers: put sequences, one after the other, on ranks and into packs with room.

Each function exists twice: in C++ (see `native`) and in Python (`loops`).

All arrays are int64. Sequences come in descending order of cost, which is the descending order of length as well; pack
numbers are rank * packs_per_rank + position. A sequence goes to the pack of its rank that has the fewest tokens.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megatron.packing.scheduling import loops, native
from megatron.packing.scheduling.native import address as _at

IntArray = npt.NDArray[np.int64]


def spread(
    cost: IntArray,
    length: IntArray,
    *,
    num_ranks: int,
    packs_per_rank: int = 1,
    capacity: int,
    loads: IntArray | None = None,
    tokens: IntArray | None = None,
) -> IntArray | None:
    """Each sequence to the rank of the least cost among those with room (Graham's LPT rule, 1969): its pack, [N].

    Ranks start with `loads` [num_ranks] and their packs with `tokens` [num_ranks * packs_per_rank], zeros unless
    given. None where a sequence finds no room. O(N log N): a rank without room waits until sequences are short enough
    for its emptiest pack; it then takes one for sure, so that it waits at most once per sequence it takes.
    """
    if native.LIBRARY is None:
        return loops.spread(cost, length, num_ranks, packs_per_rank, capacity, loads, tokens)
    pack = np.empty(cost.size, np.int64)
    costliest = native.LIBRARY.spread(
        cost.size, _at(cost), _at(length), num_ranks, packs_per_rank, capacity, _at(loads), _at(tokens), _at(pack)
    )
    return pack if costliest >= 0 else None


def spread_rest(
    cost: IntArray,
    length: IntArray,
    pack: IntArray,
    *,
    num_ranks: int,
    packs_per_rank: int = 1,
    capacity: int,
    loads: IntArray | None = None,
) -> int | None:
    """The sequences without a pack, -1 in `pack` [N], spread over what the others leave, in place (see `spread`); ranks
    have `loads` [num_ranks], zeros unless given, besides.

    The cost of the costliest rank, or None where a sequence finds no room: `pack` is then as it was. O(N log N).
    """
    if native.LIBRARY is None:
        return loops.spread_rest(cost, length, pack, num_ranks, packs_per_rank, capacity, loads)
    costliest: int = native.LIBRARY.spread_rest(
        cost.size, _at(cost), _at(length), num_ranks, packs_per_rank, capacity, _at(loads), _at(pack)
    )
    return costliest if costliest >= 0 else None


def first_fit(
    cost: IntArray,
    length: IntArray,
    *,
    num_ranks: int,
    packs_per_rank: int = 1,
    capacity: int,
    limit: int,
    ceiling: int | None = None,
    overhead: int = 0,
    opens_above: int = -1,
) -> tuple[IntArray, int]:
    """Each sequence to the first rank with room for its cost and tokens: its pack [N], -1 without room; ranks in use.

    A rank may hold a cost of `limit`, and of at most `ceiling - overhead * cost of its first sequence`, which is its
    costliest. Only sequences above `opens_above` take a rank into use. O(N log num_ranks), as a rule.
    """
    ceiling = limit if ceiling is None else ceiling
    if native.LIBRARY is None:
        return loops.first_fit(cost, length, num_ranks, packs_per_rank, capacity, limit, ceiling, overhead, opens_above)
    pack = np.empty(cost.size, np.int64)
    in_use = native.LIBRARY.first_fit(
        *(cost.size, _at(cost), _at(length), num_ranks, packs_per_rank, capacity),
        *(limit, ceiling, overhead, opens_above, _at(pack)),
    )
    return pack, in_use


def fill(cost: IntArray, length: IntArray, *, num_packs: int, capacity: int, limit: int) -> IntArray:
    """Each sequence to the pack of the least cost among those with room for its tokens, if that has room for its cost
    up to `limit` as well: its pack [N], -1 without room. O(N log N).

    Packs then hold costly and cheap sequences alike, where `first_fit` fills the last ones with cheap ones: more fit in
    where those cost too little to fill a pack.
    """
    if native.LIBRARY is None:
        pack = loops.spread(cost, length, num_packs, 1, capacity, None, None, limit)
        assert pack is not None, "a sequence without room is left out"
        return pack
    pack = np.empty(cost.size, np.int64)
    native.LIBRARY.fill(cost.size, _at(cost), _at(length), num_packs, capacity, limit, _at(pack))
    return pack


def best_fit(length: IntArray, *, capacity: int) -> tuple[IntArray, int]:
    """Each sequence to the fullest pack with room, else to a new one (best-fit decreasing): its pack [N]; packs."""
    if native.LIBRARY is None:
        return loops.best_fit(length, capacity)
    pack = np.empty(length.size, np.int64)
    return pack, native.LIBRARY.best_fit(length.size, _at(length), capacity, _at(pack))


def keep(
    cost: IntArray,
    length: IntArray,
    home: IntArray,
    *,
    num_ranks: int,
    packs_per_rank: int,
    capacity: int,
    limit: int,
) -> IntArray:
    """Each sequence to its own rank, `home` [N], while that has room up to a cost of `limit`; -1 for the others."""
    pack = np.empty(cost.size, np.int64)
    if native.LIBRARY is None:
        return loops.keep(cost, length, home, num_ranks, packs_per_rank, capacity, limit)
    native.LIBRARY.keep(
        *(cost.size, _at(cost), _at(length), _at(home)),
        *(num_ranks, packs_per_rank, capacity, limit, _at(pack)),
    )
    return pack


def trade(
    cost: IntArray,
    length: IntArray,
    pack: IntArray,
    *,
    num_ranks: int,
    packs_per_rank: int = 1,
    capacity: int,
    loads: IntArray | None = None,
    partners: int = 8,
    traded: int = 24,
    budget: int = 200_000,
) -> None:
    """Lower the cost of the costliest rank, in place: it gives a sequence to one of the `partners` cheapest ranks (if
    that does not help, to any), or trades one for another, whatever lowers the higher cost of the two most; again and
    again, until nothing does or `budget` pairs of sequences have been looked at. Ranks start with `loads` [num_ranks],
    zeros unless given, besides what they hold. Each offers `traded` sequences of all costs. No pack that holds a
    sequence is left empty.
    """
    if native.LIBRARY is None:
        loops.trade(cost, length, pack, num_ranks, packs_per_rank, capacity, loads, partners, traded, budget)
        return
    native.LIBRARY.trade(
        *(cost.size, _at(cost), _at(length), num_ranks, packs_per_rank, capacity),
        *(_at(loads), partners, traded, budget, _at(pack)),
    )
