"""pure. How large a pipeline's packs would best be, one after the other, were sequences divisible.

Equal packs are not the quickest under 1F1B. While the pipeline fills, the last stage waits for each pack to pass all
stages before it: packs may grow by a factor of 1 + 2 / (stages - 1) from one to the next without making it wait again,
for it is busy with a pack's forward and backward, three thirds of its cost, while the next pack's forwards take a third
per stage. While it drains, packs may shrink, the faster the nearer they are to the end. What the ends leave out, larger
packs in between take, while all stages are busy. Interleaved pipelines run groups of packs through one chunk after the
other: there the first group is smaller, and the last one, or the last ones ever more. How small the first and the last
pack are is found by simulation. With 2 to 16 stages that comes within half a percent of the optimum, by linear
programming; interleaved, within two percent.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.packing.scheduling.step_time import StepModel, simulate

IntArray = npt.NDArray[np.int64]

MEAN = 1 << 14
"""Of the sizes."""
_FINE = 1 << 20
"""Costs relative to those in the middle become integers of such parts: what floats add up to may depend on the machine,
and with it the schedule.
"""
_STEPS = 8
"""Sizes of the first pack that are tried, and as many of the last, up to the size of those in the middle; then those
halfway to the next ones of the best.
"""
_FALLS = (0.0, 0.6)
"""What groups of interleaved pipelines lack of the middle's size, over what the next one lacks."""
_PARTS = 16
"""Fixed cost and room are rounded to such parts of the mean pack, so that steps alike share a search."""
_SMALLEST = MEAN // 16
"""No pack is empty, however large its fixed cost."""
_MOST_RISING = 64
"""Packs that may be smaller for being among the first: with dozens of stages, that is as many as the pipeline holds."""
_MOST_PER_STAGE = 8
"""Microbatches per stage; of longer pipelines the middle is even, and the ends do not depend on its length."""


class _Ends(NamedTuple):
    """Of a shape, relative to the packs in the middle."""

    first: float
    last: float
    fall: float
    """What groups lack over what the next one lacks."""


def best_shape(model: StepModel, num_microbatches: int, fixed: float, room: float) -> IntArray:
    """Sizes of a rank's packs without their fixed costs, int64 [M], with a mean of about `MEAN`.

    fixed: a microbatch's fixed cost over the mean size. room: the largest size over the mean that is likely to fit the
    capacity.
    """
    fixed_parts, room_parts = min(round(fixed * _PARTS), 4 * _PARTS), min(int(room * _PARTS), 2 * _PARTS)
    group = model.stage_group if model.num_virtual_stages > 1 else 1
    length = min(num_microbatches, -(-_MOST_PER_STAGE * model.num_stages // group) * group)
    return _sizes(model, num_microbatches, _ends(model, length, fixed_parts, room_parts), fixed_parts)


@lru_cache(maxsize=1024)
def _ends(model: StepModel, num_microbatches: int, fixed_parts: int, room_parts: int) -> _Ends:
    """The best of those that are tried."""
    fixed, room, chunks = (
        MEAN * fixed_parts // _PARTS,
        MEAN * max(room_parts, _PARTS) // _PARTS,
        model.num_virtual_stages,
    )

    def quickest(ends: list[_Ends]) -> _Ends:
        sizes = np.stack([_sizes(model, num_microbatches, end, fixed_parts) for end in ends])
        times, largest = simulate((sizes + fixed) * chunks, model), sizes.max(axis=1)
        # What fits best comes first; of equally quick ones the evenest.
        return ends[int(np.lexsort((largest, times, np.maximum(largest - room, 0)))[0])]

    fractions = [step / _STEPS for step in range(1, _STEPS + 1)]
    falls = _FALLS if chunks > 1 else _FALLS[:1]
    first, last, fall = quickest([_Ends(*ends) for ends in product(fractions, fractions, falls)])
    halves = (-0.5 / _STEPS, 0.0, 0.5 / _STEPS)
    return quickest([_Ends(min(first + i, 1.0), min(last + j, 1.0), fall) for i in halves for j in halves])


def _sizes(model: StepModel, num_microbatches: int, ends: _Ends, fixed_parts: int) -> IntArray:
    """Without the fixed costs, for costs of the family (see above)."""
    first, last, fall_of_groups = ends
    if model.num_virtual_stages > 1:
        group = np.arange(num_microbatches) // model.stage_group
        lacking = np.full(int(group[-1]) + 1, fall_of_groups)
        lacking[0] = 1 - last
        costs = (1 - np.multiply.accumulate(lacking))[::-1][group]
        costs[group == 0] = np.minimum(costs[group == 0], first)
    else:
        # Products one after the other, and no powers: these are not the same on all machines.
        rise = np.full(min(num_microbatches, _MOST_RISING), 1 + 2 / max(model.num_stages - 1, 1))
        rise[0] = first
        fall = np.full(num_microbatches, 1 - 1 / model.num_stages)
        fall[0] = 1 - last
        costs = (1 - np.multiply.accumulate(fall))[::-1].copy()
        costs[: rise.size] = np.minimum(costs[: rise.size], np.multiply.accumulate(rise))
    cost = np.rint(_FINE * np.minimum(costs, 1.0)).astype(np.int64)
    mean_cost = MEAN * (_PARTS + fixed_parts) // _PARTS
    size = np.maximum(cost * (num_microbatches * mean_cost) // int(cost.sum()) - (mean_cost - MEAN), _SMALLEST)
    return size * (num_microbatches * MEAN) // int(size.sum())
