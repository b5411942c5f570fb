"""pure. Among placements that are as good, one that moves fewer tokens between data-parallel ranks.

Where ranks meet only at the end of a step, each rank first keeps sequences that it drew itself, up to what the
costliest rank of the schedule may hold; only the rest is spread. Whole sets of packs may trade ranks in every case.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megatron.packing.scheduling.placement import keep, spread_rest, trade
from megatron.packing.scheduling.repacking import match
from megatron.packing.scheduling.step_time import StepModel
from megatron.packing.scheduling.work import MANY, Work, pack_costs

IntArray = npt.NDArray[np.int64]

_SLACK = (0, 256, 64, 32, 16)
"""Parts of the costliest rank's cost that ranks leave free for what the others can't keep: none, 1/256 ..."""
_TRADES = 100_000
"""Pairs of sequences looked at to even out what the others were spread over."""
_PAIRS = 8
"""Pairs of ranks per rank, those that share the most, of which some become one."""


def stay_home(
    work: Work,
    source: IntArray,
    pack: IntArray,
    *,
    num_ranks: int,
    num_microbatches: int,
    capacity: int,
    model: StepModel,
    good_enough: int,
) -> IntArray:
    """A placement that takes no more time than `pack` does or `good_enough`, and moves no more tokens.

    source: int64 [N], rank that drew each sequence, in the order of `work`, as is `pack`.
    """
    renamed = _trade_ranks(work, source, pack, num_ranks, num_microbatches, model.ranks_meet)
    fewest, best = min(
        ((tokens_moved(work.length, source, way // num_microbatches), way) for way in (renamed, pack)),
        key=lambda entry: entry[0],
    )
    if model.ranks_meet or model.num_stages > 1:
        return best
    limit = _costliest(work, pack // num_microbatches)
    allowed = max(good_enough - num_microbatches * work.fixed, limit)
    for part in _SLACK if work.cost.size <= MANY else _SLACK[-1:]:
        other = _keep_and_spread(
            work, source, num_ranks, num_microbatches, capacity, limit - (limit // part if part else 0)
        )
        if other is None:
            continue
        if _costliest(work, other // num_microbatches) > allowed:
            trade(
                *(work.cost, work.length, other),
                num_ranks=num_ranks,
                packs_per_rank=num_microbatches,
                capacity=capacity,
                budget=_TRADES,
            )
            if _costliest(work, other // num_microbatches) > allowed:
                continue
        counts = np.bincount(other, minlength=num_ranks * num_microbatches)
        if counts.min() == 0 and work.cost.size >= counts.size:  # a pack is empty that need not be
            continue
        moved = tokens_moved(work.length, source, other // num_microbatches)
        if moved < fewest:
            return other
    return best


def _costliest(work: Work, rank: IntArray) -> int:
    """Cost of the costliest rank."""
    return int(pack_costs(work.cost, rank, int(rank.max()) + 1).max())


def tokens_moved(length: IntArray, source: IntArray, rank: IntArray) -> int:
    """Tokens that leave the rank that drew them."""
    return int(length[source != rank].sum())


def _keep_and_spread(
    work: Work, source: IntArray, num_ranks: int, num_microbatches: int, capacity: int, limit: int
) -> IntArray | None:
    pack = keep(
        *(work.cost, work.length, np.ascontiguousarray(source)),
        num_ranks=num_ranks,
        packs_per_rank=num_microbatches,
        capacity=capacity,
        limit=limit,
    )
    costliest = spread_rest(
        *(work.cost, work.length, pack),
        num_ranks=num_ranks,
        packs_per_rank=num_microbatches,
        capacity=capacity,
    )
    return None if costliest is None else pack


def _trade_ranks(
    work: Work, source: IntArray, pack: IntArray, num_ranks: int, num_microbatches: int, ranks_meet: bool
) -> IntArray:
    """Ranks renamed, in each microbatch anew where they meet, so that many tokens are where they were drawn."""
    rank = pack // num_microbatches
    microbatch = pack - rank * num_microbatches  # several times as fast as np.divmod
    first = microbatch * num_ranks if ranks_meet else 0
    num_sets = num_ranks * (num_microbatches if ranks_meet else 1)
    place = match(first + rank, first + source, work.length, num_sets, _PAIRS * num_sets)
    return place[first + rank] % num_ranks * num_microbatches + microbatch
