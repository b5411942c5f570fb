"""mcore. Runs the forward and backward passes of a global batch, by megatron-core's schedules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron.sft.model.answers import PromptBatch
from megatron.sft.model.build import Training
from megatron.sft.model.forward import CROSS_ENTROPY, CrossEntropy, Objective, forward_step
from megatron.sft.options.config import SFTConfig
from megatron.sft.training.step_batches import StepBatch


class StepObjective(Objective, Protocol):
    """The loss of a run, with what a step of it needs and logs."""

    sums: Sequence[str]
    """Names of the "sums" of its log."""
    maxima: Sequence[str]
    """Names of the "maxima" of its log."""

    def prepare(self, batch: StepBatch, passes: Passes) -> None:
        """Does what comes before the passes of a global batch: counts over ranks, passes of other
        weights. Collective.
        """

    def figures(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Returns the figures of a step or an evaluation, from sums and maxima over all ranks."""


class ImitationObjective(CrossEntropy):
    """Supervised fine-tuning: nothing is needed before a step."""

    sums: Sequence[str] = ()
    maxima: Sequence[str] = ()

    def prepare(self, batch: StepBatch, passes: Passes) -> None:
        pass

    def figures(self, sums: Mapping[str, float]) -> dict[str, float]:
        return {}


class Passes:
    """Runs global batches through the model of a run; each call is collective."""

    def __init__(self, config: SFTConfig, training: Training, objective: StepObjective) -> None:
        self.objective = objective
        self._config = config
        self._model = training.model
        self._device = training.device
        self._schedule = get_forward_backward_func()

    def forward_backward(
        self, batch: StepBatch, num_sources: int, *, forward_only: bool
    ) -> list[Any]:
        """Returns the losses of each microbatch on the last pipeline stage, and [] on others.
        Gradients are added to the model's gradient buffers, unless `forward_only`.
        """
        self.objective.prepare(batch, self)
        return self.run(batch, self.objective, num_sources, forward_only=forward_only)

    def run(
        self,
        batch: StepBatch | PromptBatch,
        objective: Objective = CROSS_ENTROPY,
        num_sources: int = 1,
        *,
        forward_only: bool,
    ) -> list[Any]:
        """Runs the passes of a batch with any objective, as `forward_backward` does."""
        config = self._config
        return self._schedule(
            forward_step_func=partial(forward_step, num_sources=num_sources, objective=objective),
            data_iterator=batch.iterators(config.num_virtual_stages, self._device),
            # megatron-core takes a list for virtual stages, else the model itself.
            model=self._model if len(self._model) > 1 else self._model[0],
            num_microbatches=batch.num_microbatches,
            seq_length=config.model.seq_length,
            micro_batch_size=config.training.micro_batch_size,
            forward_only=forward_only,
        )

    @contextmanager
    def without_training(self) -> Iterator[None]:
        """Context without dropout, and without activations kept for a backward pass."""
        before = [chunk.training for chunk in self._model]
        for chunk in self._model:
            chunk.eval()
        with torch.no_grad():
            yield
        for chunk, mode in zip(self._model, before):
            chunk.train(mode)
