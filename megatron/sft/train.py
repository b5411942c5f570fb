"""mcore. The training loop: steps, evaluations, checkpoints, a clean end on Ctrl-C."""

from __future__ import annotations

import logging
import math
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config

from megatron.packing.model.pipeline import check_config
from megatron.packing.step.decide import GlobalBatchError
from megatron.sft.data.counts import Counts
from megatron.sft.data.datasets import Datasets
from megatron.sft.data.sample_set import SampleSet
from megatron.sft.data.stream import Share
from megatron.sft.figures import figures_of
from megatron.sft.finite import NonFiniteError, check_loss, guard_step
from megatron.sft.model.answers import Answers, PromptBatch
from megatron.sft.model.build import build_training
from megatron.sft.model.checkpoint import Progress, restored_queue
from megatron.sft.model.forward import forward_step
from megatron.sft.model.huggingface.companions import Companions
from megatron.sft.model.huggingface.read import MegatronCheckpoint, Pretrained
from megatron.sft.model.lora.names import summary_of_adapters
from megatron.sft.options.config import SFTConfig
from megatron.sft.output_check import check_output
from megatron.sft.report.metrics import Evaluation
from megatron.sft.report.run_folder import RunLog
from megatron.sft.saved_run import SavedRun
from megatron.sft.step_account import Reduction, StepAccount, Stopwatch, Update, counts_samples
from megatron.sft.step_batches import StepBatch, StepBatches
from megatron.sft.stop import StopSignals

_STARTED = time.monotonic()
"""Time at which this process was started, but for its first imports."""


class _Stopped(Exception):
    """Some rank was asked to stop. Raised alike on every rank."""


class Trainer:
    """Trains to `train_iters`, or to the step at which it is asked to stop."""

    def __init__(
        self,
        config: SFTConfig,
        datasets: Datasets,
        device: torch.device,
        run_dir: Path,
        pretrained: Pretrained | MegatronCheckpoint | None = None,
    ) -> None:
        self._config = config
        self._datasets = datasets
        self._device = device
        self._run_dir = run_dir
        dtype = "bfloat16" if config.training.bf16 else "float32"
        companions = Companions(config, datasets.tokenizer, datasets.vocab_size, dtype)
        locks = check_output(companions, run_dir)
        self._training = build_training(config, datasets.vocab_size, device, pretrained)
        self._model_config = get_model_config(self._training.model[0])
        guard_step(
            self._training.optimizer, self._training.model, self._step_name, self._check_loss
        )
        if config.packing.sequence_packing:
            check_config(self._model_config, device)
        self._share = Share(
            rank=parallel_state.get_data_parallel_rank(),
            num_ranks=parallel_state.get_data_parallel_world_size(),
            global_batch_size=config.training.global_batch_size,
            micro_batch_size=config.training.micro_batch_size,
        )
        self._num_skipped = 0
        if config.lora.lora and isinstance(pretrained, Pretrained) and dist.get_rank() == 0:
            print(summary_of_adapters(pretrained.weights, config.lora), flush=True)
        self._saved = SavedRun(companions, datasets, self._training, locks)
        self._progress = self._saved.load() or Progress(0, 0, evaluation_due=True)
        self._first_iteration = self._progress.iteration
        counted = self._progress.iteration * config.training.global_batch_size
        if config.training.train_samples is not None and self._progress.consumed_samples != counted:
            raise ValueError(
                "--train-samples and --train-epochs need one --global-batch-size in all of a run, "
                f"but {config.output.load} has {self._progress.consumed_samples} samples in "
                f"{self._progress.iteration} steps; pass --train-iters"
            )
        self._queue = restored_queue(
            config.packing, self._progress.waiting, self._share.rank, self._share.num_ranks
        )
        self._forward_backward = get_forward_backward_func()
        if not counts_samples():
            # Other ranks of the replica load the same samples, and report the same.
            logging.getLogger("megatron.blending").setLevel(logging.ERROR)
        self._answers: Answers | None = None
        if datasets.prompts and datasets.tokenizer is not None:
            self._answers = Answers(config, datasets.tokenizer, datasets.prompts)
        self._names = datasets.train.names
        num_records = None if config.data.mock_data else len(datasets.train)
        self._account = StepAccount(
            config, self._share, self._training.cost, self._names, num_records
        )
        self._batches = StepBatches(
            config,
            self._model_config,
            datasets.train,
            self._share,
            config.training.train_iters - self._first_iteration,
            progress=self._progress,
            queue=self._queue,
        )

    @property
    def progress(self) -> Progress:
        """Steps done and samples consumed."""
        return self._progress

    @property
    def num_steps_done(self) -> int:
        """Steps of this process, after those that it loaded."""
        return self._progress.iteration - self._first_iteration

    def hurry(self) -> None:
        """Waits for data no longer than a few seconds, once the run is asked to stop: a worker that
        is stopped itself would hold it until it is killed.
        """
        self._batches.hurry()

    def train(self, signals: StopSignals) -> None:
        """Runs to the end; saves at intervals, at the end, on a stop signal, and before a data
        error is raised.

        NonFiniteError, and nothing saved, where a loss or gradient norm is NaN or infinite. After
        an error that other ranks may not have, nothing is saved or closed: they would be waited
        for.
        """
        log = RunLog(self._config, self._run_dir, self._progress) if dist.get_rank() == 0 else None
        failure: Exception | None = None
        try:
            self._run_steps(signals, log)
        except (_Stopped, GlobalBatchError, NonFiniteError) as raised:  # alike on every rank
            failure = raised
        if failure is None or (self.num_steps_done and not isinstance(failure, NonFiniteError)):
            self._save(log)  # the failed step has changed nothing
        self._saved.finish(log)
        # Who stops a job may stop the processes that read for it, too: that is then no error.
        if isinstance(failure, _Stopped) or (
            isinstance(failure, GlobalBatchError) and self._is_stopped(signals)
        ):
            self._say_stopped(log)
            failure = None
        elif failure is None and (
            self._progress.iteration >= self._config.training.train_iters or self._stops_early()
        ):
            self._saved.write_hf(log)
        signals.agreed.set()  # all that is to stay is written
        self._batches.close()
        if log is not None:
            log.close()
        self._saved.close()
        if failure is not None:
            raise failure

    def _run_steps(self, signals: StopSignals, log: RunLog | None) -> None:
        config = self._config
        last = config.training.train_iters
        # A finished run that is started again tests nothing twice.
        ends_here = self._progress.iteration < last or self._progress.evaluation_due
        # A run that was stopped between a step and its evaluation does that first.
        self._evaluate_if_due(signals, log)
        while self._progress.iteration < last and not self._stops_early():
            if self._step(signals, log):
                raise _Stopped
            iteration = self._progress.iteration
            self._evaluate_if_due(signals, log)
            if (
                config.output.save_interval is not None
                and iteration % config.output.save_interval == 0
            ):
                self._save(log)
        if log is not None and self._stops_early():
            log.say(
                "stopped early: no lower validation loss in "
                f"{self._progress.evaluations_since_best} evaluations"
            )
        if ends_here:
            self._evaluate(self._datasets.test, "test", signals, log)

    def _is_stopped(self, signals: StopSignals) -> bool:
        """Returns whether any rank was asked to stop; collective."""
        counts = Counts.none(len(self._names))
        stops = (
            Reduction([], signals.requested or self._is_out_of_time(), counts, self._device)
            .result()
            .stop
        )
        if stops:
            signals.agreed.set()
        return stops

    def _say_stopped(self, log: RunLog | None) -> None:
        folder = self._config.output.save
        way_on = f"continue with --load {folder}" if folder else "not saved: there is no --save"
        cause = "--exit-duration-in-mins" if self._is_out_of_time() else "a signal"
        if self.num_steps_done and self._exits_after(self._progress.iteration):
            cause = "--exit-interval"
        if log is not None:
            log.say(f"stopped by {cause} after step {self._progress.iteration}; {way_on}")

    def _stops_early(self) -> bool:
        limit = self._config.training.early_stopping
        return limit is not None and self._progress.evaluations_since_best >= limit

    def _exits_after(self, iteration: int) -> bool:
        interval = self._config.training.exit_interval
        return (
            interval is not None
            and iteration % interval == 0
            and iteration < self._config.training.train_iters
        )

    def _is_out_of_time(self) -> bool:
        minutes = self._config.training.exit_duration_in_mins
        return minutes is not None and time.monotonic() - _STARTED > 60 * minutes

    def _evaluate_if_due(self, signals: StopSignals, log: RunLog | None) -> None:
        if not self._progress.evaluation_due:
            return
        loss = self._evaluate(self._datasets.valid, "valid", signals, log)
        self._answer_prompts(log)
        self._progress = self._progress._replace(evaluation_due=False)
        if loss is None:
            return
        if self._progress.best_loss is not None and loss >= self._progress.best_loss:
            since = self._progress.evaluations_since_best + 1
            self._progress = self._progress._replace(evaluations_since_best=since)
            return
        best = self._progress.iteration
        self._progress = self._progress._replace(
            best_loss=loss, evaluations_since_best=0, best_iteration=best
        )
        if self._config.output.keep_best and self._progress.iteration:
            self._save(log)
            self._saved.note_best(self._progress)

    def _step(self, signals: StopSignals, log: RunLog | None) -> bool:
        """Takes one optimizer step; returns whether some rank was asked to stop.

        On a GPU the host waits for the device once: when megatron-core asks for the norm of the
        gradients.
        """
        start = time.perf_counter()
        for chunk in self._training.model:
            chunk.zero_grad_buffer()
        self._training.optimizer.zero_grad()
        # The time of a step includes this wait; the passes' own time begins after it.
        taken = next(self._batches)
        watch = Stopwatch(self._device)
        self._losses = self._run(taken, len(self._names), forward_only=False)
        watch.stop()
        stops = (
            signals.requested
            or self._is_out_of_time()
            or self._exits_after(self._progress.iteration + 1)
        )
        self._reduction = Reduction(
            self._losses,
            stops,
            taken.counts,
            self._device,
            self._saved.is_written,
            taken.num_padded_tokens,
            figures_of(taken),
        )
        try:
            # On a GPU the reduction is on its way meanwhile: its result is read after the update.
            lr, grad_norm, succeeded = self._update()
        except NonFiniteError as failure:
            lr, grad_norm, succeeded = self._skip(failure, log)
        reduced = self._reduction.result()
        update = Update(
            taken.packed, taken.seconds_waited, watch.seconds, lr, grad_norm, not succeeded
        )
        # Only now: a checkpoint of a step that failed must still hold what that step took from the
        # queue.
        if self._queue is not None and taken.packed is not None:
            self._queue.finish(taken.packed.delayed)
        seconds = time.perf_counter() - start
        training, iteration = self._config.training, self._progress.iteration + 1
        self._progress = self._progress._replace(
            iteration=iteration,
            consumed_samples=self._progress.consumed_samples + training.global_batch_size,
            evaluation_due=iteration % training.eval_interval == 0
            or iteration == training.train_iters,
        )
        if log is not None:
            log.step(self._account.metrics(self._progress, update, reduced, seconds), update.batch)
        # All ranks know it by the same reduction, so that none waits in a collective of `finish`
        # alone.
        if reduced.all_written:
            self._saved.finish(log)
        if reduced.stop:
            signals.agreed.set()
        return reduced.stop

    def _skip(self, failure: NonFiniteError, log: RunLog | None) -> tuple[float, float, bool]:
        """Does as `_update`, of a step that changes nothing; raises `failure` where no more may be
        left out.
        """
        most = self._config.training.skip_nan_steps
        if self._num_skipped == most:
            raise failure
        self._num_skipped += 1
        if log is not None:
            log.say(f"{failure.what}; left out, {self._num_skipped} of --skip-nan-steps {most}")
        return self._training.optimizer.param_groups[0]["lr"], math.nan, False

    def _step_name(self) -> str:
        return f"step {self._progress.iteration + 1}"

    def _check_loss(self) -> None:
        check_loss(self._reduction.result(), self._losses, self._names, self._step_name())

    def _update(self) -> tuple[float, float, bool]:
        """Change the weights: learning rate of this step, gradient norm, whether they were
        changed."""
        _, optimizer, scheduler, _ = self._training
        # Read before the scheduler steps: it is this step's rate, not the next one's.
        lr = optimizer.param_groups[0]["lr"]
        succeeded, grad_norm, _ = optimizer.step()
        if succeeded:
            scheduler.step(increment=self._config.training.global_batch_size)
        return lr, float(grad_norm or 0.0), succeeded

    def _evaluate(
        self, dataset: SampleSet, split: str, signals: StopSignals, log: RunLog | None
    ) -> float | None:
        """Returns the mean loss per token over up to `eval_iters` global batches of `dataset`,
        always the same; None where there are none. Raises _Stopped after a batch in which some rank
        was asked to stop.
        """
        size = self._config.training.global_batch_size
        num_batches = min(self._config.training.eval_iters, -(-len(dataset) // size))
        if num_batches == 0:
            return None
        names = dataset.names
        # training's and evaluation's are prepared over the same groups, one after the other
        self._batches.settle()
        batches = StepBatches(self._config, self._model_config, dataset, self._share, num_batches)
        for chunk in self._training.model:
            chunk.eval()
        losses: list[Any] = []
        is_stopped = False
        with torch.no_grad():
            while not is_stopped and num_batches:
                losses.extend(self._run(next(batches), len(names), forward_only=True))
                num_batches -= 1
                is_stopped = num_batches > 0 and self._is_stopped(signals)
        batches.close()
        if is_stopped:
            self._progress = self._progress._replace(evaluation_due=True)
            raise _Stopped
        for chunk in self._training.model:
            chunk.train()
        reduced = Reduction(losses, False, batches.counts, self._device).result()
        check_loss(reduced, losses, names, f"split {split} after step {self._progress.iteration}")
        if log is not None:
            log.writer.evaluation(
                Evaluation(
                    iteration=self._progress.iteration,
                    split=split,
                    loss=reduced.loss,
                    token_accuracy=reduced.token_accuracy,
                    num_tokens=reduced.num_loss_tokens,
                    dropped_samples=reduced.counts.num_dropped,
                    truncated_samples=reduced.counts.num_cut,
                    dropped=reduced.dropped_by_source(names),
                    sources=reduced.by_source(names),
                )
            )
        return reduced.loss

    def _answer_prompts(self, log: RunLog | None) -> None:
        if self._answers is None:
            return
        self._batches.settle()
        for chunk in self._training.model:
            chunk.eval()
        with torch.no_grad():
            answers = self._answers.answers(
                self._training.model,
                partial(self._run, num_sources=1, forward_only=True),
                self._device,
            )
        for chunk in self._training.model:
            chunk.train()
        if log is not None:
            log.writer.answers(self._progress.iteration, answers)

    def _run(
        self, taken: StepBatch | PromptBatch, num_sources: int, *, forward_only: bool
    ) -> list[Any]:
        return self._forward_backward(
            forward_step_func=partial(forward_step, num_sources=num_sources),
            data_iterator=taken.iterators(self._config.num_virtual_stages, self._device),
            model=self._training.model
            if len(self._training.model) > 1
            else self._training.model[0],
            num_microbatches=taken.num_microbatches,
            seq_length=self._config.model.seq_length,
            micro_batch_size=self._config.training.micro_batch_size,
            forward_only=forward_only,
        )

    def _save(self, log: RunLog | None) -> None:
        self._saved.save(self._progress, self._queue, log)
