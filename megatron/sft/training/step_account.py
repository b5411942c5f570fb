"""mcore. The account of a step: a small reduction, after which all ranks know its loss, its counts
and whether to stop, and the metrics computed from it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron.packing.device import Device
from megatron.packing.scheduling.cost import NUM_PASSES, PackCost
from megatron.packing.step.global_batch import GlobalBatch
from megatron.packing.step.groups import is_data_rank
from megatron.packing.step.stats import PackingStats
from megatron.sft.data.counts import Counts
from megatron.sft.data.stream import Share
from megatron.sft.images.sizes import num_ranks_of_image
from megatron.sft.model.checkpoints.content import Progress
from megatron.sft.options.config import SFTConfig
from megatron.sft.report.metrics import SourceMetrics, StepMetrics
from megatron.sft.training.reduction import SlotReduction, Value


class Reduced(NamedTuple):
    """Sums and maxima over all ranks after the passes of a global batch."""

    loss_sum: float
    num_loss_tokens: int
    stop: bool
    counts: Counts
    source_losses: npt.NDArray[np.float64]
    """[2, sources]: sum of the loss, without weights of samples, and number of tokens with loss;
    [2, 0] if there is only one source.
    """
    all_written: bool = False
    """True if all ranks have written their files of the checkpoint that is being saved."""
    num_padded_tokens: int = 0
    """Tokens that all ranks computed without packing, padding included; 0 with packing."""
    num_right_tokens: float = math.nan
    """Tokens with loss that the model predicts best; NaN if they were not counted."""
    figures: Mapping[str, float] = MappingProxyType({})
    """See `sft.training.figures`."""
    num_terms: int = -1
    """Terms of the loss: pairs in preference tuning; -1 if they are tokens."""
    sums: Mapping[str, float] = MappingProxyType({})
    """Further sums and maxima that the objective logs, by name."""

    @property
    def loss(self) -> float:
        """Mean per token, or per other term of the loss; 0 if there are none."""
        num_terms = self.num_loss_tokens if self.num_terms < 0 else self.num_terms
        return self.loss_sum / num_terms if num_terms else 0.0

    @property
    def token_accuracy(self) -> float:
        """Share of tokens with loss that the model predicts best; NaN if they were not counted."""
        return self.num_right_tokens / self.num_loss_tokens if self.num_loss_tokens else math.nan

    def by_source(self, names: Sequence[str]) -> dict[str, SourceMetrics]:
        """Returns the part of each source that was read; {} if there is only one source."""
        sequences, tokens = self.counts.of("sequences").tolist(), self.counts.of("tokens").tolist()
        sums, numbers = self.source_losses.tolist()
        return {
            names[source]: SourceMetrics(
                sequences=sequences[source],
                tokens=tokens[source],
                num_loss_tokens=int(number),
                loss=total / number if number else math.nan,
            )
            for source, (total, number) in enumerate(zip(sums, numbers))
            if sequences[source]
        }

    def dropped_by_source(self, names: Sequence[str]) -> dict[str, dict[str, int]]:
        """Returns the number of skipped records by source and reason, without sources that had
        none.
        """
        return {
            name: reasons
            for number, name in enumerate(names)
            if (reasons := self.counts.dropped(number))
        }


def counts_samples() -> bool:
    """Returns whether this rank counts its samples. Of the ranks that load the same samples, one
    does.
    """
    return is_data_rank(ProcessGroupCollection.use_mpu_process_groups(["tp", "cp", "pp"]))


class StepFigures(NamedTuple):
    """This rank's part of the figures of a step, by name (see `sft.training.figures`)."""

    sums: Mapping[str, float]
    maxima: Mapping[str, float]


NO_FIGURES = StepFigures({}, {})


class Reduction:
    """The reduction of a step over all ranks. The last pipeline stage contributes the loss, data
    ranks the counts, and each rank whether it was asked to stop and whether its files of a
    checkpoint are written.

    The constructor starts it, and `result` waits for it. It is a `SlotReduction` of 7 sums,
    those of the objective, and 10 for each source, 12 if there are several sources.
    """

    def __init__(
        self,
        losses: list[Any],
        stop: bool,
        counts: Counts,
        device: Device,
        is_written: bool = False,
        num_padded_tokens: int = 0,
        figures: StepFigures = NO_FIGURES,
        sums: Sequence[str] = (),
        maxima: Sequence[str] = (),
    ) -> None:
        """Starts the reduction with this rank's parts.

        Args:
            losses: results of the passes, an entry per microbatch; [] except on the last stage.
            stop: True if this rank was asked to stop.
            counts: counts of the samples that this rank loaded.
            is_written: True if this rank's part of a checkpoint is written.
            num_padded_tokens: tokens that this context-parallel rank computed without packing.
            figures: this rank's part of the figures of `FIGURES`.
            sums: names of the objective's sums, which `losses` have.
            maxima: names of its maxima, which `losses` have, too.
        """
        self._shape, self._figures = counts.table.shape, figures
        self._names = (*sums, *maxima)
        num_sources, padded = len(counts.table), 0
        table = np.zeros(self._shape)
        if counts_samples():
            table = counts.table.astype(np.float64)
            padded = num_padded_tokens * parallel_state.get_context_parallel_world_size()
        names = ("loss_sum", "num_terms", "num_loss_tokens", "right_tokens")
        loss: dict[str, Value] = dict.fromkeys(names, 0.0)
        logged: Value = np.zeros(len(sums))
        largest: Value = np.full(len(maxima), -np.inf)
        by_source: Value = np.zeros(2 * num_sources if num_sources > 1 else 0)
        if losses and parallel_state.get_tensor_model_parallel_rank() == 0:
            # Only the last pipeline stage has losses. Its tensor-parallel ranks have equal copies,
            # of which one is counted.
            for name, place in (("loss_sum", 0), ("num_terms", 1)):
                loss[name] = torch.stack([each["lm loss"][place].double() for each in losses]).sum()
            tokens = [each.get("tokens", each["lm loss"][1]) for each in losses]
            loss["num_loss_tokens"] = torch.stack(tokens).double().sum()
            if sums:
                logged = torch.stack([each["sums"] for each in losses]).sum(0)
            if maxima:
                largest = torch.stack([each["maxima"] for each in losses]).amax(0)
            right = [each.get("right tokens") for each in losses]
            # NaN on one rank makes the sum NaN: the accuracy is known for all tokens or not at all.
            is_known = all(each is not None for each in right)
            loss["right_tokens"] = torch.stack(right).sum() if is_known else math.nan
            if num_sources > 1:
                by_source = torch.stack([each["source losses"] for each in losses]).sum(0)
        slots: dict[str, Value] = {
            **loss,
            "stops": float(stop),
            "written": float(is_written),
            "padded_tokens": float(padded),
            "source_losses": by_source,
            "sums": logged,
            "counts": table,
        }
        of_objective: dict[str, Value] = {"maxima": largest} if maxima else {}
        self._slots = SlotReduction(
            {**slots, **figures.sums}, {**figures.maxima, **of_objective}, device
        )

    def result(self) -> Reduced:
        """Returns the values over all ranks."""
        slots = self._slots.result()
        figures = (*self._figures.sums, *self._figures.maxima)
        return Reduced(
            loss_sum=slots["loss_sum"].item(),
            num_loss_tokens=int(slots["num_loss_tokens"].item()),
            stop=slots["stops"].item() > 0,
            counts=Counts(slots["counts"].astype(np.int64).reshape(self._shape)),
            source_losses=slots["source_losses"].reshape(2, -1),
            all_written=slots["written"].item() == dist.get_world_size(),
            num_padded_tokens=int(slots["padded_tokens"].item()),
            num_right_tokens=slots["right_tokens"].item(),
            figures={name: slots[name].item() for name in figures},
            num_terms=round(slots["num_terms"].item()),
            sums=dict(
                zip(self._names, [*slots["sums"].tolist(), *slots.get("maxima", np.empty(0))])
            ),
        )


class Stopwatch:
    """Measures the time of the device's work from the constructor to `stop`.

    On a GPU `seconds` waits for that work, which is done already after the step's reduction.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._start = self._mark()

    def stop(self) -> None:
        self._end = self._mark()

    @property
    def seconds(self) -> float:
        start, end = self._start, self._end
        if isinstance(start, float) or isinstance(end, float):
            return float(end) - float(start)  # type: ignore[arg-type]
        end.synchronize()
        return start.elapsed_time(end) / 1000

    def _mark(self) -> float | torch.cuda.Event:
        if not self._device.is_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device.place))
        return event


class Update(NamedTuple):
    """Results of the passes and of the update of a step, for its metrics."""

    batch: GlobalBatch | None
    """Statistics of the packs; None without packing."""
    data_seconds: float
    """Seconds that the step waited for its batch."""
    passes_seconds: float
    """Seconds of forward and backward."""
    lr: float
    grad_norm: float
    skipped: bool
    figures: Mapping[str, float] = MappingProxyType({})
    """Figures of the objective."""


class StepAccount:
    """Computes the metrics of steps, from constants of the run: parallel layout, FLOPs, names of
    sources.
    """

    def __init__(
        self,
        config: SFTConfig,
        share: Share,
        cost: PackCost,
        names: Sequence[str],
        num_records: int | None = None,
    ) -> None:
        """num_records: number of training records, which are one epoch; None for mock data."""
        self._config = config
        self._share = share
        self._cost = cost
        self._names = names
        self._num_records = num_records

    def metrics(
        self, progress: Progress, update: Update, reduced: Reduced, seconds: float
    ) -> StepMetrics:
        """Returns the metrics of a step. `progress` includes it; `seconds` is its whole time."""
        batch = update.batch
        stats = self.padded_stats(reduced) if batch is None else batch.stats
        flops = self._cost.of_batch(
            stats.tokens, stats.square_sum, stats.num_loss_tokens, stats.window_square_sums
        )
        passes = 1 + self._config.preference.num_forward_passes / NUM_PASSES
        flops *= passes
        # The cost of images, without the ranks that wait for them.
        flops += stats.payload_cost / num_ranks_of_image(self._config.parallel)
        reported = replace(
            stats,
            num_loss_tokens=reduced.num_loss_tokens,
            dropped_samples=reduced.counts.num_dropped + stats.dropped_samples,
            truncated_samples=reduced.counts.num_cut + stats.truncated_samples,
        )
        return StepMetrics(
            **vars(reported),
            iteration=progress.iteration,
            consumed_samples=progress.consumed_samples,
            epoch=progress.consumed_samples / self._num_records if self._num_records else math.nan,
            loss=reduced.loss,
            token_accuracy=reduced.token_accuracy,
            lr=update.lr,
            grad_norm=update.grad_norm,
            skipped=update.skipped,
            step_seconds=seconds,
            data_seconds=update.data_seconds,
            passes_seconds=update.passes_seconds,
            predicted_seconds=stats.step_cost * passes
            if self._config.packing.fitted_cost is not None
            else math.nan,
            num_stages=self._config.parallel.pipeline_model_parallel_size,
            tokens_per_second=stats.tokens / seconds,
            tflops_per_device=flops / (seconds * dist.get_world_size() * 1e12),
            dropped=reduced.dropped_by_source(self._names),
            sources=reduced.by_source(self._names),
            figures={**reduced.figures, **update.figures},
        )

    def padded_stats(self, reduced: Reduced) -> PackingStats:
        """Returns the statistics of a step without packing, as if all ranks and microbatches were
        equal: nothing balances them, and their differences are not measured.
        """
        counts = reduced.counts
        idle = self._config.parallel.pipeline_model_parallel_size - 1
        capacity = self._config.training.micro_batch_size * self._config.model.seq_length
        return PackingStats(
            sequences=counts.num_sequences,
            tokens=counts.num_tokens,
            square_sum=counts.square_sum,
            num_loss_tokens=reduced.num_loss_tokens,
            padded_tokens=reduced.num_padded_tokens,
            row_tokens=reduced.num_padded_tokens,
            capacity_tokens=self._share.num_ranks * self._share.num_fetches * capacity,
            microbatches=self._share.num_fetches,
            num_ranks=self._share.num_ranks,
            step_cost=1.0,
            step_cost_bound=1.0,
            bubble=idle / (self._share.num_fetches * (self._config.num_virtual_stages or 1) + idle),
            moved_tokens=0,
        )
