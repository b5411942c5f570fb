"""pure. The order in which a pipeline runs its packs, and how large each would best be.

Equal packs are not the quickest under 1F1B. While the pipeline fills, the last stage waits for each pack to pass all
stages before it: packs may grow by a factor of 1 + 2 / (stages - 1) from one to the next without making it wait again,
for it is busy with a pack's forward and backward, three thirds of its cost, while the next pack's forwards take a third
per stage. While it drains, packs may shrink, the faster the nearer they are to the end. What the ends leave out, larger
packs in between take, while all stages are busy. Interleaved pipelines run groups of packs through one chunk after the
other: there the first group is smaller, and the last one, or the last ones ever more. How small the first and the last
pack are is found by simulation: with 2 to 16 stages within half a percent of the optimum of divisible sequences, by
linear programming; interleaved, within two percent.

    4 stages, 8 packs of a mean cost of 100    ->    68 114 114 114 114 114 95 67
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product

import numpy as np
import numpy.typing as npt

from megatron.packing.scheduling.placement import Packs, pack_costs, split_ranks
from megatron.packing.scheduling.problem import ScheduleRequest
from megatron.packing.scheduling.step_time import StepModel, simulate

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

_STEPS = 8
"""Sizes of the first pack that are tried, and as many of the last, up to the size of those in the middle; then those
halfway to the next ones of the best.
"""
_FALLS = (0.0, 0.6)
"""What groups of interleaved pipelines lack of the middle's size, over what the next one lacks."""
_PARTS = 16
"""Fixed cost and free capacity are rounded to such parts of the mean pack, so that steps alike share a search."""
_SMALLEST = 1 / 16
"""Of the mean pack: no pack is empty, however large its fixed cost."""
_MOST_PER_STAGE = 8
"""Microbatches per stage; of longer pipelines the middle is even, and the ends do not depend on its length."""
_LARGEST = (2.0, 1.3, 1.1)
"""Largest packs over the mean that shapes may have: the best shape, and evener ones for packs that can't follow it."""
_MAX_OPERATIONS = 1 << 13
"""Passes of a rank that a simulation may have; of longer pipelines the ends matter little."""


def best_shape(model: StepModel, num_microbatches: int, fixed: float, largest: float) -> FloatArray:
    """Sizes of a rank's packs without their fixed costs, float64 [M], with a mean of 1.

    fixed: a microbatch's fixed cost over the mean size. largest: the largest size over the mean that is likely to fit
    the capacity.
    """
    fixed, largest = min(round(fixed * _PARTS), 4 * _PARTS) / _PARTS, min(int(largest * _PARTS), 2 * _PARTS) / _PARTS
    group = model.stage_group if model.num_virtual_stages > 1 else 1
    length = min(num_microbatches, -(-_MOST_PER_STAGE * model.num_stages // group) * group)
    return _sizes(model, num_microbatches, _best_ends(model, length, fixed, max(largest, 1.0)), fixed)


@lru_cache(maxsize=1024)
def _best_ends(model: StepModel, num_microbatches: int, fixed: float, largest: float) -> tuple[float, float, float]:
    """The quickest of those that are tried; see `_sizes`."""

    def quickest(ends: list[tuple[float, float, float]]) -> tuple[float, float, float]:
        sizes = np.stack([_sizes(model, num_microbatches, end, fixed) for end in ends])
        times, excess = simulate(sizes + fixed, model), sizes.max(axis=1) - largest
        # What fits best comes first; of equally quick ones the evenest.
        return ends[int(np.lexsort((excess, times.round(9), np.maximum(excess, 0).round(9)))[0])]

    fractions = [step / _STEPS for step in range(1, _STEPS + 1)]
    falls = _FALLS if model.num_virtual_stages > 1 else _FALLS[:1]
    first, last, fall = quickest(list(product(fractions, fractions, falls)))
    halves = (-0.5 / _STEPS, 0.0, 0.5 / _STEPS)
    return quickest([(min(first + i, 1.0), min(last + j, 1.0), fall) for i in halves for j in halves])


def _sizes(model: StepModel, num_microbatches: int, ends: tuple[float, float, float], fixed: float) -> FloatArray:
    """Without the fixed costs; ends: costs of the first pack and of the last over those in the middle, and what groups
    of interleaved pipelines lack over what the next one lacks.
    """
    first, last, fall = ends
    if model.num_virtual_stages > 1:
        group = np.arange(num_microbatches) // model.stage_group
        costs = 1 - (1 - last) * fall ** (group[-1] - group).astype(np.float64)
        costs[group == 0] = np.minimum(costs[group == 0], first)
    else:
        place = np.arange(num_microbatches)
        rise = first * (1 + 2 / max(model.num_stages - 1, 1)) ** np.minimum(place, 64)
        costs = 1 - (1 - last) * (1 - 1 / model.num_stages) ** place[::-1]
        costs = np.minimum(costs, rise)
    sizes = np.maximum(costs * ((1 + fixed) / costs.mean()) - fixed, _SMALLEST)
    return sizes / sizes.mean()


def can_simulate(model: StepModel, num_microbatches: int) -> bool:
    """Whether that takes little time."""
    return 2 * model.num_stages * model.num_virtual_stages * num_microbatches <= _MAX_OPERATIONS


def in_pipeline_order(request: ScheduleRequest, pack: IntArray, packs: Packs, num_shapes: int = 3) -> IntArray:
    """The placement with each rank's microbatches in the best order found and, where ranks don't meet, each rank's
    sequences split in the best way found, of so many shapes; no slower by simulation, unless the pipeline is too long
    to simulate.
    """
    _, length, cost = request.sorted
    model, number = request.model, packs.num_microbatches
    fits = packs.capacity * packs.size / int(length.sum())
    fixed = request.cost.fixed * packs.size / float(cost.sum())
    shapes = [best_shape(model, number, fixed, min(largest, fits)) for largest in _LARGEST[:num_shapes]]
    costs = pack_costs(cost, pack, packs, request.cost.fixed)
    if not can_simulate(model, number):
        # The shape suits 1F1B; interleaved, it was up to 17 % slower than the order given.
        return renumber(pack, place_by_cost(costs, _by_size(shapes[0]))) if model.num_virtual_stages == 1 else pack
    if model.ranks_meet:
        together = costs.max(axis=0, keepdims=True)
        places = [np.arange(number)[None], *(place_by_cost(together, _by_size(shape)) for shape in shapes)]
        placed = [together[:, np.argsort(place[0])] for place in places]
        best = places[int(simulate(np.concatenate(placed), model).argmin())]
        return renumber(pack, np.broadcast_to(best, costs.shape))
    ways = [pack, renumber(pack, place_by_cost(costs, _by_size(shapes[0])))]
    for shape in shapes:
        split = split_ranks(length, cost, pack, packs, weights=shape)
        ways.append(renumber(split, place_by_cost(pack_costs(cost, split, packs), _by_size(shape))))
    all_costs = np.concatenate([pack_costs(cost, way, packs, request.cost.fixed) for way in ways])
    best_way = simulate(all_costs, model).reshape(len(ways), -1).argmin(axis=0)
    return np.stack(ways)[best_way[pack // number], np.arange(pack.size)]


def _by_size(shape: FloatArray) -> IntArray:
    """Microbatches in the order in which the costliest packs are given to them."""
    return np.argsort(-shape, kind="stable")


def place_by_cost(costs: FloatArray, order: IntArray) -> IntArray:
    """Where each pack goes, [ranks, M] as `costs`: the costliest of each rank to order[0], the next to order[1] ..."""
    place = np.empty(costs.shape, np.int64)
    by_cost = np.argsort(-costs, axis=1, kind="stable")
    np.put_along_axis(place, by_cost, np.broadcast_to(order, costs.shape), axis=1)
    return place


def renumber(pack: IntArray, place: IntArray) -> IntArray:
    """The placement with the microbatches of each rank renamed by `place` [ranks, M]."""
    num_ranks, num_microbatches = place.shape
    return (np.arange(num_ranks)[:, None] * num_microbatches + place).ravel()[pack]
