"""pure. The order in which a pipeline runs its packs, and how large each of them is best.

Equal packs are not the quickest under 1F1B. While the pipeline fills, the last stage waits for each
pack to pass all stages before it: packs may grow by a factor of 1 + 2 / (stages - 1) from one to
the next without making it wait again, for it is busy with a pack's forward and backward, three
thirds of its cost, while the next pack's forwards take a third per stage. While it drains, packs
may shrink, the faster the nearer they are to the end. Larger packs in between take what the ends
leave out, while all stages are busy. Interleaved pipelines run groups of packs through one chunk
after the other: there the first group is smaller, and so is the last one, or the last ones ever
more. How small the first and the last pack are is found by simulation: with 2 to 16 stages within
half a percent of the optimum of divisible sequences, by linear programming; interleaved, within two
percent.

    4 stages, 8 packs of a mean cost of 100    ->    68 114 114 114 114 114 95 67
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.packing.scheduling.placement import (
    PackGrid,
    costs_as_run,
    split_ranks,
    sums_of_packs,
)
from megatron.packing.scheduling.problem import ScheduleRequest
from megatron.packing.scheduling.step_time import StepModel, simulate

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class ShapeLimits:
    """Shapes (sizes of a rank's packs, in order) that are tried."""

    steps: int = 8
    """Sizes of the first pack that are tried, evenly spaced up to the size of those in the middle,
    and as many of the last. Then those halfway to the neighbours of the best."""
    falls: tuple[float, ...] = (0.0, 0.6)
    """Ratios, in interleaved pipelines, of what a group lacks of the middle's size to what the next
    group lacks. At 0.0 only the last group is smaller."""
    rounding: int = 16
    """Fixed cost and free capacity are rounded to 1/16 of the mean pack, so that similar steps
    share one search.
    """
    smallest: float = 1 / 16
    """Smallest size over the mean: no pack is empty, however large its fixed cost."""
    max_packs_per_stage: int = 8
    """Packs per stage of the simulated pipeline. Longer pipelines are even in the middle, and their
    ends do not depend on its length."""
    largest: tuple[float, ...] = (2.0, 1.3, 1.1)
    """Largest size over the mean, of each shape tried: the best shape first, then evener ones for
    packs that cannot follow it."""
    max_passes: int = 1 << 13
    """Passes of one rank that a simulation may have, to bound its time. In longer pipelines the
    ends matter little.
    """


LIMITS = ShapeLimits()


class PlacedPipelines(NamedTuple):
    """A placement in pipelines with the modelled end of each."""

    ends: FloatArray
    """float64 [num_ranks], simulated; for pipelines too long to simulate an upper bound."""
    num_microbatches: int
    pack: IntArray
    """int64 [N], rank * num_microbatches + microbatch."""

    @property
    def time(self) -> float:
        """Modelled time of the step, in the unit of the cost."""
        return float(self.ends.max())


def order_each_rank(
    request: ScheduleRequest, pack: IntArray, packs: PackGrid, num_shapes: int | None = None
) -> PlacedPipelines:
    """Returns the placement with each rank's packs in the best order and sizes found.

    For ranks that run independently. No rank ends later than before by simulation. Pipelines too
    long to simulate are not split again. `num_shapes` limits the shapes tried, of all by default.
    """
    _, length, cost = request.sorted
    model, num_microbatches = request.model, packs.num_microbatches
    shapes = _shapes(request, packs, num_shapes)
    costs = costs_as_run(request, pack, packs)
    if not can_simulate(model, num_microbatches):
        pack = _by_first_shape(pack, costs, model, shapes)
        costs = costs_as_run(request, pack, packs)
        # The flow shop: beside its own sum, a rank's costliest pack passes all further stages
        # alone.
        stages = model.effective_stages
        ends = (costs.sum(axis=1) + (stages - 1) * costs.max(axis=1)) / stages
        return PlacedPipelines(ends, num_microbatches, pack)
    placements = [pack, _reordered(pack, costs, _by_size(shapes[0]))]
    for shape in shapes:
        split = split_ranks(length, cost, pack, packs, weights=shape)
        placements.append(_reordered(split, sums_of_packs(cost, split, packs), _by_size(shape)))
    all_costs = [costs_as_run(request, placement, packs) for placement in placements]
    ends = simulate(np.concatenate(all_costs), model).reshape(len(placements), -1)
    # ends is [placements, ranks]. Each rank takes the placement that is best for it: sequence i
    # that of its rank, pack[i] // num_microbatches.
    best = ends.argmin(axis=0)
    pack = np.stack(placements)[best[pack // num_microbatches], np.arange(pack.size)]
    return PlacedPipelines(ends.min(axis=0), num_microbatches, pack)


def order_microbatches(request: ScheduleRequest, pack: IntArray, packs: PackGrid) -> IntArray:
    """Returns the placement with microbatches in the best order found, the same on all ranks.

    For ranks that wait for one another at each microbatch. It takes no longer than before by
    simulation, unless the pipeline is too long to simulate.
    """
    model = request.model
    shapes = _shapes(request, packs)
    costs = costs_as_run(request, pack, packs)
    if not can_simulate(model, packs.num_microbatches):
        return _by_first_shape(pack, costs, model, shapes)
    together = costs.max(axis=0, keepdims=True)  # [1, M]: one rank stands for all
    as_before = np.arange(packs.num_microbatches)[None]
    places = [as_before, *(_place_by_cost(together, _by_size(shape)) for shape in shapes)]
    # `place` says where a microbatch goes, its argsort which one runs at each place.
    ordered = np.concatenate([together[:, np.argsort(place[0])] for place in places])
    best = places[int(simulate(ordered, model).argmin())]
    return _renumber(pack, np.broadcast_to(best, costs.shape))


def can_simulate(model: StepModel, num_microbatches: int, limits: ShapeLimits = LIMITS) -> bool:
    """Returns whether a simulation of so many microbatches takes little time."""
    passes = 2 * model.num_stages * model.num_virtual_stages * num_microbatches
    return passes <= limits.max_passes


def _by_first_shape(
    pack: IntArray, costs: FloatArray, model: StepModel, shapes: list[FloatArray]
) -> IntArray:
    """Returns the placement of pipelines too long to simulate, in the order of the best shape."""
    if model.num_virtual_stages > 1:
        return pack  # The shape suits 1F1B. Interleaved, it was up to 17 % slower than this order.
    return _reordered(pack, costs, _by_size(shapes[0]))


def _place_by_cost(costs: FloatArray, order: IntArray) -> IntArray:
    """Returns the new microbatch of each pack, [ranks, M] as `costs`: each rank's costliest goes to
    microbatch order[0], the next one to order[1], and so on.

    costs [[5, 9, 7]], order [2, 0, 1]    ->    [[1, 2, 0]]
    """
    place = np.empty(costs.shape, np.int64)
    by_cost = np.argsort(-costs, axis=1, kind="stable")
    place[np.arange(len(costs))[:, None], by_cost] = order
    return place


def _reordered(pack: IntArray, costs: FloatArray, order: IntArray) -> IntArray:
    """Returns the placement with each rank's packs in another order; see `_place_by_cost`."""
    return _renumber(pack, _place_by_cost(costs, order))


def _renumber(pack: IntArray, place: IntArray) -> IntArray:
    """Returns the placement with the microbatches of each rank renumbered by `place` [ranks, M]."""
    num_ranks, num_microbatches = place.shape
    return (np.arange(num_ranks)[:, None] * num_microbatches + place).ravel()[pack]


def _by_size(shape: FloatArray) -> IntArray:
    """Returns microbatches in the order in which the costliest packs are given to them."""
    return np.argsort(-shape, kind="stable")


def _shapes(
    request: ScheduleRequest, packs: PackGrid, count: int | None = None
) -> list[FloatArray]:
    """Returns the best shapes under `count` limits of the largest size, the best shape first.

    Of equal shapes one: in long or shallow pipelines few packs are larger than the mean.
    """
    fits = packs.capacity * packs.num_packs / int(request.sorted.length.sum())
    fixed = request.cost.fixed * packs.num_packs / float(request.sorted.cost.sum())
    shapes = [
        best_shape(request.model, packs.num_microbatches, fixed, min(largest, fits))
        for largest in LIMITS.largest[:count]
    ]
    return list({shape.tobytes(): shape for shape in shapes}.values())


def best_shape(
    model: StepModel,
    num_microbatches: int,
    fixed: float,
    largest: float,
    limits: ShapeLimits = LIMITS,
) -> FloatArray:
    """Returns the sizes of a rank's packs without their fixed costs, float64 [M], with a mean of 1.

    Args:
        fixed: a microbatch's fixed cost over the mean size.
        largest: the largest size over the mean that is likely to fit the capacity.
    """
    parts = limits.rounding
    fixed = min(round(fixed * parts), 4 * parts) / parts
    largest = max(min(int(largest * parts), 2 * parts) / parts, 1.0)
    return _best_sizes(model, num_microbatches, fixed, largest, limits)


@lru_cache(maxsize=64)  # the placements of a step ask several times for each number of microbatches
def _best_sizes(
    model: StepModel, num_microbatches: int, fixed: float, largest: float, limits: ShapeLimits
) -> FloatArray:
    """Returns `best_shape` of rounded numbers, read-only."""
    # Searched in a shorter pipeline, of whole groups: 4 stages in groups of 5 -> 35, not 32 packs.
    group = model.stage_group if model.num_virtual_stages > 1 else 1
    longest = -(-limits.max_packs_per_stage * model.num_stages // group) * group
    ends = _best_ends(model, min(num_microbatches, longest), fixed, largest, limits)
    (sizes,) = _sizes(model, num_microbatches, [ends], fixed, limits)
    sizes.flags.writeable = False
    return sizes


@lru_cache(maxsize=1024)
def _best_ends(
    model: StepModel, num_microbatches: int, fixed: float, largest: float, limits: ShapeLimits
) -> tuple[float, float, float]:
    """Returns the quickest ends of those that are tried; see `_sizes`."""

    def quickest(ends: list[tuple[float, float, float]]) -> tuple[float, float, float]:
        sizes = _sizes(model, num_microbatches, ends, fixed, limits)
        times, excess = simulate(sizes + fixed, model), sizes.max(axis=1) - largest
        # What fits best comes first; of equally quick ones the evenest.
        return ends[int(np.lexsort((excess, times.round(9), np.maximum(excess, 0).round(9)))[0])]

    fractions = [step / limits.steps for step in range(1, limits.steps + 1)]
    falls = limits.falls if model.num_virtual_stages > 1 else limits.falls[:1]
    first, last, fall = quickest(list(product(fractions, fractions, falls)))
    halves = (-0.5 / limits.steps, 0.0, 0.5 / limits.steps)
    near = [(min(first + i, 1.0), min(last + j, 1.0), fall) for i in halves for j in halves]
    return quickest(near)


def _sizes(
    model: StepModel,
    num_microbatches: int,
    ends: list[tuple[float, float, float]],
    fixed: float,
    limits: ShapeLimits,
) -> FloatArray:
    """Returns the sizes without the fixed costs, float64 [len(ends), M], each row with a mean of 1.

    Args:
        ends: cost of the first pack and of the last over those in the middle, and what groups of
            interleaved pipelines lack over what the next one lacks.
    """
    first, last, fall = np.array(ends).T[:, :, None]
    place = np.arange(num_microbatches)
    if model.num_virtual_stages > 1:
        group = place // model.stage_group
        # From the end, groups lack (1 - last) * 1, fall, fall ** 2, ... of the middle's cost.
        costs = 1 - (1 - last) * fall ** (group[-1] - group).astype(np.float64)
        costs = np.where(group == 0, np.minimum(costs, first), costs)
    else:
        # 64 growths reach the middle from any first pack; powers of 1,000 would overflow.
        rise = first * (1 + 2 / max(model.num_stages - 1, 1)) ** np.minimum(place, 64)
        costs = 1 - (1 - last) * (1 - 1 / model.num_stages) ** place[::-1]
        costs = np.minimum(costs, rise)
    means = costs.mean(axis=1, keepdims=True)
    sizes = np.maximum(costs * ((1 + fixed) / means) - fixed, limits.smallest)
    return sizes / sizes.mean(axis=1, keepdims=True)
