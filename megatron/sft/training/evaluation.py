"""mcore. Evaluations of a run in training: losses of held-out data, and answers to prompts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.sft.data.datasets import Datasets
from megatron.sft.data.stream import Share
from megatron.sft.model.answers import Answers
from megatron.sft.model.build import Training
from megatron.sft.options.config import SFTConfig
from megatron.sft.report.metrics import Evaluation
from megatron.sft.training.finite import check_loss
from megatron.sft.training.passes import Passes
from megatron.sft.training.step_account import Reduction
from megatron.sft.training.step_batches import StepBatches
from megatron.sft.training.stop import Stopped

Split = Literal["valid", "test"]


class Evaluator:
    """Evaluates the model of a run; each method is collective."""

    def __init__(
        self,
        config: SFTConfig,
        model_config: TransformerConfig,
        datasets: Datasets,
        share: Share,
        training: Training,
        passes: Passes,
        device: torch.device,
        settle: Callable[[], None],
    ) -> None:
        """Args:
        settle: waits until no batch of the training is being prepared. Batches of an evaluation
            are prepared over the same process groups, and collectives of two threads would meet
            in another order on each rank.
        """
        self._config = config
        self._model_config = model_config
        self._samples = {"valid": datasets.valid, "test": datasets.test}
        self._share = share
        self._model = training.model
        self._passes = passes
        self._device = device
        self._settle = settle
        self._answers: Answers | None = None
        if datasets.prompts and datasets.tokenizer is not None:
            self._answers = Answers(config, datasets.tokenizer, datasets.prompts)

    def evaluate(
        self, split: Split, iteration: int, is_stopped: Callable[[], bool]
    ) -> Evaluation | None:
        """Returns the mean loss per token over up to `eval_iters` global batches, always the same
        ones; None if the split has no samples.

        Args:
            iteration: steps that are done.
            is_stopped: returns whether any rank was asked to stop; collective.

        Raises:
            Stopped: after a batch in which some rank was asked to stop.
            NonFiniteError: if the loss is NaN or infinite.
        """
        samples, training = self._samples[split], self._config.training
        num_batches = min(training.eval_iters, -(-len(samples) // training.global_batch_size))
        if num_batches == 0:
            return None
        self._settle()
        batches = StepBatches(self._config, self._model_config, samples, self._share, num_batches)
        names = samples.names
        losses: list[Any] = []
        with self._passes.without_training():
            for number in range(num_batches):
                batch = next(batches)
                losses += self._passes.forward_backward(batch, len(names), forward_only=True)
                # Not after the last batch: a stop would throw a whole evaluation away.
                if number < num_batches - 1 and is_stopped():
                    batches.close()
                    raise Stopped
        batches.close()
        reduced = Reduction(losses, False, batches.counts, self._device).result()
        check_loss(reduced, losses, names, f"split {split} after step {iteration}")
        return Evaluation(
            iteration=iteration,
            split=split,
            loss=reduced.loss,
            token_accuracy=reduced.token_accuracy,
            num_tokens=reduced.num_loss_tokens,
            dropped_samples=reduced.counts.num_dropped,
            truncated_samples=reduced.counts.num_cut,
            dropped=reduced.dropped_by_source(names),
            sources=reduced.by_source(names),
        )

    def answers(self) -> list[tuple[str, str]]:
        """Returns (prompt, answer) of each of --sample-prompts, on every rank; [] without any."""
        if self._answers is None:
            return []
        self._settle()
        run = partial(self._passes.forward_backward, num_sources=1, forward_only=True)
        with self._passes.without_training():
            return self._answers.answers(self._model, run, self._device)
