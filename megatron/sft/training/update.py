"""mcore. Updates the weights at the end of a step: optimizer and learning rate schedule. A step
whose loss or gradient norm is not finite is an error, or skipped (--skip-nan-steps).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from megatron.sft.model.build import Training
from megatron.sft.options.training import TrainingConfig
from megatron.sft.training.finite import NonFiniteError, check_loss, guard_step
from megatron.sft.training.step_account import Reduction


class UpdateResult(NamedTuple):
    """Result of an update."""

    lr: float
    """Learning rate of this step."""
    grad_norm: float
    """Norm before clipping; NaN in a step that --skip-nan-steps has skipped."""
    skipped: bool
    """True if the weights are unchanged."""


class Updater:
    """Updates the weights of a run; each call is collective."""

    def __init__(self, training: Training, config: TrainingConfig, names: Sequence[str]) -> None:
        """names: names of the sources, for errors."""
        self._optimizer = training.optimizer
        self._scheduler = training.scheduler
        self._global_batch_size = config.global_batch_size
        self._max_skipped = config.skip_nan_steps
        self._num_skipped = 0
        self._names = names
        guard_step(training.optimizer, training.model, lambda: self._step_name, self._check_loss)

    def update_weights(
        self, iteration: int, reduction: Reduction, losses: Sequence[Any], say: Callable[[str], Any]
    ) -> UpdateResult:
        """Updates the weights for step `iteration`, or skips the step and says so.

        Raises NonFiniteError, with the weights unchanged, if --skip-nan-steps steps were skipped
        already.

        Args:
            reduction: reduction of the step, which was started before. Its result is read in the
                middle of the optimizer's step, where the host waits for the device in any case.
            losses: losses of this rank, by microbatch.
            say: prints a line.
        """
        # Fields, not variables: `_check_loss` reads them from inside the optimizer's step.
        self._step_name, self._reduction, self._losses = f"step {iteration}", reduction, losses
        # Read before the scheduler steps: it is this step's rate, not the next one's.
        lr = self._optimizer.param_groups[0]["lr"]
        try:
            succeeded, grad_norm, _ = self._optimizer.step()
        except NonFiniteError as failure:
            if self._num_skipped == self._max_skipped:
                raise
            self._num_skipped += 1
            number = f"{self._num_skipped} of --skip-nan-steps {self._max_skipped}"
            say(f"{failure.what}; left out, {number}")
            return UpdateResult(lr=lr, grad_norm=math.nan, skipped=True)
        if succeeded:
            self._scheduler.step(increment=self._global_batch_size)
        return UpdateResult(lr=lr, grad_norm=float(grad_norm or 0.0), skipped=not succeeded)

    def _check_loss(self) -> None:
        check_loss(self._reduction.result(), self._losses, self._names, self._step_name)
