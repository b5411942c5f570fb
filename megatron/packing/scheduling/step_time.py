"""pure. Modelled time of a step: how ranks wait for one another, 1F1B pipelines simulated, and a
lower bound.

A pack costs the sum of its sequences' costs and a fixed cost per microbatch. In the model a step
takes

    one stage           the costliest rank's sum over its packs
    several stages      the slowest rank's 1F1B pipeline, simulated; each stage does its share
    ranks in step       the time of one rank that runs the costliest pack of each microbatch

A pipeline of `stages` whose packs are even takes (sum + (stages - 1) / chunks * costliest pack) /
stages, a flow shop, which bounds and placements start from. With small packs first and last 1F1B
takes less, and with unequal packs in a bad order more. Where stages are unequal, `stages` is how
many as slow as the slowest make up a pack.

Invariant of the bound, tested by brute force: no schedule takes less. In pipelines no schedule of
even packs does, as 1F1B with small packs first and last is quicker.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.packing.scheduling import compiled

FloatArray = npt.NDArray[np.float64]

GOOD_ENOUGH = 1.0002
"""Modelled time over its bound, at which searches end: no cost model is as accurate as that."""


@dataclass(frozen=True, kw_only=True)
class StepModel:
    """Parallel layout, as far as it makes ranks wait for one another."""

    num_stages: int = 1
    """Pipeline-parallel size."""
    num_virtual_stages: int = 1
    """Model chunks per rank (interleaved pipelines)."""
    stage_group: int = 1
    """Microbatches that one chunk runs before the next does (`microbatch_group_size_per_vp_stage`);
    at least `num_stages` in interleaved pipelines, whose stages would wait for one another for ever
    with fewer.
    """
    sync_every_microbatch: bool = False
    """Data-parallel ranks wait for one another at each microbatch, as with expert parallelism."""
    shares: tuple[float, ...] = ()
    """Share of a pack's time of each chunk of each stage, in the order of the layers (chunk *
    num_stages + stage); they add up to 1. Empty where all are equal.
    """

    def __post_init__(self) -> None:
        for name in ("num_stages", "num_virtual_stages", "stage_group"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, but is {getattr(self, name)}")
        if self.num_virtual_stages > 1 and self.stage_group < self.num_stages:
            raise ValueError(
                f"stage_group must be at least num_stages, {self.num_stages}, in an interleaved "
                f"pipeline, but is {self.stage_group}"
            )
        if self.shares:
            self._check_shares()

    def _check_shares(self) -> None:
        count = self.num_stages * self.num_virtual_stages
        if len(self.shares) != count or min(self.shares) < 0:
            raise ValueError(
                f"shares must be {count} numbers of at least 0, one for each chunk of each stage, "
                f"but are {self.shares}"
            )
        if not math.isclose(sum(self.shares), 1, rel_tol=1e-6):
            raise ValueError(f"shares must add up to 1, but are {self.shares}")
        if math.isclose(min(self.shares), max(self.shares), rel_tol=1e-9):
            object.__setattr__(self, "shares", ())  # equal stages are one model, however written

    @property
    def only_rank_sums_count(self) -> bool:
        """Returns whether a step takes the costliest rank's sum, however it is divided into packs:
        there is no pipeline, and ranks wait for one another only at the end of the step.
        """
        return self.num_stages == 1 and not self.sync_every_microbatch

    @property
    def relative_shares(self) -> tuple[float, ...]:
        """Share of each chunk of each stage over the mean share: all 1.0 where they are equal."""
        count = self.num_stages * self.num_virtual_stages
        return tuple(share * count for share in self.shares) or (1.0,) * count

    @property
    def effective_stages(self) -> float:
        """Stages as slow as the slowest that a pack's time would make: `num_stages` where they are
        equal.

            3 stages with shares 0.2 0.3 0.5    ->    2
        """
        if not self.shares:
            return self.num_stages
        return 1 / max(
            sum(self.shares[stage :: self.num_stages]) for stage in range(self.num_stages)
        )

    @property
    def bubble_packs(self) -> float:
        """Packs' time that a pipeline of even packs spends on filling and draining, at most."""
        return (self.effective_stages - 1) / self.num_virtual_stages

    def stage_paces(self) -> list[tuple[float, float]]:
        """Returns (stages, filling_packs) of each stage.

        `stages` says how many stages like it one pack's whole time would make. `filling_packs` is
        the number of packs that it could do while the first pack comes to it, and while the last
        one goes back through the stages before it. Of equal stages only the last one is returned,
        which is busy for the longest.

            shares 0.2 0.3 0.5    ->    (5, 0) (3.3, 0.7) (2, 1)
        """
        if not self.shares:
            return [(self.num_stages, self.bubble_packs)]
        of_stage = [sum(self.shares[stage :: self.num_stages]) for stage in range(self.num_stages)]
        return [
            (1 / share, sum(self.shares[:stage]) / share)
            for stage, share in enumerate(of_stage)
            if share > 0
        ]

    def run_packs(self, pack_costs: FloatArray) -> FloatArray:
        """Returns the costs of the packs as they run, [ranks, microbatches].

        With `sync_every_microbatch` [1, microbatches]: the costliest pack of each stands for all.

            [[5, 1], [2, 4]]    ->    [[5, 4]]
        """
        if self.sync_every_microbatch:
            return pack_costs.max(axis=0, keepdims=True)
        return pack_costs

    def time_of(self, pack_costs: FloatArray) -> float:
        """Returns the modelled time of a step whose packs run in this order.

        Args:
            pack_costs: [ranks, microbatches], with the fixed cost in each.
        """
        return float(simulate(self.run_packs(pack_costs), self).max())

    def even_time_of(self, pack_costs: FloatArray) -> float:
        """Returns the modelled time of a step of even packs: a flow shop, whatever their order.

        Filling and draining are counted at each rank's costliest pack.
        """
        packs = self.run_packs(pack_costs)
        return float(
            (packs.sum(axis=1) + self.bubble_packs * packs.max(axis=1)).max()
            / self.effective_stages
        )


def step_bound(
    cost: FloatArray, of_rank: float, fixed: float, fewest: int, model: StepModel
) -> float:
    """Returns a lower bound of the step time with at least `fewest` microbatches.

    The largest of all stages' bounds: each does its share of all packs, after the first pack has
    come to it and before the last one has gone back. In the unit of the cost.

    Args:
        cost: float64 [N], of the sequences.
        of_rank: lower bound of the costliest rank's sum of packs as they run.
        fixed: cost of a microbatch besides.
        fewest: least number of microbatches.
    """
    return max(
        _stage_bound(cost, of_rank, fixed, fewest, more, model) / stages
        for stages, more in model.stage_paces()
    )


def _stage_bound(
    cost: FloatArray, of_rank: float, fixed: float, fewest: int, more: float, model: StepModel
) -> float:
    """Returns a lower bound of a stage's time over its share of a pack.

    more: packs that could be done while it is filled and drained.
    """
    if cost.size == 0:
        return fixed * (fewest + more)
    costliest = float(cost.max())
    longest = costliest * (1 + more)
    # Time falls with the number of microbatches, as there is less to fill and drain, and grows by
    # their fixed costs. The best number, were it any from the fewest on:
    if model.sync_every_microbatch:
        best = of_rank / costliest
    else:
        best = more * of_rank / (longest - of_rank) if longest > of_rank else math.inf
    best = min(best, math.sqrt(more * of_rank / fixed) if fixed > 0 else math.inf)
    num_microbatches = max(fewest, min(best, cost.size))
    mean = of_rank / num_microbatches
    filling = more * (max(mean, costliest) if model.sync_every_microbatch else mean)
    return max(of_rank + filling, longest) + fixed * (num_microbatches + more)


class Operation(NamedTuple):
    """One forward or backward pass of one model chunk over one microbatch."""

    backward: bool
    microbatch: int
    chunk: int


class TimedOperation(NamedTuple):
    """Start and end of an operation of a stage, float64 [ranks]."""

    stage: int
    operation: Operation
    start: FloatArray
    end: FloatArray


def simulate(pack_costs: FloatArray, model: StepModel) -> FloatArray:
    """Simulates 1F1B; returns when each rank's pipeline ends, float64 [ranks].

    Args:
        pack_costs: [ranks, microbatches], in the order in which they run.

    A stage does its share of a pack: a third of it forward and two thirds backward. Sending takes
    no time.
    """
    num_ranks, num_microbatches = pack_costs.shape
    if model.num_stages == 1:
        return pack_costs.sum(axis=1)
    end = np.zeros(num_ranks)
    if compiled.CORE is not None:
        costs = np.ascontiguousarray(pack_costs, np.float64)
        shape = (model.num_stages, model.num_virtual_stages, model.stage_group)
        shares = np.array(model.relative_shares)
        is_done = compiled.CORE.call(
            "simulate", num_ranks, num_microbatches, costs, *shape, shares, end
        )
        assert is_done, "stages wait for one another"
        return end
    for timed in timeline(pack_costs, model):
        end = np.maximum(end, timed.end)
    return end


def timeline(pack_costs: FloatArray, model: StepModel) -> Iterator[TimedOperation]:
    """Every operation of every stage with its times (see `simulate`), each stage's in the order in
    which it runs them.

    One chunk of an interleaved stage takes its share of the stage's time.
    """
    num_ranks, num_microbatches = pack_costs.shape
    shares = model.relative_shares
    ends: dict[tuple[int, Operation], FloatArray] = {}
    free = [np.zeros(num_ranks) for _ in range(model.num_stages)]
    third = pack_costs / (3 * model.num_stages * model.num_virtual_stages)
    for stage, operation in _order(
        model.num_stages, model.num_virtual_stages, model.stage_group, num_microbatches
    ):
        before = _needs(stage, operation, model.num_stages, model.num_virtual_stages)
        start = free[stage] if before is None else np.maximum(free[stage], ends[before])
        share = shares[operation.chunk * model.num_stages + stage]
        end = start + third[:, operation.microbatch] * ((2 if operation.backward else 1) * share)
        free[stage] = ends[stage, operation] = end
        yield TimedOperation(stage, operation, start, end)


def _needs(
    stage: int, operation: Operation, num_stages: int, num_chunks: int
) -> tuple[int, Operation] | None:
    """The operation, and its stage, whose result this one takes in; None for the first of all."""
    backward, microbatch, chunk = operation
    # Chunks and stages in the order of layers; a backward pass comes from the next place.
    place = chunk * num_stages + stage + (1 if backward else -1)
    if place < 0:
        return None
    if place == num_chunks * num_stages:
        return stage, Operation(False, microbatch, chunk)
    return place % num_stages, Operation(backward, microbatch, place // num_stages)


@lru_cache(maxsize=64)
def _order(
    num_stages: int, num_chunks: int, stage_group: int, num_microbatches: int
) -> tuple[tuple[int, Operation], ...]:
    """All operations, each after those that it needs, each stage's in the order of megatron-core's
    schedules.
    """
    programs = [
        _program(stage, num_stages, num_chunks, stage_group, num_microbatches)
        for stage in range(num_stages)
    ]
    next_of = [0] * num_stages
    done: set[tuple[int, Operation]] = set()
    order: list[tuple[int, Operation]] = []
    total = sum(map(len, programs))
    while len(order) < total:
        before = len(order)
        for stage, program in enumerate(programs):
            while next_of[stage] < len(program):
                operation = program[next_of[stage]]
                need = _needs(stage, operation, num_stages, num_chunks)
                if need is not None and need not in done:
                    break
                done.add((stage, operation))
                order.append((stage, operation))
                next_of[stage] += 1
        assert len(order) > before, "stages wait for one another"
    return tuple(order)


def _program(
    stage: int, num_stages: int, num_chunks: int, stage_group: int, num_microbatches: int
) -> list[Operation]:
    """1F1B, or megatron-core's interleaved 1F1B, of one stage: forwards to fill the pipeline, then
    one forward and one backward in turn.
    """
    forwards = _passes(False, num_chunks, stage_group, num_microbatches)
    backwards = _passes(True, num_chunks, stage_group, num_microbatches)
    if num_chunks == 1:  # stage 0 of 4 runs 3 forwards first, the last stage none
        warmup = num_stages - stage - 1
    else:
        warmup = (num_stages - stage - 1) * 2 + (num_chunks - 1) * stage_group
    warmup = min(warmup, len(forwards))
    program = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards):
        program += [forward, backward]
    return program + backwards[len(forwards) - warmup :]


def _passes(
    backward: bool, num_chunks: int, stage_group: int, num_microbatches: int
) -> list[Operation]:
    """A group of microbatches through one chunk after the other, then the next group."""
    if num_chunks == 1:
        return [Operation(backward, microbatch, 0) for microbatch in range(num_microbatches)]
    chunks = range(num_chunks - 1, -1, -1) if backward else range(num_chunks)
    return [
        Operation(backward, microbatch, chunk)
        for start in range(0, num_microbatches, stage_group)
        for chunk in chunks
        for microbatch in range(start, min(start + stage_group, num_microbatches))
    ]
