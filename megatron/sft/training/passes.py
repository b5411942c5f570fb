"""mcore. Runs the forward and backward passes of a global batch, by megatron-core's schedules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron.sft.model.answers import PromptBatch
from megatron.sft.model.build import Training
from megatron.sft.model.forward import forward_step
from megatron.sft.options.config import SFTConfig
from megatron.sft.training.step_batches import StepBatch


class Passes:
    """Runs global batches through the model of a run; each call is collective."""

    def __init__(self, config: SFTConfig, training: Training) -> None:
        self._config = config
        self._model = training.model
        self._device = training.device
        self._schedule = get_forward_backward_func()

    def forward_backward(
        self, batch: StepBatch | PromptBatch, num_sources: int, *, forward_only: bool
    ) -> list[Any]:
        """Returns the losses of each microbatch on the last pipeline stage, and [] on others.
        Gradients are added to the model's gradient buffers, unless `forward_only`.
        """
        config = self._config
        return self._schedule(
            forward_step_func=partial(forward_step, num_sources=num_sources),
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
        for chunk in self._model:
            chunk.eval()
        with torch.no_grad():
            yield
        for chunk in self._model:
            chunk.train()
