"""mcore. What a step did, put together into the metrics that it is told by."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from megatron.packing.model.pipeline import PackedLosses
from megatron.packing.scheduling.cost import PackCost
from megatron.packing.step.global_batch import GlobalBatch
from megatron.packing.step.stats import PackingStats
from megatron.sft.data.counts import Counts
from megatron.sft.data.stream import Share
from megatron.sft.model.checkpoint import Progress
from megatron.sft.options.config import SFTConfig
from megatron.sft.reduction import Reduced
from megatron.sft.report.metrics import StepMetrics


class Update(NamedTuple):
    """A pass over a global batch, and what the optimizer made of it."""

    losses: list[Any]
    """What the forward-backward function returned."""
    data_seconds: float
    """That the pass waited for its data."""
    passes_seconds: float
    """Of forward and backward, without `data_seconds`."""
    lr: float
    grad_norm: float
    skipped: bool

    @property
    def batch(self) -> GlobalBatch | None:
        """What was packed; None without packing."""
        return self.losses.batch if isinstance(self.losses, PackedLosses) else None


class StepAccount:
    """Knows of a run what its steps' metrics need beside the step: the layout, the cost of work, names of sources."""

    def __init__(self, config: SFTConfig, share: Share, cost: PackCost, names: Sequence[str]) -> None:
        self._config = config
        self._share = share
        self._cost = cost
        self._names = names

    def metrics(self, progress: Progress, update: Update, reduced: Reduced, seconds: float) -> StepMetrics:
        """Of the step that led to `progress` and took `seconds` in all."""
        batch = update.batch
        stats = self.padded_stats(reduced.counts) if batch is None else batch.stats
        flops = self._cost.of_batch(stats.num_tokens, stats.square_sum)
        return StepMetrics(
            iteration=progress.iteration,
            consumed_samples=progress.consumed_samples,
            loss=reduced.loss,
            lr=update.lr,
            grad_norm=update.grad_norm,
            skipped=update.skipped,
            step_seconds=seconds,
            data_seconds=update.data_seconds,
            passes_seconds=update.passes_seconds,
            predicted_seconds=stats.step_cost if self._config.packing.fitted_cost is not None else math.nan,
            sequences=stats.num_sequences,
            tokens=stats.num_tokens,
            square_sum=stats.square_sum,
            num_loss_tokens=reduced.num_loss_tokens,
            padded_tokens=stats.num_padded_tokens,
            capacity_tokens=stats.num_ranks * stats.num_microbatches * stats.capacity,
            microbatches=stats.num_microbatches,
            num_ranks=stats.num_ranks,
            num_stages=self._config.parallel.pipeline_model_parallel_size,
            step_cost=stats.step_cost,
            step_cost_bound=stats.step_cost_bound,
            bubble=stats.bubble,
            moved_tokens=stats.num_moved_tokens,
            tokens_per_second=stats.num_tokens / seconds,
            tflops_per_device=flops / (seconds * dist.get_world_size() * 1e12),
            dropped_samples=reduced.counts.num_dropped + stats.num_dropped,
            cut_samples=reduced.counts.num_cut + stats.num_cut,
            delays=[] if batch is None else batch.delays,
            waiting=0 if batch is None else batch.num_waiting,
            dropped=reduced.dropped_by_source(self._names),
            sources=reduced.by_source(self._names),
        )

    def padded_stats(self, counts: Counts) -> PackingStats:
        """The account of a step without packing: each rank computes the same shapes, so the balance is 1, and the
        bubble that of even microbatches.
        """
        idle = self._config.parallel.pipeline_model_parallel_size - 1
        capacity = self._config.training.micro_batch_size * self._config.model.seq_length
        return PackingStats(
            num_sequences=counts.num_sequences,
            num_tokens=counts.num_tokens,
            square_sum=counts.square_sum,
            num_padded_tokens=self._share.num_ranks * self._share.num_draws * capacity,
            num_microbatches=self._share.num_draws,
            num_ranks=self._share.num_ranks,
            capacity=capacity,
            num_dropped=0,
            num_cut=0,
            num_moved_tokens=0,
            step_cost=1.0,
            step_cost_bound=1.0,
            bubble=idle / (self._share.num_draws * (self._config.num_virtual_stages or 1) + idle),
        )
