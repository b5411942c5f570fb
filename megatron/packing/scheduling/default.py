"""pure. The `default` scheduler: chooses the mode that fits the layout, and finishes its placement.

request -> numbers of microbatches -> mode: Placed -> fewer tokens moved -> Schedule
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np

from megatron.packing.scheduling import compiled
from megatron.packing.scheduling.bounds import GOOD_ENOUGH
from megatron.packing.scheduling.moved_tokens import reduce_moved_tokens
from megatron.packing.scheduling.pipelines import balance_pipelines
from megatron.packing.scheduling.placement import Packs, Placed, pack_costs
from megatron.packing.scheduling.problem import Schedule, ScheduleRequest, rounded_up
from megatron.packing.scheduling.ranks import balance_ranks
from megatron.packing.scheduling.synchronous import balance_microbatches


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
    packs = Packs(request.num_ranks, num_microbatches, request.capacity)
    # Without fixed costs; read only if no more than the ranks' sums count.
    enough_rank_cost = request.work_bound * GOOD_ENOUGH - request.cost.fixed * num_microbatches
    pack = reduce_moved_tokens(request, placed.pack, packs, enough_rank_cost)
    # pack = rank * num_microbatches + microbatch
    rank = pack // num_microbatches
    microbatch = pack - rank * num_microbatches
    if request.model.only_rank_sums_count:
        by_cost = np.argsort(-pack_costs(cost, pack, packs), axis=1, kind="stable")
        # Costs [[5, 9, 7]]    ->    by_cost [[1, 2, 0]], new microbatches [[2, 0, 1]]
        microbatch = np.argsort(by_cost, axis=1)[rank, microbatch]
    schedule = Schedule(
        np.empty_like(rank), np.empty_like(rank), request.num_ranks, num_microbatches
    )
    # From the longest first to the order of the request.
    schedule.rank[order], schedule.microbatch[order] = rank, microbatch
    return schedule
