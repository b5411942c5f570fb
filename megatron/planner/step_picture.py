"""pure. A scheduled step as shapes over modelled time: packs of ranks, operations of pipeline
stages, and the share of all devices that computes. `step_page` and `step_plot` draw it.

Times are shares of the step, 0 to 1. Of many ranks some are drawn, from the slowest to the quickest
at even distances, and neighbours thinner than a pixel are merged. `notes` say so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron.packing.scheduling.step_time import StepModel, TimedOperation, simulate, timeline
from megatron.planner.step_blocks import Block, Kind, Line, joined, merged
from megatron.planner.step_record import StepRecord

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

MAX_LINES = 48
_MAX_BLOCKS = 4_000
_MAX_OPERATIONS = 150_000
_FINEST = 1 / 1200
"""Width of a block, over that of the picture, below which blocks are merged: about a pixel."""
_WIDE, _MAX_CUTS = 4 / 1000, 64
"""Width of a pack at least, and number of its sequences at most, where they are drawn apart."""
_BINS = 240


@dataclass(frozen=True, kw_only=True)
class StepPicture:
    """The shapes of a step's picture."""

    title: str
    facts: str
    """The step's account in one line."""
    seconds: float | None
    """Modelled time of the step; None where only ratios are known."""
    cost: float
    """The same in units of the cost model."""
    bound: float
    """Lower bound over the time of the step; in pipelines the bound of even packs."""
    bound_name: str
    ranks: list[Line]
    stages: list[Line]
    """Stages of the slowest rank; empty without a pipeline."""
    slowest_rank: int
    busy: FloatArray
    """Share of all devices that compute in each of `_BINS` equal parts of the step."""
    notes: list[str]


def picture_of(record: StepRecord) -> StepPicture:
    """Returns the step as it would run by the model of `step_time`, packs in their order."""
    costs = record.request.pack_costs(record.schedule)
    model, stats = record.layout.model, record.stats
    paced = (
        costs.max(axis=0, keepdims=True).repeat(len(costs), axis=0)
        if model.sync_every_microbatch
        else costs
    )
    ends = simulate(paced, model)
    total = float(ends.max()) or 1.0
    per_rank = record.num_microbatches * (
        2 * model.num_virtual_stages if model.num_stages > 1 else 1
    )
    # Ranks that wait at every microbatch end together: the slowest is the one with most work.
    own_ends = costs.sum(axis=1) if model.sync_every_microbatch else ends
    drawn = _ranks_by_end(own_ends, max(4, min(MAX_LINES, _MAX_OPERATIONS // per_rank)))
    slowest = int(own_ends.argmax())
    scene = _Scene(record, costs, paced, total)
    seconds = record.layout.seconds_per_unit
    return StepPicture(
        title=f"{record.scheduler}: {record.title}",
        facts=facts_of(record),
        seconds=None if seconds is None else stats.step_cost * seconds,
        cost=stats.step_cost,
        bound=stats.step_cost_bound / stats.step_cost if stats.step_cost else 1.0,
        bound_name="lower bound" if model.num_stages == 1 else "bound of even packs",
        ranks=scene.ranks(drawn),
        stages=scene.stages(slowest),
        slowest_rank=slowest,
        busy=scene.busy(),
        notes=scene.notes(len(drawn)),
    )


def ticks(picture: StepPicture, scale: float) -> list[tuple[float, str]]:
    """Returns round times (or percents, where times are not known) as shares of the step, and their
    labels.

    scale: the share of the width that the step takes.
    """
    whole, unit = 100.0, "%"
    if picture.seconds is not None:
        whole, unit = (
            (picture.seconds, " s")
            if picture.seconds / scale >= 10
            else (picture.seconds * 1000, " ms")
        )
    rough = whole / scale / 8
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    return [
        (step * place / whole, f"{step * place:,.10g}{unit}")
        for place in range(int(whole / step + 1e-9) + 1)
    ]


def facts_of(record: StepRecord) -> str:
    """Returns the step's account in one line."""
    stats, model = record.stats, record.layout.model
    microbatches = (
        "1 microbatch" if stats.microbatches == 1 else f"{stats.microbatches:,} microbatches"
    )
    ranks = "1 rank" if stats.num_ranks == 1 else f"{stats.num_ranks:,} ranks"
    stages = f" x {model.num_stages} stages" if model.num_stages > 1 else ""
    bound = "even packs" if model.num_stages > 1 else "the bound"
    stages += (
        f" x {model.num_virtual_stages} virtual stages each" if model.num_virtual_stages > 1 else ""
    )
    return (
        f"{stats.sequences:,} sequences, {stats.tokens:,} tokens on {ranks}{stages}; "
        f"{microbatches}; fill {stats.fill:.1%}, padding {stats.padding:.1%}, balance "
        f"{stats.balance:.4f} of {bound}, bubble {stats.bubble:.1%}"
    )


class _Scene:
    """Builds the lines of a step's picture."""

    def __init__(
        self, record: StepRecord, costs: FloatArray, paced: FloatArray, total: float
    ) -> None:
        self._record, self._costs, self._paced, self._total = record, costs, paced, total
        self._model: StepModel = record.layout.model
        self._merged = 0

    def ranks(self, drawn: Sequence[int]) -> list[Line]:
        """Returns the packs of these ranks: of a pipeline, as its last stage runs them."""
        if self._model.num_stages == 1:
            starts = (np.cumsum(self._paced[drawn], axis=1) - self._paced[drawn]) / self._total
            ends = starts + self._costs[drawn] / self._total
            blocks_of = [
                [
                    self._block(rank, m, *times)
                    for m, times in enumerate(zip(starts[row].tolist(), ends[row].tolist()))
                ]
                for row, rank in enumerate(drawn)
            ]
        else:
            blocks_of = self._at_last_stage(drawn)
        finest = self._finest(len(drawn))
        return [
            Line(f"rank {rank}", self._together(blocks, finest))
            for rank, blocks in zip(drawn, blocks_of)
        ]

    def stages(self, rank: int) -> list[Line]:
        """Returns the operations of a rank's pipeline, stage by stage."""
        if self._model.num_stages == 1:
            return []
        blocks_of: list[list[Block]] = [[] for _ in range(self._model.num_stages)]
        costliest = float(self._costs.max()) or 1.0
        for timed in timeline(self._paced[[rank]], self._model):
            backward, microbatch, chunk = timed.operation
            shade = float(self._costs[rank, microbatch]) / costliest
            kind: Kind = "backward" if backward else "forward"
            where = f" of virtual stage {chunk}" if self._model.num_virtual_stages > 1 else ""
            start, end = self._times(timed, rank, 0)
            text = f"stage {timed.stage}, {kind}{where}, microbatch {microbatch}"
            blocks_of[timed.stage].append(Block(start, end, kind, shade, text))
        finest = self._finest(len(blocks_of))
        kept = _even_places(len(blocks_of), MAX_LINES)
        return [Line(f"stage {stage}", self._together(blocks_of[stage], finest)) for stage in kept]

    def busy(self) -> FloatArray:
        """Returns the share of all devices that compute, by `_BINS` parts of the step."""
        change = np.zeros(_BINS + 2)
        num_ranks = len(self._costs)
        if self._model.num_stages == 1:
            starts = np.cumsum(self._paced, axis=1) - self._paced
            _add_ramps(change, starts.ravel() / self._total, 1)
            _add_ramps(change, (starts + self._costs).ravel() / self._total, -1)
        else:
            for timed in timeline(self._paced, self._model):
                # A rank computes for its own cost's share of the pass, and waits for the rest.
                share = (
                    self._costs[:, timed.operation.microbatch]
                    / self._paced[:, timed.operation.microbatch]
                )
                end = timed.start + (timed.end - timed.start) * share
                _add_ramps(change, timed.start / self._total, 1)
                _add_ramps(change, end / self._total, -1)
        return np.clip(np.cumsum(change)[:_BINS] / (num_ranks * self._model.num_stages), 0, 1)

    def notes(self, num_drawn: int) -> list[str]:
        """Returns sentences that a reader of the picture needs."""
        num_ranks, model = len(self._costs), self._model
        notes = []
        if num_drawn < num_ranks:
            notes.append(
                f"{num_drawn} of {num_ranks:,} ranks are drawn, from the slowest to the quickest "
                "at even distances"
            )
        if model.num_stages > MAX_LINES:
            notes.append(f"{MAX_LINES} of {model.num_stages} stages are drawn")
        if self._merged:
            notes.append(
                f"{self._merged:,} blocks too thin to see are drawn as part of a neighbour"
            )
        if model.sync_every_microbatch:
            notes.append("ranks wait for one another at every microbatch")
        return notes

    def _at_last_stage(self, drawn: Sequence[int]) -> list[list[Block]]:
        blocks_of: list[list[Block]] = [[] for _ in drawn]
        operations = timeline(self._paced[drawn], self._model)
        last = [timed for timed in operations if timed.stage == self._model.num_stages - 1]
        for i, rank in enumerate(drawn):
            for timed in last:
                start, end = self._times(timed, rank, i)
                blocks_of[i].append(self._block(rank, timed.operation.microbatch, start, end))
        return [joined(blocks) for blocks in blocks_of]

    def _times(self, timed: TimedOperation, rank: int, row: int) -> tuple[float, float]:
        """Returns the start and the end of the rank's own pass, as shares of the step.

        It may end before the pass of the costliest rank, for which it then waits.
        """
        start, end = float(timed.start[row]), float(timed.end[row])
        microbatch = timed.operation.microbatch
        share = float(self._costs[rank, microbatch]) / (float(self._paced[rank, microbatch]) or 1.0)
        return start / self._total, (start + (end - start) * share) / self._total

    def _block(self, rank: int, microbatch: int, start: float, end: float) -> Block:
        record = self._record
        lengths = record.packs[rank][microbatch]
        capacity = record.layout.capacity
        cuts: tuple[float, ...] = ()
        if 1 < len(lengths) <= _MAX_CUTS and end - start > _WIDE:
            parts = np.cumsum(record.costs_of(rank, microbatch))
            cuts = tuple((parts[:-1] / parts[-1]).tolist())
        text = f"rank {rank}, microbatch {microbatch}: {_pack_in_words(lengths, capacity)}"
        return Block(start, end, "pack", sum(lengths) / capacity, text, cuts)

    def _finest(self, num_lines: int) -> float:
        return max(_FINEST, num_lines / _MAX_BLOCKS)

    def _together(self, blocks: Sequence[Block], finest: float) -> list[Block]:
        """Returns neighbours thinner than `finest` as one block, as wide as they are together."""
        drawn = list(merged(blocks, finest))
        self._merged += len(blocks) - len(drawn)
        return drawn


def _pack_in_words(lengths: Sequence[int], capacity: int) -> str:
    if not lengths:
        return "empty"
    sequences = "1 sequence" if len(lengths) == 1 else f"{len(lengths):,} sequences"
    total = sum(lengths)
    return (
        f"{sequences}, {total:,} of {capacity:,} tokens ({total / capacity:.0%}), longest "
        f"{max(lengths):,}"
    )


def _ranks_by_end(ends: FloatArray, number: int) -> list[int]:
    """Returns `number` ranks from the slowest to the quickest at even distances; all in order where
    they are no more.
    """
    if ends.size <= number:
        return list(range(ends.size))
    order = np.argsort(-ends, kind="stable")
    return [int(order[place]) for place in _even_places(ends.size, number)]


def _even_places(size: int, number: int) -> list[int]:
    if size <= number:
        return list(range(size))
    return [round(place * (size - 1) / (number - 1)) for place in range(number)]


def _add_ramps(change: FloatArray, at: FloatArray, sign: int) -> None:
    """Adds the bins' shares after each of `at`: 1 for later bins, the rest of its own bin.

    at 2.25 bins    ->    change[2] += 0.75, change[3] += 0.25, whose running sum is .75 1 1 ...
    """
    places = at * _BINS
    whole = np.minimum(places.astype(np.int64), _BINS)
    part = places - whole
    change += sign * np.bincount(whole, weights=1 - part, minlength=_BINS + 2)
    change += sign * np.bincount(whole + 1, weights=part, minlength=_BINS + 2)
