"""mcore. One small reduction per step, by which all ranks know its loss, its counts, and who was asked to stop."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron.sft.data.counts import Counts
from megatron.sft.report.source_metrics import SourceMetrics


class Reduced(NamedTuple):
    """What all ranks know after a pass over a global batch."""

    loss_sum: float
    num_loss_tokens: int
    stop: bool
    counts: Counts
    source_losses: npt.NDArray[np.float64]
    """[2, sources]: loss sum and number of loss tokens of each; [2, 0] where there is one source."""

    @property
    def loss(self) -> float:
        """Per-token mean; 0 where every token is masked."""
        return self.loss_sum / self.num_loss_tokens if self.num_loss_tokens else 0.0

    def by_source(self, names: Sequence[str]) -> dict[str, SourceMetrics]:
        """What each source had that was drawn from; {} where there is one."""
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
        """Of each source that had some: why records were left out, and how many."""
        return {name: reasons for number, name in enumerate(names) if (reasons := self.counts.dropped(number))}


def counts_samples() -> bool:
    """Whether this rank speaks for its samples: one of all that draw the same ones."""
    ranks = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_context_parallel_rank(),
    )
    return ranks == (0, 0, 0)


def reduce(losses: list[Any], stop: bool, counts: Counts, device: torch.device) -> Reduced:
    """Sum over the ranks that hold a part: the last stage the loss, the first stage the counts, each rank its stop
    signal. One all-reduce of 8 bytes per number: 24, and per source 64, and 16 more where there are several.
    """
    num_sources = len(counts.table)
    num_split = 2 * num_sources if num_sources > 1 else 0
    numbers = torch.zeros(3 + num_split + counts.table.size, dtype=torch.float64, device=device)
    if losses and parallel_state.get_tensor_model_parallel_rank() == 0:
        numbers[0] = torch.stack([loss["lm loss"][0].double() for loss in losses]).sum()
        numbers[1] = torch.stack([loss["lm loss"][1].double() for loss in losses]).sum()
        if num_split:
            numbers[3 : 3 + num_split] = torch.stack([loss["source losses"] for loss in losses]).sum(0).flatten()
    numbers[2] = float(stop)
    if counts_samples():
        numbers[3 + num_split :] = torch.from_numpy(counts.table).double().flatten()
    dist.all_reduce(numbers)
    loss_sum, num_tokens, stops, *rest = numbers.tolist()
    table = np.array(rest[num_split:]).astype(np.int64).reshape(counts.table.shape)
    source_losses = np.array(rest[:num_split]).reshape(2, -1)
    return Reduced(loss_sum, int(num_tokens), stops > 0, Counts(table), source_losses)
