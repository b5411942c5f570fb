"""pure. How large a pipeline's packs would best be, one after the other, were sequences divisible.

Equal packs are not the quickest under 1F1B. While the pipeline fills, the last stage waits for each pack to pass all
stages before it: packs may grow by a factor of 1 + 2 / (stages - 1) from one to the next without making it wait again,
for it is busy with a pack's forward and backward, three thirds of its cost, while the next pack's forwards take a third
per stage. While it drains, packs may shrink, the faster the nearer they are to the end. What the ends leave out, larger
packs in between take, while all stages are busy. Interleaved pipelines run groups of packs through one chunk after the
other: there the first group and the last one are smaller. How small the first and the last pack are is found by
simulation. With 2 to 16 stages that comes within half a percent of the optimum, by linear programming; interleaved,
within two percent.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from megatron.packing.scheduling.step_time import StepModel, simulate

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

_COST = 1 << 24
"""Of the mean pack in simulations; a multiple of any number of chunks within a part in a million."""
_STEPS = 8
"""Sizes of the first pack that are tried, and as many of the last, up to the size of those in the middle; then those
halfway to the next ones of the best.
"""
_PARTS = 16
"""Fixed cost and room are rounded to such parts of the mean pack, so that steps alike share a search."""
_SMALLEST = 1 / 16
"""Of the mean: no pack is empty, however large its fixed cost."""
_MOST_PER_STAGE = 8
"""Microbatches per stage; of longer pipelines the middle is even, and the ends do not depend on its length."""


def best_shape(model: StepModel, num_microbatches: int, fixed: float, room: float) -> FloatArray:
    """Sizes of a rank's packs without their fixed costs, float64 [M], relative to their mean.

    fixed: a microbatch's fixed cost over the mean size. room: the largest size over the mean that is likely to fit the
    capacity.
    """
    fixed_parts, room_parts = min(round(fixed * _PARTS), 4 * _PARTS), min(int(room * _PARTS), 2 * _PARTS)
    group = model.stage_group if model.num_virtual_stages > 1 else 1
    length = min(num_microbatches, -(-_MOST_PER_STAGE * model.num_stages // group) * group)
    first, last = _ends(model, length, fixed_parts, room_parts)
    return _sizes(model, num_microbatches, first, last, fixed_parts / _PARTS)


@lru_cache(maxsize=1024)
def _ends(model: StepModel, num_microbatches: int, fixed_parts: int, room_parts: int) -> tuple[float, float]:
    """Costs of the first and the last pack over those in the middle."""
    fixed, room, chunks = fixed_parts / _PARTS, max(room_parts / _PARTS, 1.0), model.num_virtual_stages

    def quickest(ends: list[tuple[float, float]]) -> tuple[float, float]:
        sizes = np.stack([_sizes(model, num_microbatches, *end, fixed) for end in ends])
        costs = np.rint((sizes + fixed) * (_COST // chunks)).astype(np.int64) * chunks
        largest = sizes.max(axis=1)
        # What fits best comes first; of equally quick ones the evenest.
        order = np.lexsort((largest, simulate(costs, model), np.maximum(largest - room, 0)))
        return ends[int(order[0])]

    fractions = [step / _STEPS for step in range(1, _STEPS + 1)]
    first, last = quickest([(first, last) for first in fractions for last in fractions])
    halves = (-0.5 / _STEPS, 0.0, 0.5 / _STEPS)
    return quickest([(min(first + i, 1.0), min(last + j, 1.0)) for i in halves for j in halves])


def _sizes(model: StepModel, num_microbatches: int, first: float, last: float, fixed: float) -> FloatArray:
    """Without the fixed costs, with a mean of 1, for costs of the family (see above)."""
    at = np.arange(num_microbatches)
    if model.num_virtual_stages > 1:
        group = at // model.stage_group
        costs = np.where(group == group[-1], last, 1.0)
        costs[group == 0] = np.minimum(costs[group == 0], first)
    else:
        growth = 1 + 2 / max(model.num_stages - 1, 1)
        # Beyond some power all are in the middle: no overflow.
        rise = first * growth ** np.minimum(at, 64)
        fall = 1 - (1 - last) * (1 - 1 / model.num_stages) ** at[::-1]
        costs = np.minimum(np.minimum(rise, 1.0), fall)
    sizes = np.maximum(costs / costs.mean() * (1 + fixed) - fixed, _SMALLEST)
    return sizes / sizes.mean()
