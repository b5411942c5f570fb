"""mcore. Chooses the sequences that this step trains, and the rank and microbatch of each.

Every data rank makes a `RankReport`. The first of them, the scheduling rank, answers with a
`Decision`, which all receive. Both are values, so that a scheduler may be anything: its exception
reaches all ranks, and no two ranks have to find the same answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.packing.batch.columns import PAYLOAD_COSTS, IntArray, Schema, Sizes
from megatron.packing.batch.layout import Alignment
from megatron.packing.batch.nodes import SampleSizes
from megatron.packing.batch.samples import SchemaOfPart
from megatron.packing.batch.tree_shapes import ShapedSamples
from megatron.packing.scheduling.delay import capacity_that_matters, outliers_to_delay
from megatron.packing.scheduling.problem import ScheduleRequest, check_schedule
from megatron.packing.scheduling.registry import get_scheduler
from megatron.packing.step.delay import Delayed
from megatron.packing.step.load import Loaded
from megatron.packing.step.run_fields import RunFields
from megatron.packing.step.settings import PackingSettings
from megatron.packing.step.stats import PackingStats, packing_stats

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """The sequences that a data rank offers to a step; int64 [n] each."""

    lengths: IntArray
    fetch: IntArray
    """Number of the `next` call of this step that gave each sequence; 0 for those that waited."""
    steps_delayed: IntArray
    num_loss_tokens: IntArray
    schema: Schema
    ragged: Mapping[str, IntArray] = field(default_factory=dict)
    """Rows of each sequence in columns of further scopes (`Sizes.ragged`); empty without any."""
    tree_sizes: SampleSizes | None = None
    """Sizes of every sequence; None if none has more than one node."""
    part: IntArray | None = None
    """0 for a whole sample, 1, 2, ... for the parts of one that was cut, which are trained in one
    step; None if all are whole.
    """
    payload_costs: FloatArray | None = None
    """float64 [n], if any has a payload."""
    num_dropped: int = 0
    num_truncated: int = 0
    ended: bool = False
    error: str | None = None

    @classmethod
    def of(
        cls,
        loaded: Loaded,
        delayed: Delayed | None,
        shaped_samples: ShapedSamples,
        alignment: Alignment,
    ) -> RankReport:
        """Returns the report of a rank with these sequences: those that waited, then those that it
        loaded.
        """
        waited = np.empty(0, np.int64) if delayed is None else delayed.steps
        samples, original_index = shaped_samples
        # 1 waited and 2 loaded, of which a tree is cut in two: original_index 0 1 2 2. All parts
        # have the fetch of their tree.
        return cls(
            lengths=samples.lengths,
            fetch=np.concatenate((np.zeros_like(waited), loaded.fetch))[original_index],
            steps_delayed=np.concatenate((waited, np.zeros_like(loaded.fetch)))[original_index],
            num_loss_tokens=samples.num_loss_tokens,
            schema=samples.schema,
            ragged=samples.sizes.ragged,
            tree_sizes=SampleSizes.of_trees(samples, alignment),
            part=shaped_samples.parts(),
            payload_costs=samples.columns.get(PAYLOAD_COSTS),
            num_dropped=loaded.num_dropped,
            num_truncated=loaded.num_truncated,
            ended=loaded.ended,
            error=loaded.error,
        )

    @property
    def parts(self) -> IntArray:
        """`part`, 0 for all if all are whole."""
        return np.zeros_like(self.lengths) if self.part is None else self.part


class Reports(NamedTuple):
    """The reports of all ranks, one after the other: int64 [N] each."""

    source_rank: IntArray
    lengths: IntArray
    fetch: IntArray
    steps_delayed: IntArray
    num_loss_tokens: IntArray
    part: IntArray
    tree_sizes: SampleSizes | None
    """None if no rank has trees."""
    payload_costs: FloatArray | None
    """float64 [N]; None if no rank has payloads."""

    @classmethod
    def of(cls, reports: Sequence[RankReport], alignment: Alignment) -> Reports:
        """Returns them joined."""
        of_sequences = {
            name: np.concatenate([getattr(report, name) for report in reports])
            for name in ("lengths", "fetch", "steps_delayed", "num_loss_tokens")
        }
        parts = [report.parts for report in reports]
        sizes = [report.lengths.size for report in reports]
        return cls(
            source_rank=np.repeat(np.arange(len(reports)), sizes),
            part=np.concatenate(parts),
            tree_sizes=_joined_tree_sizes(reports, alignment),
            payload_costs=_joined_costs(reports),
            **of_sequences,
        )

    def padded(self, alignment: Alignment) -> tuple[IntArray, IntArray | None]:
        """Returns the tokens that each occupies, and the squares if they are not L^2."""
        if self.tree_sizes is None:
            return alignment.padded_length(self.lengths), None
        return self.tree_sizes.padded, self.tree_sizes.padded_squares

    def kept(self, is_kept: npt.NDArray[np.bool_]) -> Reports:
        """Returns some of the sequences."""
        tree_sizes = self.tree_sizes
        if tree_sizes is not None:
            tree_sizes = SampleSizes(*(values[is_kept] for values in tree_sizes))
        columns = {
            name: values[is_kept]
            for name, values in self._asdict().items()
            if name != "tree_sizes" and values is not None
        }
        return self._replace(**columns, tree_sizes=tree_sizes)


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The place of each of the N sequences of all ranks, in the order of their reports."""

    source_rank: npt.NDArray[np.int32]
    sizes: Sizes
    rank: npt.NDArray[np.int32]
    """int32 [N]: data-parallel rank that trains it; -1 if it waits for a later step."""
    microbatch: npt.NDArray[np.int32]
    schema: Schema
    """The columns that all of them travel with."""
    stats: PackingStats
    tree_sizes: SampleSizes | None = None
    """Sizes of every sequence; None if none has more than one node."""
    loss_tokens: IntArray | None = None
    """int64 [N], if any is a tree."""
    payload_costs: FloatArray | None = None
    """float64 [N], if any has a payload."""

    def _packs(self) -> tuple[IntArray, IntArray]:
        """Returns the sequences that are trained, by rank and microbatch, and the pack of each."""
        trained = np.flatnonzero(self.rank >= 0)
        # 2 microbatches: rank 1, microbatch 0    ->    pack 2
        pack = self.rank[trained].astype(np.int64) * self.stats.microbatches
        pack += self.microbatch[trained]
        order = np.argsort(pack, kind="stable")
        return trained[order], pack[order]

    def pack_sizes(self) -> dict[str, list[Any]]:
        """Returns sizes of the sequences in `pack_lengths`, one after the other, by name; empty
        if none is a tree or has a payload.
        """
        sizes: dict[str, npt.NDArray[Any] | None] = {"payload_costs": self.payload_costs}
        if self.tree_sizes is not None:
            sizes |= {**self.tree_sizes._asdict(), "loss_tokens": self.loss_tokens}
        known = {name: each for name, each in sizes.items() if each is not None}
        order = self._packs()[0] if known else None
        return {name: each[order].tolist() for name, each in known.items()}

    def pack_lengths(self) -> list[list[list[int]]]:
        """Returns [rank][microbatch] -> real lengths of its sequences."""
        num_ranks, num_microbatches = self.stats.num_ranks, self.stats.microbatches
        order, pack = self._packs()
        # Packs 0 0 2 of 4    ->    2 0 1 0 sequences, split after 2, 2 and 3 of them
        ends = np.cumsum(np.bincount(pack, minlength=num_ranks * num_microbatches))[:-1]
        lengths = self.sizes.lengths[order]
        packs = [part.tolist() for part in np.split(lengths, ends)]
        return [
            packs[first : first + num_microbatches]
            for first in range(0, len(packs), num_microbatches)
        ]


class GlobalBatchError(RuntimeError):
    """A rank could not load, schedule or place its part of the global batch.

    Raised alike on every rank.
    """


def decide(
    reports: Sequence[RankReport],
    num_fetches: int,
    settings: PackingSettings,
    max_delay: int | None,
    run_fields: RunFields | None = None,
) -> Decision | None:
    """Returns the place of each reported sequence; None if none is left at the end of the data.

    Args:
        reports: by data-parallel rank.
        max_delay: steps that a sequence may be delayed by; None without a `DelayQueue`.
        run_fields: fields of the samples of earlier steps; None for a step by itself.

    Raises:
        GlobalBatchError: with the reason, if a rank could not load, or no valid schedule was
            found.
    """
    schema = _checked_schema(reports, run_fields or RunFields())
    batch = Reports.of(reports, settings.alignment)
    ended = any(report.ended for report in reports)
    if ended and not batch.lengths.size:
        return None
    try:
        waits = np.zeros(batch.lengths.size, np.bool_)
        if max_delay is not None:  # after the end no later step brings company
            waits = _outliers(batch, len(reports), settings, 0 if ended else max_delay)
        kept = batch.kept(~waits)
        request = _request(kept, len(reports), num_fetches, settings)
        schedule = get_scheduler(settings.scheduler)(request)
        check_schedule(request, schedule)
    # A scheduler may be the user's and raise anything, while the other ranks wait.
    except (Exception, SystemExit) as failure:
        raise GlobalBatchError(
            f"scheduler '{settings.scheduler}': {type(failure).__name__}: {failure}"
        ) from failure
    # Sequences that wait keep rank -1: every rank finds its own part by its data-parallel rank.
    rank, microbatch = (np.full(waits.size, -1, np.int32) for _ in range(2))
    rank[~waits], microbatch[~waits] = schedule.rank, schedule.microbatch
    stats = packing_stats(
        request=request,
        schedule=schedule,
        length=kept.lengths,
        alignment=settings.alignment,
        trees=kept.tree_sizes,
    )
    return Decision(
        source_rank=batch.source_rank.astype(np.int32),
        sizes=Sizes.joined(
            [Sizes(lengths=report.lengths, ragged=report.ragged) for report in reports]
        ),
        rank=rank,
        microbatch=microbatch,
        schema=schema,
        tree_sizes=batch.tree_sizes,
        loss_tokens=None if batch.tree_sizes is None else batch.num_loss_tokens,
        payload_costs=batch.payload_costs,
        stats=_with_counts(
            stats, reports, kept, int(waits.sum()), is_delaying=max_delay is not None
        ),
    )


def _with_counts(
    stats: PackingStats,
    reports: Sequence[RankReport],
    kept: Reports,
    num_waiting: int,
    *,
    is_delaying: bool,
) -> PackingStats:
    """Returns the account with what is not in the schedule: samples that are dropped, truncated,
    delayed, or waiting.
    """
    # A part is 0 for a whole sample, 1 for the first part of a cut one: each sample counts once.
    is_first = kept.part < 2
    delays = np.bincount(kept.steps_delayed[is_first], minlength=1).tolist()
    return replace(
        stats,
        sequences=int(is_first.sum()),
        dropped_samples=sum(report.num_dropped for report in reports),
        truncated_samples=sum(report.num_truncated for report in reports),
        delays=delays if is_delaying else [],
        waiting=num_waiting,
    )


def _checked_schema(reports: Sequence[RankReport], run_fields: RunFields) -> Schema:
    """Returns the columns of all ranks' sequences together; GlobalBatchError with the first rank's
    error, or where ranks or earlier steps have other extra columns.
    """
    errors = [report.error for report in reports if report.error is not None]
    if errors:
        raise GlobalBatchError(errors[0])
    try:
        return run_fields.agree(
            [
                SchemaOfPart.of(report.schema, report.lengths)
                for report in reports
                if report.lengths.size
            ]
        )
    except ValueError as failure:
        raise GlobalBatchError(str(failure)) from None


def _outliers(
    batch: Reports, num_ranks: int, settings: PackingSettings, max_steps: int
) -> npt.NDArray[np.bool_]:
    """Returns the sequences that wait for a later step, bool [N]."""
    padded, squares = batch.padded(settings.alignment)
    # The parts of a cut tree are trained in one step, and each is judged by itself: passed as if
    # they had waited for the longest, none of them is delayed.
    steps_delayed = np.where(batch.part > 0, max_steps, batch.steps_delayed)
    return outliers_to_delay(
        padded,
        settings.cost,
        steps_delayed,
        num_ranks=num_ranks,
        pack_capacity=capacity_that_matters(settings.model, settings.capacity, padded),
        max_steps=max_steps,
        squares=squares,
        payload_costs=batch.payload_costs,
    )


def _request(
    kept: Reports,
    num_ranks: int,
    num_fetches: int,
    settings: PackingSettings,
) -> ScheduleRequest:
    """Returns the request to the scheduler, for the sequences that are not delayed."""
    padded, squares = kept.padded(settings.alignment)
    return ScheduleRequest(
        lengths=padded,
        squares=squares,
        payload_costs=kept.payload_costs,
        source_rank=kept.source_rank,
        source_fetch=kept.fetch,
        steps_delayed=kept.steps_delayed,
        loss_tokens=kept.num_loss_tokens,
        num_ranks=num_ranks,
        num_fetches=num_fetches,
        capacity=settings.capacity,
        microbatch_multiple=settings.microbatch_multiple,
        cost=settings.cost,
        model=settings.model,
        options=settings.options,
        seed=settings.seed,
        step=settings.step,
    )


def _joined_tree_sizes(reports: Sequence[RankReport], alignment: Alignment) -> SampleSizes | None:
    if all(report.tree_sizes is None for report in reports):
        return None
    whole = [
        report.tree_sizes or SampleSizes.of_sequences(report.lengths, alignment)
        for report in reports
    ]
    return SampleSizes(*(np.concatenate(values) for values in zip(*whole)))


def _joined_costs(reports: Sequence[RankReport]) -> FloatArray | None:
    if all(report.payload_costs is None for report in reports):
        return None
    return np.concatenate(
        [
            np.zeros(report.lengths.size) if report.payload_costs is None else report.payload_costs
            for report in reports
        ]
    )
