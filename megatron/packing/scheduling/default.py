"""pure. The `default` scheduler: chooses the mode that fits the layout, and finishes its placement.

    request -> numbers of microbatches -> mode: Placed -> fewer tokens moved -> Schedule

Fewer tokens are sent between data-parallel ranks, at the same modelled time, by two heuristics,
tried in this order:

    keep     each rank keeps the sequences that it loaded, up to what the costliest rank may hold,
             and only the rest is placed (where ranks wait for one another at the end of the step)
    rename   whole ranks swap their packs, or, where ranks wait at each microbatch, single packs

Without it 0.76 of the tokens move; with it 0.20 in mode ranks, 0.39 to 0.50 in the others.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron.packing.scheduling import compiled
from megatron.packing.scheduling.pipelines import balance_pipelines
from megatron.packing.scheduling.placement import (
    PackGrid,
    Placed,
    largest_rank,
    place_longest_first,
    sums_of_packs,
    trade,
)
from megatron.packing.scheduling.problem import (
    Schedule,
    ScheduleRequest,
    rounded_up,
    sorted_order,
)
from megatron.packing.scheduling.ranks import balance_ranks
from megatron.packing.scheduling.step_time import GOOD_ENOUGH
from megatron.packing.scheduling.synchronous import balance_microbatches

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class MoveLimits:
    """Limits of the heuristics that reduce moved tokens."""

    kept_free: tuple[float, ...] = (0, 1 / 256, 1 / 64, 1 / 32, 1 / 16)
    """Shares of the costliest rank's cost that ranks leave free for sequences that others cannot
    keep. They are tried in turn, as each more keeps less."""
    large_batch: int = 1 << 14
    """Sequences, above which only the last share is tried, to bound the time."""
    keep_trades: int = 100_000
    """Pairs of sequences considered to balance ranks that keep theirs, about 0.5 ms."""
    max_pairs: int = 8
    """Pairs per rank, those that share the most tokens, among which ranks are matched."""
    sparse_pairs: int = 8
    """Possible pairs per sequence, above which hardly two sequences share a pair: none are summed.
    """


MOVED = MoveLimits()


def default(request: ScheduleRequest) -> Schedule:
    """Returns the schedule of the least modelled step time found. O(N log N).

    Among schedules as quick, one that moves few tokens between ranks. Never more microbatches than
    give each sequence a pack of its own. README.md has the decision tree of the three modes.
    """
    multiple, fewest = request.microbatch_multiple, request.fewest_microbatches
    most = rounded_up(request.lengths.size / request.num_ranks, multiple)  # a pack per sequence
    balance = _mode_of(request)
    return _finish(request, balance(request, list(range(fewest, most + 1, multiple))))


def _mode_of(request: ScheduleRequest) -> Callable[[ScheduleRequest, list[int]], Placed]:
    """Returns the mode that fits the layout, a function of the request and the numbers of
    microbatches to try.
    """
    model = request.model
    if request.lengths.size <= request.num_ranks:
        return _each_alone
    if compiled.CORE is None:
        warnings.warn(
            "scheduling is slower and a little worse without its compiled core: install a C++ "
            "compiler and then the project again (pip install --editable .)",
            stacklevel=3,
        )
    # A lone rank without a pipeline waits for none.
    if model.sync_every_microbatch and request.num_ranks * model.num_stages > 1:
        return balance_microbatches
    return balance_pipelines if model.num_stages > 1 else balance_ranks


def _each_alone(request: ScheduleRequest, microbatch_counts: list[int]) -> Placed:
    """Returns each sequence on a rank of its own, in the first pack: no schedule is better."""
    # No search compares this time. Rank i, microbatch 0    ->    pack i * num_microbatches
    num_microbatches = microbatch_counts[0]
    pack = np.arange(request.lengths.size) * num_microbatches
    return Placed(0.0, num_microbatches, pack)


def _finish(request: ScheduleRequest, placed: Placed) -> Schedule:
    """Returns the schedule of a placement, with few tokens moved between ranks.

    Where only ranks' sums count, each rank's costliest pack comes first: if one runs out of memory,
    it does so at once.
    """
    order, _, cost = request.sorted
    num_microbatches = placed.num_microbatches
    packs = PackGrid(request.num_ranks, num_microbatches, request.capacity)
    # Without fixed costs; read only if no more than the ranks' sums count.
    enough_rank_cost = request.work_bound * GOOD_ENOUGH - request.cost.fixed * num_microbatches
    pack = reduce_moved_tokens(request, placed.pack, packs, enough_rank_cost)
    # pack = rank * num_microbatches + microbatch
    rank = pack // num_microbatches
    microbatch = pack - rank * num_microbatches
    if request.model.only_rank_sums_count:
        by_cost = np.argsort(-sums_of_packs(cost, pack, packs), axis=1, kind="stable")
        # Costs [[5, 9, 7]]    ->    by_cost [[1, 2, 0]], new microbatches [[2, 0, 1]]
        microbatch = np.argsort(by_cost, axis=1)[rank, microbatch]
    schedule = Schedule(
        np.empty_like(rank), np.empty_like(rank), request.num_ranks, num_microbatches
    )
    # From the longest first to the order of the request.
    schedule.rank[order], schedule.microbatch[order] = rank, microbatch
    return schedule


def tokens_moved(length: IntArray, source: IntArray, rank: IntArray) -> int:
    """Returns the tokens that leave the rank that loaded them."""
    return int(length[source != rank].sum())


def reduce_moved_tokens(
    request: ScheduleRequest, pack: IntArray, packs: PackGrid, enough_rank_cost: float
) -> IntArray:
    """Returns a placement as quick as `pack` that moves at most as many tokens.

    Args:
        pack: a placement of the sequences, the longest first.
        enough_rank_cost: cost that the costliest rank may reach in any case, without fixed costs.
            Read only if no more than the ranks' sums count.
    """
    order, length, cost = request.sorted
    source = np.ascontiguousarray(request.source_rank[order])

    def moved(placement: IntArray) -> int:
        return tokens_moved(length, source, placement // packs.num_microbatches)

    if request.model.only_rank_sums_count:
        kept = _keep(length, cost, source, pack, packs, enough_rank_cost)
        if kept is not None and moved(kept) < moved(pack):
            return kept
    renamed = _rename(
        length, source, pack, packs, each_microbatch=request.model.sync_every_microbatch
    )
    return min(renamed, pack, key=moved)


def _keep(
    length: IntArray,
    cost: FloatArray,
    source: IntArray,
    pack: IntArray,
    packs: PackGrid,
    enough_rank_cost: float,
) -> IntArray | None:
    """Returns a placement where ranks keep what they loaded; None where ranks become too uneven."""
    if compiled.CORE is None:
        return None
    limit = largest_rank(cost, pack, packs)
    allowed = max(enough_rank_cost, limit)
    for part in MOVED.kept_free[-1 if length.size > MOVED.large_batch else 0 :]:
        begun = np.empty(length.size, np.int64)
        sizes = length.size, cost, length, source, *packs
        compiled.CORE.call("keep", *sizes, limit * (1 - part), begun)
        kept = place_longest_first(length, cost, packs, begun=begun)
        if kept is not None and largest_rank(cost, kept, packs) > allowed:
            kept = trade(length, cost, kept, packs, budget=MOVED.keep_trades)
        if kept is not None and largest_rank(cost, kept, packs) <= allowed:
            return kept
    return None


def _rename(
    length: IntArray, source: IntArray, pack: IntArray, packs: PackGrid, each_microbatch: bool
) -> IntArray:
    """Returns the placement with ranks renamed to where most of their tokens were loaded.

    With `each_microbatch`, ranks have other names in each microbatch.
    """
    num_microbatches = packs.num_microbatches
    # pack = rank * num_microbatches + microbatch
    rank = pack // num_microbatches
    microbatch = pack - rank * num_microbatches
    # One matching for all microbatches: those of microbatch m are numbered from m * num_ranks on.
    # Sequences never match a pack of another microbatch, as `first` is the same for both.
    first = microbatch * packs.num_ranks if each_microbatch else np.zeros_like(rank)
    size = packs.num_packs if each_microbatch else packs.num_ranks
    place = _match(first + rank, first + source, length, size)
    return place[first + rank] % packs.num_ranks * num_microbatches + microbatch


def _match(part: IntArray, place: IntArray, weight: IntArray, size: int) -> IntArray:
    """Matches each part with a place of its own, [size], the pairs that share most weight first.

    Parts without such a pair take the places that are left, in order.

    Args:
        part, place, weight: [N], what part and place share, weights descending.
    """
    parts, places = part, place
    if weight.size > size * size // MOVED.sparse_pairs:
        # Sums weights of equal pairs: pairs 0 4 4, weights 9 5 2    ->    pairs 0 4, shared 9 7
        pairs = part * size + place
        by_pair = sorted_order(pairs)
        pairs = pairs[by_pair]
        first = np.flatnonzero(np.diff(pairs, prepend=-1))
        shared = np.add.reduceat(weight[by_pair], first)
        parts, places = np.divmod(
            pairs[first][sorted_order(-shared)[: MOVED.max_pairs * size]], size
        )
    place_of = np.full(size, -1, np.int64)
    if compiled.CORE is not None:
        compiled.CORE.call("match", parts.size, parts, places, size, place_of)
        return place_of
    free = dict.fromkeys(range(size))
    for one, other in zip(parts.tolist(), places.tolist()):
        if place_of[one] < 0 and other in free:
            place_of[one] = other
            del free[other]
    place_of[place_of < 0] = list(free)
    return place_of
