"""pure. The order in which each rank runs its packs, and in pipelines their sizes.

A 1F1B pipeline fills and drains faster with small packs first and last: what these leave out, larger packs in between
take, while all stages are busy. Each rank's sequences are split by a few such shapes, and the one that a simulation
finds quickest is taken. Without a pipeline the costliest pack comes first, so that a rank that will run out of memory
does so at once, and packs of like cost meet at each microbatch.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megatron.packing.scheduling.repacking import place_by_cost, renumber, split_ranks
from megatron.packing.scheduling.shape import best_shape
from megatron.packing.scheduling.step_time import StepModel, simulate
from megatron.packing.scheduling.work import MANY, Work

IntArray = npt.NDArray[np.int64]

_ROOMS = (2.0, 1.3, 1.1)
"""Largest packs over the mean that shapes may have: the best shape, and evener ones for packs that can't follow it."""
_MAX_OPERATIONS = 1 << 13
"""Passes that a simulation may have; of longer pipelines the ends matter little."""


def costliest_first(work: Work, pack: IntArray, num_ranks: int, num_microbatches: int) -> IntArray:
    """`pack` with each rank's microbatches by descending cost: a rank that will run out of memory does so at once, and
    packs of like cost meet at each microbatch. int64 [N] in the order of `work`: rank * num_microbatches + microbatch.
    """
    costs = work.pack_costs(pack, num_ranks, num_microbatches)
    return renumber(pack, place_by_cost(costs, np.arange(num_microbatches)))


def can_simulate(model: StepModel, num_microbatches: int) -> bool:
    """Whether that takes little time."""
    return 2 * model.num_stages * model.num_virtual_stages * num_microbatches <= _MAX_OPERATIONS


def arrange(
    work: Work, pack: IntArray, *, num_ranks: int, num_microbatches: int, capacity: int, model: StepModel
) -> IntArray:
    """`pack` with each rank's microbatches in the best order found for a pipeline and, where ranks don't meet, each
    rank's sequences split in the best way found; no slower by simulation than `pack`, unless the pipeline is too long
    to simulate. int64 [N] in the order of `work`: rank * num_microbatches + microbatch.
    """
    if pack.size <= num_ranks:
        return pack
    costs = work.pack_costs(pack, num_ranks, num_microbatches)
    shapes = _shapes(work, num_ranks * num_microbatches, num_microbatches, capacity, model)
    if model.ranks_meet:
        rows = costs.max(axis=0, keepdims=True)
        as_given = np.arange(num_microbatches)[None]
        places = np.concatenate([as_given, *(place_by_cost(rows, _by_weight(shape)) for shape in shapes)])
        placed = np.empty_like(places)
        np.put_along_axis(placed, places, np.broadcast_to(rows, places.shape), axis=1)
        best = places[simulate(placed, model).argmin()]
        return renumber(pack, np.broadcast_to(best, costs.shape))
    ways = [renumber(pack, place_by_cost(costs, _by_weight(shapes[0])))]
    if not can_simulate(model, num_microbatches):
        # The shape suits 1F1B; interleaved, it was up to 17 % slower than the order given.
        return ways[0] if model.num_virtual_stages == 1 else pack
    ways.append(pack)
    ways += _split_by(work, pack, num_ranks, num_microbatches, capacity, shapes)
    all_costs = [work.pack_costs(way, num_ranks, num_microbatches) for way in ways]
    times = simulate(np.concatenate(all_costs), model).reshape(len(ways), num_ranks)
    best_way = times.argmin(axis=0)
    rank = pack // num_microbatches
    return np.stack(ways)[best_way[rank], np.arange(pack.size)]


def _shapes(work: Work, num_packs: int, num_microbatches: int, capacity: int, model: StepModel) -> list[IntArray]:
    """Weights of a rank's packs [M], the best for divisible sequences first, then evener ones."""
    fits = capacity * num_packs / int(work.length.sum())
    fixed = work.fixed * num_packs / work.total
    rooms = _ROOMS if work.cost.size <= MANY else _ROOMS[:1]
    return [best_shape(model, num_microbatches, fixed, min(room, fits)) for room in rooms]


def _split_by(
    work: Work, pack: IntArray, num_ranks: int, num_microbatches: int, capacity: int, shapes: list[IntArray]
) -> list[IntArray]:
    """For each shape the placement with each rank's sequences split by it; ranks that this leaves with an empty pack
    stay as they were.
    """
    must_be_used = pack.size >= num_ranks * num_microbatches
    used = _num_used(pack, num_ranks, num_microbatches)
    ways = []
    for shape in shapes:
        way = split_ranks(work.cost, work.length, pack, num_ranks=num_ranks, capacity=capacity, weights=shape)
        if must_be_used:
            worse = _num_used(way, num_ranks, num_microbatches) < used
            way = np.where(worse[pack // num_microbatches], pack, way)
        costs = work.pack_costs(way, num_ranks, num_microbatches)
        ways.append(renumber(way, place_by_cost(costs, _by_weight(shape))))
    return ways


def _num_used(pack: IntArray, num_ranks: int, num_microbatches: int) -> IntArray:
    """Packs of each rank that hold a sequence."""
    counts = np.bincount(pack, minlength=num_ranks * num_microbatches).reshape(num_ranks, num_microbatches)
    return np.count_nonzero(counts, axis=1)


def _by_weight(shape: IntArray) -> IntArray:
    """Microbatches in the order in which the costliest packs are given to them."""
    return np.argsort(-shape, kind="stable")
