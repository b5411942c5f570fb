"""The best of all schedules of a few sequences, to hold bounds and schedulers against."""

from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.packing.scheduling.cost import PackCost
from megatron.packing.scheduling.step_time import StepModel
from megatron.packing.scheduling.work import Work

IntArray = npt.NDArray[np.int64]


def descending(rng, low, high, size) -> IntArray:
    """Random integers in `low` to `high` - 1."""
    return np.sort(rng.integers(low, high, size))[::-1].astype(np.int64)


def fits(lengths: list[int], rooms: tuple[int, ...]) -> bool:
    """Whether there is a packing into packs with so much room."""
    if not lengths:
        return True
    return any(
        fits(lengths[1:], (*rooms[:i], room - lengths[0], *rooms[i + 1 :]))
        for i, room in enumerate(rooms)
        if room >= lengths[0] and room not in rooms[:i]
    )


def check_packing(pack, length, capacity, num_packs):
    assert pack.shape == length.shape
    assert pack.min(initial=0) >= 0
    assert pack.max(initial=-1) < num_packs
    assert np.bincount(pack, weights=length, minlength=1).max() <= capacity


@cache
def assignments(num_sequences: int, num_outer: int, num_inner: int) -> npt.NDArray[np.bool_]:
    """All ways to put sequences into `num_outer` sets of `num_inner` packs each, but for renumbered sets and packs, and
    with no pack empty if there are as many sequences: bool [ways, num_outer, num_inner, num_sequences].
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
    if num_sequences >= num_outer * num_inner:
        members = members[members.any(axis=3).reshape(len(ways), -1).all(axis=1)]
    return members


def least_time(work: Work, num_ranks: int, num_microbatches: int, capacity: int, model: StepModel) -> int | None:
    """Of all valid schedules with that many microbatches; None if there are none."""
    # Where ranks meet, packs of one microbatch may change ranks; else, those of one rank may change microbatches.
    shape = (num_microbatches, num_ranks) if model.ranks_meet else (num_ranks, num_microbatches)
    members = assignments(work.cost.size, *shape)
    members = members[(members @ work.length).max(axis=(1, 2)) <= capacity]
    if not len(members):
        return None
    costs = members @ work.cost + work.fixed
    more = model.num_stages - 1
    if model.ranks_meet:
        rows = costs.max(axis=2)
        return int((rows.sum(axis=1) + more * rows.max(axis=1)).min())
    return int((costs.sum(axis=2) + more * costs.max(axis=2)).max(axis=1).min())


class Instance(NamedTuple):
    work: Work
    num_ranks: int
    capacity: int
    multiple: int


def random_instance(rng) -> Instance:
    """Small enough for brute force. Costs are small integers in some, so that they tie, and rounded in others."""
    longest = int(rng.integers(1, 25))
    length = descending(rng, 1, longest + 1, rng.integers(0, 7))
    capacity = int(length.max(initial=1) * rng.choice([1, 1, 1.25, 1.5, 2, 3, 10]))
    linear, quadratic = int(rng.integers(1, 4)), int(rng.integers(0, 3))
    fixed = int(rng.choice([0, 0, 1, 5, 30, 300]))
    if rng.random() < 0.3:
        work = Work.of(length, PackCost(linear / 3, quadratic / 7, fixed / 3))
    else:
        cost = length * (linear + quadratic * length)
        work = Work(order=np.arange(length.size), length=length, cost=cost, fixed=fixed, unit=1.0)
    return Instance(work, int(rng.integers(1, 4)), capacity, int(rng.choice([1, 1, 2, 3])))


MODES = {
    "ranks": [StepModel()],
    "pipelines": [StepModel(num_stages=stages) for stages in (2, 3, 4)],
    "ranks that meet": [StepModel(num_stages=stages, ranks_meet=True) for stages in (1, 2, 4)],
}
