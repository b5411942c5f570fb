"""mcore. One rank decides for all: which sequences leave with this step, and where each of them is
trained.

Every drawing rank makes an `RankReport`; the first of them answers with a `Decision`. Both are
values, so that a scheduler may be anything: what it raises is heard by all ranks, and nobody has to
find the same answer twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from megatron.packing.batch.columns import Form
from megatron.packing.batch.samples import IntArray, Samples, common_form
from megatron.packing.scheduling.delay import capacity_that_matters, outliers_to_delay
from megatron.packing.scheduling.problem import ScheduleRequest, check_schedule
from megatron.packing.scheduling.registry import get_scheduler
from megatron.packing.step.delay import Delayed
from megatron.packing.step.draw import Draw
from megatron.packing.step.settings import PackingSettings
from megatron.packing.step.stats import PackingStats, packing_stats


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """What one drawing rank has at hand for a step; int64 [n] each."""

    lengths: IntArray
    draws: IntArray
    """Which `next` of this step gave each."""
    steps_delayed: IntArray
    num_loss_tokens: IntArray
    form: Form
    num_dropped: int = 0
    num_cut: int = 0
    ended: bool = False
    error: str | None = None

    @classmethod
    def of(cls, draw: Draw, delayed: Delayed | None, at_hand: Samples) -> RankReport:
        """Return what a rank says of the sequences that it has `at_hand`: those that waited, then
        what it drew.
        """
        waited = np.empty(0, np.int64) if delayed is None else delayed.steps
        return cls(
            lengths=at_hand.lengths,
            draws=np.concatenate((np.zeros_like(waited), draw.draws)),
            steps_delayed=np.concatenate((waited, np.zeros_like(draw.draws))),
            num_loss_tokens=at_hand.num_loss_tokens,
            form=at_hand.form,
            num_dropped=draw.num_dropped,
            num_cut=draw.num_cut,
            ended=draw.ended,
            error=draw.error,
        )


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Where the N sequences at hand go, by data-parallel rank that drew them and then as drawn
    there.
    """

    source_rank: npt.NDArray[np.int32]
    lengths: IntArray
    rank: npt.NDArray[np.int32]
    """int32 [N]: data-parallel rank that trains it; -1 where it waits for a later step."""
    microbatch: npt.NDArray[np.int32]
    form: Form
    """The columns that all of them travel with."""
    stats: PackingStats

    def pack_lengths(self) -> list[list[list[int]]]:
        """Return [rank][microbatch] -> real lengths of its sequences."""
        num_ranks, num_microbatches = self.stats.num_ranks, self.stats.microbatches
        pack = (self.rank.astype(np.int64) * num_microbatches + self.microbatch)[self.rank >= 0]
        order = np.argsort(pack, kind="stable")
        ends = np.cumsum(np.bincount(pack, minlength=num_ranks * num_microbatches))[:-1]
        packs = [part.tolist() for part in np.split(self.lengths[self.rank >= 0][order], ends)]
        return [
            packs[first : first + num_microbatches]
            for first in range(0, len(packs), num_microbatches)
        ]


class GlobalBatchError(RuntimeError):
    """A rank could not draw, schedule or place its part of the global batch. Raised alike on every
    rank.
    """


def decide(
    offers: Sequence[RankReport], num_draws: int, settings: PackingSettings, max_delay: int | None
) -> Decision | None:
    """Return what all ranks will do with what they offer; None where the data has ended and nothing
    is at hand.

    offers: by data-parallel rank. max_delay: steps that a sequence may be delayed by; None without
    a `DelayQueue`. Raises GlobalBatchError with the reason where a rank could not draw, or no valid
    schedule was found.
    """
    errors = [offer.error for offer in offers if offer.error is not None]
    if errors:
        raise GlobalBatchError(errors[0])
    ended = any(offer.ended for offer in offers)
    lengths, steps_delayed = (
        np.concatenate([getattr(offer, name) for offer in offers])
        for name in ("lengths", "steps_delayed")
    )
    if ended and not lengths.size:
        return None
    try:
        form = common_form([offer.form for offer in offers if offer.lengths.size])
    except ValueError as failure:
        raise GlobalBatchError(str(failure)) from None
    try:
        padded = settings.alignment.padded_length(lengths)
        waits = np.zeros(lengths.size, np.bool_)
        if max_delay is not None:
            waits = outliers_to_delay(
                padded,
                settings.cost,
                steps_delayed,
                num_ranks=len(offers),
                pack_capacity=capacity_that_matters(settings.model, settings.capacity, padded),
                max_steps=0 if ended else max_delay,  # no later step will bring company
            )
        request = _request(offers, ~waits, num_draws, settings)
        schedule = get_scheduler(settings.scheduler)(request)
        check_schedule(request, schedule)
    except (
        Exception,
        SystemExit,
    ) as failure:  # a scheduler may be the user's; the other ranks are waiting
        raise GlobalBatchError(
            f"scheduler '{settings.scheduler}': {type(failure).__name__}: {failure}"
        ) from failure
    rank, microbatch = (np.full(lengths.size, -1, np.int32) for _ in range(2))
    rank[~waits], microbatch[~waits] = schedule.rank, schedule.microbatch
    stats = packing_stats(
        request=request, schedule=schedule, length=lengths[~waits], alignment=settings.alignment
    )
    return Decision(
        source_rank=_source_rank(offers).astype(np.int32),
        lengths=lengths,
        rank=rank,
        microbatch=microbatch,
        form=form,
        stats=replace(
            stats,
            dropped_samples=sum(offer.num_dropped for offer in offers),
            cut_samples=sum(offer.num_cut for offer in offers),
            delays=[]
            if max_delay is None
            else np.bincount(steps_delayed[~waits], minlength=1).tolist(),
            waiting=int(waits.sum()),
        ),
    )


def _request(
    offers: Sequence[RankReport],
    is_kept: npt.NDArray[np.bool_],
    num_draws: int,
    settings: PackingSettings,
) -> ScheduleRequest:
    """Return what the scheduler is asked, of those offered sequences that are not delayed."""
    lengths, draws, steps_delayed, loss_tokens = (
        np.concatenate([getattr(offer, name) for offer in offers])[is_kept]
        for name in ("lengths", "draws", "steps_delayed", "num_loss_tokens")
    )
    return ScheduleRequest(
        lengths=settings.alignment.padded_length(lengths),
        source_rank=_source_rank(offers)[is_kept],
        source_draw=draws,
        steps_delayed=steps_delayed,
        loss_tokens=loss_tokens,
        num_ranks=len(offers),
        num_draws=num_draws,
        capacity=settings.capacity,
        microbatch_multiple=settings.microbatch_multiple,
        cost=settings.cost,
        model=settings.model,
        seed=settings.seed,
        step=settings.step,
    )


def _source_rank(offers: Sequence[RankReport]) -> npt.NDArray[np.int64]:
    """Return the data-parallel rank that offers each sequence, [N]."""
    return np.repeat(np.arange(len(offers)), [offer.lengths.size for offer in offers])
