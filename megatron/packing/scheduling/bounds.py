"""pure. What no schedule can be better than, to start schedulers from and to judge them by.

Invariant, tested by brute force: a bound is never above the optimum of the schedules that leave no pack empty, unless
there are fewer sequences than packs. All is exact in integers (see `work`), rounded towards the weaker bound.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from megatron.packing.scheduling.pack_bounds import IntArray, Span, fewest_microbatches
from megatron.packing.scheduling.rank_bounds import RankBounds
from megatron.packing.scheduling.row_bounds import RowBounds
from megatron.packing.scheduling.step_time import StepModel
from megatron.packing.scheduling.work import Work

_NUM_SINGLE = 32
"""Numbers of microbatches that are bounded one by one."""
_NUM_SPANS = 24
"""Spans of numbers of microbatches that follow, each a quarter longer than the one before it; the last has no end."""


class MicrobatchBound(NamedTuple):
    """No schedule of so many microbatches per rank takes less than `time`."""

    time: int
    num_microbatches: int


@dataclass(frozen=True, kw_only=True)
class StepBound:
    """Lower bounds of the modelled step time (`StepModel.time_of`), in its unit."""

    time: int
    """No schedule takes less."""
    min_microbatches: int
    """No schedule has fewer per rank."""
    packing: IntArray | None = field(compare=False, repr=False)
    """A pack for each of the sequences in the order of the work, int64 [N], of which there are no more than in
    `min_microbatches`; None where none is known (see `fewest_microbatches`).
    """
    by_microbatches: tuple[MicrobatchBound, ...]
    """Numbers of microbatches from the fewest on, with gaps, the lowest bound first; each bound holds up to the next
    number.
    """


def step_bound(work: Work, num_ranks: int, capacity: int, multiple: int, model: StepModel) -> StepBound:
    """The least over all numbers of microbatches of what a step with that many takes at the least. O(N log N), but
    for a search where it stays open how many packs are needed (see `fewest_microbatches`).
    """
    # Where ranks meet, microbatches whose packs are all empty cost no more than their fixed cost.
    rows, packing = fewest_microbatches(work.length, num_ranks, capacity, 1 if model.ranks_meet else multiple)
    fewest = -(-rows // multiple) * multiple
    if work.cost.size == 0:
        time = work.fixed * (fewest + model.num_stages - 1)
        by_microbatches = (MicrobatchBound(time, fewest),)
        return StepBound(time=time, min_microbatches=fewest, packing=packing, by_microbatches=by_microbatches)
    bounds: RankBounds | RowBounds
    if model.ranks_meet:
        bounds = RowBounds(work, num_ranks, capacity, model.num_stages, rows)
    else:
        bounds = RankBounds(work, num_ranks, capacity, model.num_stages)
    spans = sorted((bounds.quick(span), span) for span in _spans(fewest, multiple))
    found: list[MicrobatchBound] = []
    for quick, span in spans:
        rival = found[0].time if found else None
        time = quick if rival is not None and quick >= rival else bounds.of(span, rival)
        found.append(MicrobatchBound(time, span.first))
        found.sort()
    return StepBound(time=found[0].time, min_microbatches=fewest, packing=packing, by_microbatches=tuple(found))


def _spans(fewest: int, multiple: int) -> list[Span]:
    singles = [Span(number, number) for number in range(fewest, fewest + _NUM_SINGLE * multiple, multiple)]
    firsts = [singles[-1].first + multiple]
    for _ in range(_NUM_SPANS - 1):
        firsts.append(firsts[-1] + -(-firsts[-1] // (4 * multiple)) * multiple)
    return singles + [Span(a, b - multiple) for a, b in pairwise(firsts)] + [Span(firsts[-1], None)]
