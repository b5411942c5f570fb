"""The best of all schedules of a few sequences, to hold bounds and schedulers against."""

from dataclasses import replace
from functools import cache

import numpy as np
import numpy.typing as npt

from megatron.packing.scheduling.cost import PackCost
from megatron.packing.scheduling.problem import ScheduleRequest
from megatron.packing.scheduling.step_time import StepModel
from tests.unit_tests.packing.requests import request

IntArray = npt.NDArray[np.int64]


def descending(rng, low, high, size) -> IntArray:
    """Random integers in `low` to `high` - 1."""
    return np.sort(rng.integers(low, high, size))[::-1].astype(np.int64)


def check_packing(pack, length, capacity, num_packs):
    assert pack.shape == length.shape
    assert pack.min(initial=0) >= 0
    assert pack.max(initial=-1) < num_packs
    assert np.bincount(pack, weights=length, minlength=1).max() <= capacity


@cache
def assignments(num_sequences: int, num_outer: int, num_inner: int) -> npt.NDArray[np.bool_]:
    """All ways to put sequences into `num_outer` sets of `num_inner` packs each, but for renumbered
    sets and packs: bool [ways, num_outer, num_inner, num_sequences].
    """

    def extended(way: tuple[tuple[int, int], ...]):
        used = {outer: {b for a, b in way if a == outer} for outer in {a for a, _ in way}}
        for outer in range(min(len(used) + 1, num_outer)):
            for inner in range(min(len(used.get(outer, ())) + 1, num_inner)):
                yield (*way, (outer, inner))

    ways: list[tuple[tuple[int, int], ...]] = [()]
    for _ in range(num_sequences):
        ways = [longer for way in ways for longer in extended(way)]
    members = np.zeros((len(ways), num_outer, num_inner, num_sequences), np.bool_)
    for number, way in enumerate(ways):
        for sequence, (outer, inner) in enumerate(way):
            members[number, outer, inner, sequence] = True
    return members


def least_time(asked: ScheduleRequest, num_microbatches: int) -> float | None:
    """Of all valid schedules of even packs with that many microbatches; None if there are none."""
    # Where ranks meet, packs of one microbatch may change ranks; else, those of one rank may change
    # microbatches.
    model, shape = asked.model, (asked.num_ranks, num_microbatches)
    members = assignments(
        asked.lengths.size, *(shape[::-1] if model.sync_every_microbatch else shape)
    )
    members = members[(members @ asked.sorted.length).max(axis=(1, 2)) <= asked.capacity]
    if not len(members):
        return None
    costs = np.maximum(members @ asked.sorted.cost + asked.cost.fixed, asked.cost.least)
    if model.sync_every_microbatch:
        costs = costs.max(axis=2)[:, None]
    times = (costs.sum(axis=2) + model.bubble_packs * costs.max(axis=2)).max(axis=1)
    return float(times.min()) / model.effective_stages


def optimum(asked: ScheduleRequest) -> float:
    """The least time over all numbers of microbatches; more than sequences only add their fixed
    cost.
    """
    multiple = asked.microbatch_multiple
    numbers = range(multiple, max(asked.lengths.size, 1) + multiple, multiple)
    return min(time for number in numbers if (time := least_time(asked, number)) is not None)


def random_request(
    rng, model: StepModel, masks: bool = False, launches: bool = False
) -> ScheduleRequest:
    """Small enough for brute force. Costs are small integers in some, so that they tie. masks: some
    tokens have no loss and cost less, so that the longest need not be the costliest. launches:
    small packs cost more than what they hold.
    """
    longest = int(rng.integers(1, 25))
    lengths = descending(rng, 1, longest + 1, rng.integers(0, 7))
    capacity = int(lengths.max(initial=1) * rng.choice([1, 1, 1.25, 1.5, 2, 3, 10]))
    divisor = 3 if rng.random() < 0.3 else 1
    cost = PackCost(
        int(rng.integers(1, 4)) / divisor,
        int(rng.integers(0, 3)) / divisor,
        float(rng.choice([0, 0, 1, 5, 30, 300])),
    )
    multiple = int(rng.choice([1, 1, 2, 3])) * model.stage_group
    loss_tokens = None
    if masks:
        cost, loss_tokens = replace(cost, head=cost.linear / 2), rng.integers(0, lengths + 1)
    if launches:
        cost = replace(cost, least=float(rng.choice([1, 10, 100, 1000])))
    return request(
        lengths,
        int(rng.integers(1, 4)),
        capacity,
        microbatch_multiple=multiple,
        cost=cost,
        model=model,
        loss_tokens=loss_tokens,
    )


MODES = {
    "ranks": [StepModel()],
    "pipelines": [StepModel(num_stages=stages) for stages in (2, 3, 4)],
    "unequal stages": [
        StepModel(num_stages=2, shares=(0.25, 0.75)),
        StepModel(num_stages=2, shares=(0.6, 0.4)),
        StepModel(num_stages=3, shares=(0.25, 0.3, 0.45)),
    ],
    "ranks that meet": [
        StepModel(num_stages=stages, sync_every_microbatch=True) for stages in (1, 2, 4)
    ],
}
