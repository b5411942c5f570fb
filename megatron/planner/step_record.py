"""pure. A scheduled step as one value: sequences, parallel layout, and the place of each sequence.
It can be written as JSON and read again, measured and drawn, without the data or the model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.packing.batch.layout import Alignment
from megatron.packing.quoting import shown
from megatron.packing.scheduling.cost import PackCost
from megatron.packing.scheduling.options import SchedulerOptions
from megatron.packing.scheduling.problem import Schedule, ScheduleRequest, check_schedule
from megatron.packing.scheduling.step_time import StepModel
from megatron.packing.step.stats import PackingStats, packing_stats
from megatron.planner.sequences import Sequences, sequences_of, sizes_of

IntArray = npt.NDArray[np.int64]
_MAX_NUMBER, _MAX_STAGES = 1 << 62, 4096
Packs = list[list[list[int]]]
"""packs[rank][microbatch]: lengths of its sequences, without padding."""


@dataclass(frozen=True, kw_only=True)
class StepLayout:
    """Everything that a schedule depends on, apart from the sequences."""

    num_ranks: int
    """Data-parallel ranks."""
    capacity: int
    """Maximum number of tokens of a pack."""
    alignment: Alignment
    cost: PackCost
    microbatch_multiple: int = 1
    model: StepModel
    options: SchedulerOptions = field(default_factory=SchedulerOptions)
    seconds_per_unit: float | None = None
    """Seconds of the devices of one data-parallel rank for a unit of `cost`; None if only ratios
    are known.
    """

    def request(self, sequences: Sequences) -> ScheduleRequest:
        """Returns the request to a scheduler, as if ranks load equal parts of the samples, one per
        fetch.

        Of 5 samples, rank 0 of 2 loads the first 2 and rank 1 the other 3.
        """
        size = sequences.size
        starts = np.array(
            [size * rank // self.num_ranks for rank in range(self.num_ranks)], np.int64
        )
        source_rank = np.searchsorted(starts, np.arange(size), side="right") - 1
        padded, squares = sequences.padded(self.alignment)
        return ScheduleRequest(
            lengths=padded,
            squares=squares,
            loss_tokens=sequences.loss_tokens,
            payload_costs=sequences.payload_costs,
            source_rank=source_rank,
            source_fetch=np.arange(size) - starts[source_rank],
            num_ranks=self.num_ranks,
            num_fetches=-(-size // self.num_ranks),
            capacity=self.capacity,
            cost=self.cost,
            microbatch_multiple=self.microbatch_multiple,
            model=self.model,
            options=self.options,
        )


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One global batch as it was scheduled."""

    title: str
    scheduler: str
    layout: StepLayout
    packs: Packs
    sizes: dict[str, list[Any]] | None = None
    """Lists with a value per sample, by rank and microbatch: the fields of `SampleSizes` and
    `loss_tokens` if there are trees, `payload_costs` if there are payloads. None without both.
    """

    @classmethod
    def of(
        cls,
        title: str,
        scheduler: str,
        layout: StepLayout,
        sequences: Sequences,
        schedule: Schedule,
    ) -> StepRecord:
        """Returns the record of a schedule of `sequences`."""
        # Sort sequences by pack, then cut at the ends of packs: packs 0 2 0 0 of 3 packs -> order
        # 0 2 3 1, ends 3 3 4 (pack 1 is empty).
        in_order = sequences.take(np.argsort(schedule.pack, kind="stable"))
        by_pack = in_order.lengths.tolist()
        ends = np.cumsum(
            np.bincount(schedule.pack, minlength=schedule.num_ranks * schedule.num_microbatches)
        ).tolist()
        packs = [by_pack[start:end] for start, end in zip([0, *ends], ends)]
        per_rank = schedule.num_microbatches
        by_rank = [packs[first : first + per_rank] for first in range(0, len(packs), per_rank)]
        return cls(
            title=title,
            scheduler=scheduler,
            layout=layout,
            packs=by_rank,
            sizes=sizes_of(in_order),
        )

    @property
    def num_microbatches(self) -> int:
        """Microbatches of each rank."""
        return len(self.packs[0])

    @cached_property
    def lengths(self) -> IntArray:
        """Lengths without padding, by rank and microbatch, int64 [N]."""
        return np.array(
            [length for rank in self.packs for pack in rank for length in pack], np.int64
        )

    @cached_property
    def sequences(self) -> Sequences:
        """The samples, by rank and microbatch."""
        return sequences_of(self.lengths, self.sizes)

    @cached_property
    def request(self) -> ScheduleRequest:
        """Request for these sequences. The ranks that loaded them are not recorded."""
        return self.layout.request(self.sequences)

    @cached_property
    def schedule(self) -> Schedule:
        """Place of each of `lengths`."""
        counts = [len(pack) for rank in self.packs for pack in rank]
        pack = np.repeat(np.arange(len(counts)), counts)
        return Schedule(
            pack // self.num_microbatches,
            pack % self.num_microbatches,
            len(self.packs),
            self.num_microbatches,
        )

    def costs_of(self, rank: int, microbatch: int) -> npt.NDArray[np.float64]:
        """Returns the cost of each sequence of a pack."""
        if self.sizes is None:
            return self.layout.cost.of_sequences(np.array(self.packs[rank][microbatch], np.int64))
        is_there = self.schedule.pack == rank * self.num_microbatches + microbatch
        return self.request.sequence_costs[is_there]

    @cached_property
    def stats(self) -> PackingStats:
        """Statistics of the step, without moved tokens, dropped and truncated samples."""
        return packing_stats(
            request=self.request,
            schedule=self.schedule,
            length=self.lengths,
            alignment=self.layout.alignment,
            trees=self.sequences.trees,
        )

    def to_json(self) -> str:
        """Returns the record as a JSON object."""
        layout = {name: value for name, value in asdict(self.layout).items() if name != "num_ranks"}
        return json.dumps(
            {
                "kind": "schedule",
                "title": self.title,
                "scheduler": self.scheduler,
                **layout,
                "packs": self.packs,
                **({} if self.sizes is None else {"sizes": self.sizes}),
            }
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StepRecord:
        """Returns the record of an object that `to_json` wrote. Raises ValueError for any other."""
        try:
            packs = _checked_packs(values["packs"])
            windows = _checked_windows(values["cost"].get("windows", []))
            cost_terms = {key: term for key, term in values["cost"].items() if key != "windows"}
            shares = _checked_shares(values["model"].get("shares", []))
            model_terms = {key: term for key, term in values["model"].items() if key != "shares"}
            alignment, cost, model = (
                _checked_numbers(one) for one in (values["alignment"], cost_terms, model_terms)
            )
            layout = StepLayout(
                num_ranks=len(packs),
                **_checked_numbers(
                    {name: values[name] for name in ("capacity", "microbatch_multiple")}
                ),
                alignment=Alignment(**alignment),
                cost=PackCost(**cost, windows=windows),
                model=StepModel(**model, shares=shares),
                options=SchedulerOptions(**values.get("options", {})),
                seconds_per_unit=values.get("seconds_per_unit"),
            )
            if model.get("num_stages", 1) * model.get("num_virtual_stages", 1) > _MAX_STAGES:
                raise ValueError(f"model must have at most {_MAX_STAGES} stages in all")
            record = cls(
                title=str(values["title"]),
                scheduler=str(values["scheduler"]),
                layout=layout,
                packs=packs,
                sizes=values.get("sizes"),
            )
            check_schedule(record.request, record.schedule)
            _ = record.stats
        except KeyError as error:
            raise ValueError(
                f"a schedule must have the key {error}; write it again with --dump-schedule"
            ) from error
        except (TypeError, AttributeError, ArithmeticError, IndexError) as error:
            raise ValueError(
                f"not a schedule as --dump-schedule writes them: {error}; write it again"
            ) from error
        return record


def _checked_windows(values: Any) -> tuple[tuple[int, float], ...]:
    """Returns the (attention window, factor) pairs of a cost."""
    for window, factor in values:
        is_window = type(window) is int and 1 <= window < _MAX_NUMBER
        if not is_window or type(factor) not in (int, float) or not 0 <= factor < _MAX_NUMBER:
            raise ValueError(
                f"windows must be pairs of a whole number above 0 and a factor, but have "
                f"{shown([window, factor])}"
            )
    return tuple((window, float(factor)) for window, factor in values)


def _checked_shares(values: Any) -> tuple[float, ...]:
    """Returns the shares of a step-time model."""
    if not isinstance(values, list) or any(type(share) not in (int, float) for share in values):
        raise ValueError(f"shares must be a list of numbers, but are {shown(values)}")
    return tuple(map(float, values))


def _checked_numbers(values: Mapping[str, Any]) -> Mapping[str, Any]:
    for name, value in values.items():
        if isinstance(value, bool) and name == "sync_every_microbatch":
            continue
        is_cost = name in ("linear", "quadratic", "fixed", "head", "least")
        if (
            type(value) not in ((int, float) if is_cost else (int,))
            or not 0 <= value < _MAX_NUMBER
            or value < (not is_cost)
        ):
            raise ValueError(
                f"{name} must be {'a number' if is_cost else 'a whole number above 0'}, but is "
                f"{shown(value)}"
            )
    return values


def _is_list(value: object) -> bool:
    return isinstance(value, list) and bool(value)


def _checked_packs(packs: Any) -> Packs:
    if not _is_list(packs) or not all(_is_list(rank) for rank in packs):
        raise ValueError("packs must be a list per rank of a list per microbatch of lengths")
    if len({len(rank) for rank in packs}) > 1:
        raise ValueError("packs must have as many microbatches on each rank")
    for rank, microbatches in enumerate(packs):
        for microbatch, pack in enumerate(microbatches):
            if not _are_lengths(pack):
                raise ValueError(
                    f"packs[{rank}][{microbatch}] must be lengths above 0, but is {shown(pack)}"
                )
    return packs


def _are_lengths(pack: object) -> bool:
    return isinstance(pack, list) and all(type(each) is int and each > 0 for each in pack)
