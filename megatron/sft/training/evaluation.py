"""mcore. Evaluates the model during training: losses of held-out data, and answers to prompts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

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
        settle: Callable[[], None],
    ) -> None:
        """Args:
        settle: function that waits until no training batch is being prepared. An evaluation
            prepares its batches over the same process groups, and the collectives of two threads
            would run in another order on each rank.
        """
        self._config = config
        self._model_config = model_config
        self._samples = {"valid": datasets.valid, "test": datasets.test}
        self._share = share
        self._model = training.model
        self._passes = passes
        self._device = training.device
        self._settle = settle
        self._answers: Answers | None = None
        if datasets.prompts and datasets.tokenizer is not None:
            self._answers = Answers(config, datasets.tokenizer, datasets.prompts)

    def evaluate(
        self, split: Split, iteration: int, is_stopped: Callable[[], bool]
    ) -> Evaluation | None:
        """Returns the mean loss per token over the first `eval_iters` global batches of a split,
        the same in every evaluation; None if the split has no samples.

        Raises Stopped if a rank was asked to stop before the last batch, and NonFiniteError if the
        loss is NaN or infinite.

        Args:
            iteration: number of training steps before the evaluation.
            is_stopped: returns whether any rank was asked to stop; collective.
        """
        samples, training = self._samples[split], self._config.training
        num_batches = min(training.eval_iters, -(-len(samples) // training.global_batch_size))
        if num_batches == 0:
            return None
        self._settle()
        batches = StepBatches(
            self._config,
            self._model_config,
            samples,
            self._share,
            num_batches,
            evaluated_after=iteration,
        )
        names = samples.names
        losses: list[Any] = []
        with self._passes.without_training():
            for number in range(num_batches):
                batch = next(batches)
                losses += self._passes.forward_backward(batch, len(names), forward_only=True)
                # Do not stop after the last batch, when the result is complete.
                if number < num_batches - 1 and is_stopped():
                    batches.close()
                    raise Stopped
        batches.close()
        objective = self._passes.objective
        reduced = Reduction(
            losses,
            False,
            batches.counts,
            self._device,
            sums=objective.sums,
            maxima=objective.maxima,
        ).result()
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
            figures=objective.figures(reduced.sums),
        )

    def answers(self) -> list[tuple[str, str]]:
        """Returns (prompt, answer) of each of --sample-prompts, on every rank; [] without any."""
        if self._answers is None:
            return []
        self._settle()
        run = partial(self._passes.run, forward_only=True)
        with self._passes.without_training():
            return self._answers.answers(self._model, run, self._device)
