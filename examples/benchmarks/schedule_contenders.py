"""pure. Algorithms that public trainers schedule by, re-stated: what `default` is compared with.

All see the same lengths and capacity; none of them knows how ranks wait for one another.
"""

from __future__ import annotations

from heapq import heapify, heappop, heapreplace

import numpy as np
import numpy.typing as npt

from megatron.packing.scheduling import placement
from megatron.packing.scheduling.problem import Schedule, Scheduler, ScheduleRequest, rounded_up
from megatron.packing.scheduling.registry import SCHEDULERS

IntArray = npt.NDArray[np.int64]


def largest_differencing(values: list[int], num_parts: int) -> IntArray:
    """Karmarkar-Karp for `num_parts` parts: the part of each value.

    Again and again the two partitions whose sums differ most become one, the largest sums of one
    with the smallest of the other.
    """
    # A partition: its sums that are not 0, ascending, and the node that each is made of; nodes are
    # values or pairs.
    pairs: list[tuple[int, int]] = []
    heap = [
        (-value, i, np.array([value], np.int64), np.array([i], np.int64))
        for i, value in enumerate(values)
    ]
    return _merged(heap, pairs, len(values), num_parts)


def largest_differencing_of_equal_counts(values: list[int], num_parts: int) -> IntArray:
    """The same with as many values in each part, or one less: partitions begin with one value in
    each part.
    """
    order = sorted(range(len(values)), key=lambda i: (values[i], i))
    heap = []
    for number, end in enumerate(range(len(order), 0, -num_parts)):
        members = np.array(order[max(end - num_parts, 0) : end], np.int64)
        sums = np.array([values[i] for i in members], np.int64)
        least = int(sums[0]) if members.size == num_parts else 0
        heap.append((least - int(sums[-1]), number, sums, members))
    return _merged(heap, [], len(values), num_parts)


def _merged(
    heap: list[tuple[int, int, IntArray, IntArray]],
    pairs: list[tuple[int, int]],
    num_values: int,
    num_parts: int,
) -> IntArray:
    heapify(heap)
    number = num_values
    while len(heap) > 1:
        _, _, sums, nodes = heappop(heap)
        _, _, other_sums, other_nodes = heap[0]
        overlap = sums.size + other_sums.size - num_parts
        if (
            overlap > 0
            # the smallest sums of one are joined by the largest of the other, and the other way
            # round
        ):
            joined = np.arange(num_values + len(pairs), num_values + len(pairs) + overlap)
            pairs.extend(zip(nodes[:overlap].tolist(), other_nodes[:overlap][::-1].tolist()))
            both = sums[:overlap] + other_sums[:overlap][::-1]
            sums = np.concatenate((both, sums[overlap:], other_sums[overlap:]))
            nodes = np.concatenate((joined, nodes[overlap:], other_nodes[overlap:]))
        else:
            sums, nodes = np.concatenate((sums, other_sums)), np.concatenate((nodes, other_nodes))
        order = np.argsort(sums, kind="stable")
        sums, nodes = sums[order], nodes[order]
        least = int(sums[0]) if sums.size == num_parts else 0
        heapreplace(heap, (least - int(sums[-1]), number, sums, nodes))
        number += 1
    part_of = np.zeros(num_values + len(pairs), np.int64)
    if heap:
        part_of[heap[0][3]] = np.arange(heap[0][3].size)
    for node in range(len(pairs) - 1, -1, -1):
        part_of[list(pairs[node])] = part_of[num_values + node]
    return part_of[:num_values]


def first_fit_decreasing(request: ScheduleRequest) -> Schedule:
    """Packs by first-fit decreasing, dealt to ranks in turn."""
    pack = _first_fit_packs(request, request.sorted.length)
    return in_global_order(request, pack % request.num_ranks, pack // request.num_ranks)


def differencing_by_cost(request: ScheduleRequest) -> Schedule:
    """Ranks by Karmarkar-Karp on costs, and each rank's microbatches by the same: capacity is only
    hoped for.
    """
    work, num_ranks = request.sorted, request.num_ranks
    rank = largest_differencing(_in_units(work.cost), num_ranks)
    tokens = np.bincount(rank, weights=work.length, minlength=num_ranks)
    num_microbatches = _rounded_up(int(-(-tokens.max() // request.capacity)), request)
    microbatch = np.zeros_like(rank)
    for number in range(num_ranks):
        mine = np.flatnonzero(rank == number)
        microbatch[mine] = largest_differencing(_in_units(work.cost[mine]), num_microbatches)
    return in_global_order(request, rank, microbatch)


def longest_processing_time(request: ScheduleRequest) -> Schedule:
    """Ranks by LPT on costs, and each rank's microbatches by first-fit decreasing."""
    work, num_ranks = request.sorted, request.num_ranks
    rank = placement.place_longest_first(
        np.ones_like(work.length), work.cost, placement.PackGrid(num_ranks, 1, work.cost.size)
    )
    assert rank is not None, "room for all"
    microbatch = np.zeros_like(rank)
    for number in range(num_ranks):
        mine = np.flatnonzero(rank == number)
        microbatch[mine] = _first_fit_packs(request, work.length[mine])
    return in_global_order(request, rank, microbatch)


def packs_then_differencing(request: ScheduleRequest) -> Schedule:
    """Packs by first-fit decreasing, as many to each rank, by Karmarkar-Karp on their costs."""
    work, num_ranks = request.sorted, request.num_ranks
    pack = _first_fit_packs(request, work.length)
    num_packs = _rounded_up(-(-(int(pack.max()) + 1) // num_ranks), request) * num_ranks
    costs = placement.sums_of_packs(
        work.cost, pack, placement.PackGrid(num_packs, 1, request.capacity)
    ).ravel()
    rank_of_pack = largest_differencing_of_equal_counts(_in_units(costs), num_ranks)
    by_rank = np.lexsort((-costs, rank_of_pack))
    place = np.empty(num_packs, np.int64)
    place[by_rank] = np.arange(num_packs) % (num_packs // num_ranks)
    return in_global_order(request, rank_of_pack[pack], place[pack])


CONTENDERS: dict[str, Scheduler] = {
    "next-fit in arrival order, dealt in turn (dp_balanced)": SCHEDULERS["dp_balanced"],
    "first-fit decreasing, dealt in turn": first_fit_decreasing,
    "Karmarkar-Karp by cost": differencing_by_cost,
    "LPT by cost, then first-fit decreasing": longest_processing_time,
    "first-fit decreasing, then Karmarkar-Karp": packs_then_differencing,
}


def _first_fit_packs(request: ScheduleRequest, length: IntArray) -> IntArray:
    packs = placement.PackGrid(max(length.size, 1), 1, request.capacity)
    return placement.first_fit(
        length, length.astype(np.float64), packs, limit=float(request.capacity)
    )[0]


def _in_units(costs: npt.NDArray[np.float64]) -> list[int]:
    """Costs as integers, whose sums are exact."""
    return np.rint(costs * (2.0**42 / max(costs.sum(), 1e-300))).astype(np.int64).tolist()


def _rounded_up(num_microbatches: int, request: ScheduleRequest) -> int:
    return rounded_up(num_microbatches, request.microbatch_multiple)


def in_global_order(request: ScheduleRequest, rank: IntArray, microbatch: IntArray) -> Schedule:
    """From ranks and microbatches in the order of the work; as many empty packs as the multiple
    asks for.
    """
    order = request.sorted.order
    ranks, microbatches = np.empty_like(order), np.empty_like(order)
    ranks[order], microbatches[order] = rank, microbatch
    num_microbatches = _rounded_up(int(microbatch.max(initial=0)) + 1, request)
    return Schedule(ranks, microbatches, request.num_ranks, num_microbatches)
