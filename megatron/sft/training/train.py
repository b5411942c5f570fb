"""mcore. The training loop: steps, evaluations, checkpoints, a clean end on Ctrl-C.

    train        all of a run: steps, the last checkpoint, the export
    _run_steps   step, evaluation if due, checkpoint if due, until the last step or a stop
    _step        data, forward and backward passes, update, metrics

Ranks must take every decision alike, since nearly all work is collective. So a rank that is asked
to stop only says so in the reduction of the next step (`Reduction`), and all of them stop after it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_model_config

from megatron.packing.device import Device
from megatron.packing.model.pipeline import check_config
from megatron.packing.step.decide import GlobalBatchError
from megatron.sft.data.counts import Counts
from megatron.sft.data.datasets import Datasets
from megatron.sft.data.stream import Share
from megatron.sft.model.build import build_training
from megatron.sft.model.checkpoints.content import Progress
from megatron.sft.model.checkpoints.delayed import restored_queue
from megatron.sft.model.checkpoints.folder import latest_iteration
from megatron.sft.model.huggingface.companions import Companions
from megatron.sft.model.huggingface.pretrained import note_on_head
from megatron.sft.model.huggingface.read import MegatronCheckpoint, Pretrained
from megatron.sft.model.lora.names import note_for_peft, summary_of_adapters
from megatron.sft.options.config import SFTConfig
from megatron.sft.preflight.output_check import check_output
from megatron.sft.report.run_folder import RunLog
from megatron.sft.training.evaluation import Evaluator, Split
from megatron.sft.training.figures import figures_of
from megatron.sft.training.finite import NonFiniteError
from megatron.sft.training.passes import Passes
from megatron.sft.training.preference.objective import objective_of
from megatron.sft.training.preference.reward_scores import write_reward_scores
from megatron.sft.training.preference.scoring import write_reference
from megatron.sft.training.saved_run import SavedRun
from megatron.sft.training.step_account import (
    Reduction,
    StepAccount,
    Stopwatch,
    Update,
    counts_samples,
)
from megatron.sft.training.step_batches import StepBatches
from megatron.sft.training.stop import Stopped, StopRules, StopSignals
from megatron.sft.training.update import Updater


class Trainer:
    """Trains up to `train_iters` steps, or until it is asked to stop."""

    def __init__(
        self,
        config: SFTConfig,
        datasets: Datasets,
        device: Device,
        run_dir: Path,
        pretrained: Pretrained | MegatronCheckpoint | None = None,
    ) -> None:
        self._config = config
        self._device = device
        self._run_dir = run_dir
        self._datasets = datasets
        self._rules = StopRules(config.training)
        self._share = Share(
            rank=parallel_state.get_data_parallel_rank(),
            num_ranks=parallel_state.get_data_parallel_world_size(),
            global_batch_size=config.training.global_batch_size,
            micro_batch_size=config.training.micro_batch_size,
        )
        dtype = "bfloat16" if config.training.bf16 else "float32"
        companions = Companions(config, datasets.tokenizer, datasets.vocab_size, dtype)
        # First, because it is quick: building a model only to find a folder that cannot be written
        # to would waste minutes.
        # A run that only scores has no metrics.
        locks = check_output(companions, None if config.preference.only_scores else run_dir)
        self._build_model(datasets, pretrained)
        self._saved = SavedRun(companions, datasets, self._training, locks, pretrained)
        self._restore()
        self._build_data(datasets)

    def _build_model(
        self, datasets: Datasets, pretrained: Pretrained | MegatronCheckpoint | None
    ) -> None:
        """Builds the model, its passes and its updater; collective. A checkpoint is later copied
        into the parameters and the optimizer state that are allocated here.
        """
        config, device = self._config, self._device
        self._training = build_training(config, datasets.vocab_size, device, pretrained)
        self._model_config = get_model_config(self._training.model[0])
        self._names = datasets.train.names
        self._updater = Updater(self._training, config.training, self._names)
        if config.packing.sequence_packing:
            check_config(self._model_config, device)
        if config.lora.lora and isinstance(pretrained, Pretrained) and dist.get_rank() == 0:
            print(summary_of_adapters(pretrained.weights, config.lora), flush=True)
            note = note_for_peft(pretrained.weights, config.lora)
            if note and config.lora.writes_adapter and config.output.save_hf is not None:
                print(note, flush=True)
        load = config.output.load
        is_new = load is None or latest_iteration(load) is None
        if config.preference.scores_answers and is_new and dist.get_rank() == 0:
            print(note_on_head(pretrained), flush=True)
        # Before a checkpoint is loaded: the reference of preference tuning is the weights that the
        # run began with.
        self._objective = objective_of(config, self._training)
        self._passes = Passes(config, self._training, self._objective)

    def _restore(self) -> None:
        """Loads the checkpoint of --load, if there is one; collective. It comes before
        `_build_data`, whose batches start at the checkpoint's position.
        """
        self._progress = self._saved.load() or Progress(0, 0, evaluation_due=True)
        self._first_iteration = self._progress.iteration
        self._check_samples_done()
        self._queue = restored_queue(
            self._config.packing,
            self._config.scheduling,
            self._progress.waiting,
            self._share.rank,
            self._share.num_ranks,
        )

    def _build_data(self, datasets: Datasets) -> None:
        """Starts the training batches, and builds the evaluator and the account of steps;
        collective.
        """
        if not counts_samples():
            # Ranks of a replica load the same samples: let only one of them log warnings about
            # them. The level must be set before worker processes start, which inherit it.
            logging.getLogger("megatron.blending").setLevel(logging.ERROR)
        config = self._config
        num_records = None if config.data.mock_data else len(datasets.train)
        self._account = StepAccount(
            config, self._share, self._training.flops, self._names, num_records
        )
        # After the checkpoint is loaded, which may raise: this starts worker processes and a
        # thread, which would have to be stopped.
        self._batches = StepBatches(
            config,
            self._model_config,
            datasets.train,
            self._share,
            config.training.train_iters - self._first_iteration,
            progress=self._progress,
            queue=self._queue,
        )
        self._evaluator = Evaluator(
            config,
            self._model_config,
            datasets,
            self._share,
            self._training,
            self._passes,
            self._batches.settle,
        )

    def _check_samples_done(self) -> None:
        """Raises ValueError if --train-samples is set and the checkpoint's steps used another
        --global-batch-size.
        """
        config, done = self._config, self._progress
        counted = done.iteration * config.training.global_batch_size
        if config.training.train_samples is not None and done.consumed_samples != counted:
            raise ValueError(
                "--train-samples and --train-epochs need one --global-batch-size in all of a run, "
                f"but {config.output.load} has {done.consumed_samples} samples in "
                f"{done.iteration} steps; pass --train-iters"
            )

    @property
    def progress(self) -> Progress:
        """Progress of the run: steps done and samples consumed."""
        return self._progress

    @property
    def num_steps_done(self) -> int:
        """Number of steps since this process started, without those of the loaded checkpoint."""
        return self._progress.iteration - self._first_iteration

    def limit_data_wait(self) -> None:
        """Limits the wait for data to a few seconds. It is called when a stop is requested: the
        signal may have killed data workers, and this rank would wait for them forever.
        """
        self._batches.limit_data_wait()

    def score(self, header: Mapping[str, Any]) -> None:
        """Writes --write-reference-file or --write-scores, in place of training; collective."""
        self._batches.settle()
        given = (self._config, self._model_config, self._datasets, self._share, self._passes)
        is_reward = self._config.preference.scores_answers
        line = write_reward_scores(*given) if is_reward else write_reference(*given, header)
        self._batches.close()
        self._saved.close()
        if line:
            print(line, flush=True)

    def train(self, signals: StopSignals) -> None:
        """Trains to the end. Saves at intervals, at the end, on a stop signal, and before a data
        error is raised.

        Raises NonFiniteError if a loss or gradient norm is NaN or infinite, without saving. Any
        other error may have hit this rank alone. Then nothing is saved or closed, since both are
        collective and would wait for the other ranks.
        """
        log = RunLog(self._config, self._run_dir, self._progress) if dist.get_rank() == 0 else None
        failure: Exception | None = None
        try:
            self._run_steps(signals, log)
        # These three are raised on every rank alike, so that all ranks go on to save.
        except (Stopped, GlobalBatchError, NonFiniteError) as raised:
            failure = raised
        if failure is None or (self.num_steps_done and not isinstance(failure, NonFiniteError)):
            self._save(log)  # the state after the last complete step: a failed one changes nothing
        self._saved.finish(log)
        # A stop signal may also kill the data workers. The GlobalBatchError that follows is then
        # not a failure.
        if isinstance(failure, Stopped) or (
            isinstance(failure, GlobalBatchError) and self._is_stopped(signals)
        ):
            self._say_stopped(log)
            failure = None
        elif failure is None:
            self._saved.write_hf(log)
        signals.agreed.set()  # every rank has come here: `on_sigterm` need not ask for missing ones
        self._batches.close()
        if log is not None:
            log.close()
        self._saved.close()
        if failure is not None:
            raise failure

    def _run_steps(self, signals: StopSignals, log: RunLog | None) -> None:
        config = self._config
        last = config.training.train_iters
        # A finished run that is started again does not evaluate the test split once more.
        runs_final_test = self._progress.iteration < last or self._progress.evaluation_due
        # A run that was stopped between a step and its evaluation begins with the evaluation.
        self._evaluate_if_due(signals, log)
        while self._progress.iteration < last and not self._stops_early():
            if self._step(signals, log):
                raise Stopped
            iteration = self._progress.iteration
            self._evaluate_if_due(signals, log)
            if config.output.saves_after(iteration):
                self._save(log)
        if log is not None and self._stops_early():
            log.say(
                "stopped early: no lower validation loss in "
                f"{self._progress.evaluations_since_best} evaluations"
            )
        if runs_final_test:
            self._evaluate("test", signals, log)

    def _is_stopped(self, signals: StopSignals) -> bool:
        """Returns whether any rank was asked to stop; collective."""
        asked = signals.requested or self._rules.is_out_of_time()
        nothing = Counts.none(len(self._names))
        stops = Reduction([], asked, nothing, self._device).result().stop
        if stops:
            signals.agreed.set()
        return stops

    def _say_stopped(self, log: RunLog | None) -> None:
        if log is None:
            return
        folder = self._config.output.save
        way_on = f"continue with --load {folder}" if folder else "not saved: there is no --save"
        cause = "--exit-duration-in-mins" if self._rules.is_out_of_time() else "a signal"
        if self.num_steps_done and self._rules.exits_after(self._progress.iteration):
            cause = "--exit-interval"
        log.say(f"stopped by {cause} after step {self._progress.iteration}; {way_on}")

    def _stops_early(self) -> bool:
        return self._rules.stops_early(self._progress.evaluations_since_best)

    def _evaluate_if_due(self, signals: StopSignals, log: RunLog | None) -> None:
        if not self._progress.evaluation_due:
            return
        loss = self._evaluate("valid", signals, log)
        answers = self._evaluator.answers()
        if log is not None and answers:
            log.writer.answers(self._progress.iteration, answers)
        self._progress = self._progress._replace(evaluation_due=False)
        if loss is None or not self._note_loss(loss):
            return
        if self._config.output.keep_best and self._progress.iteration:
            self._save(log)
            self._saved.note_best(self._progress)

    def _note_loss(self, loss: float) -> bool:
        """Records a validation loss in the progress; returns whether it is the lowest so far."""
        done = self._progress
        is_best = done.best_loss is None or loss < done.best_loss
        self._progress = (
            done._replace(best_loss=loss, evaluations_since_best=0, best_iteration=done.iteration)
            if is_best
            else done._replace(evaluations_since_best=done.evaluations_since_best + 1)
        )
        return is_best

    def _evaluate(self, split: Split, signals: StopSignals, log: RunLog | None) -> float | None:
        """Returns the mean loss per token of a split; None if it has no samples. If a stop
        interrupts it, the evaluation stays due, and a run that continues begins with it.
        """
        try:
            found = self._evaluator.evaluate(
                split, self._progress.iteration, lambda: self._is_stopped(signals)
            )
        except Stopped:
            self._progress = self._progress._replace(evaluation_due=True)
            raise
        if found is None:
            return None
        if log is not None:
            log.writer.evaluation(found)
        return found.loss

    def _step(self, signals: StopSignals, log: RunLog | None) -> bool:
        """Takes one optimizer step; returns whether any rank was asked to stop.

        On a GPU the host waits for the device once per step: when megatron-core reads the norm of
        the gradients. With pipeline stages it waits at each exchange between them, too:
        megatron-core sends the shapes of tensors first, and reads them.
        """
        start = time.perf_counter()
        for chunk in self._training.model:
            chunk.zero_grad_buffer()
        self._training.optimizer.zero_grad()
        # The time of the step includes the wait for data; that of the passes begins after it.
        batch = next(self._batches)
        watch = Stopwatch(self._device)
        losses = self._passes.forward_backward(batch, len(self._names), forward_only=False)
        watch.stop()
        iteration = self._progress.iteration + 1
        stops = (
            signals.requested or self._rules.is_out_of_time() or self._rules.exits_after(iteration)
        )
        # Start the reduction before the update: on a GPU both run at the same time, and the update
        # reads the result at its end.
        reduction = Reduction(
            losses,
            stops,
            batch.counts,
            self._device,
            is_written=self._saved.is_written,
            num_padded_tokens=batch.num_padded_tokens,
            figures=figures_of(batch),
            sums=self._objective.sums,
            maxima=self._objective.maxima,
        )
        say = (lambda line: None) if log is None else log.say
        result = self._updater.update_weights(iteration, reduction, losses, say)
        reduced = reduction.result()
        update = Update(
            batch=batch.packed,
            data_seconds=batch.seconds_waited,
            passes_seconds=watch.seconds,
            lr=result.lr,
            grad_norm=result.grad_norm,
            skipped=result.skipped,
            figures=self._objective.figures(reduced.sums),
        )
        # The steps that are prepared ahead change a queue of their own. This one is what
        # checkpoints save: it changes only now, as the step cannot fail any more.
        if self._queue is not None and batch.packed is not None:
            self._queue.finish(batch.packed.delayed)
        seconds = time.perf_counter() - start
        training = self._config.training
        self._progress = self._progress._replace(
            iteration=iteration,
            consumed_samples=self._progress.consumed_samples + training.global_batch_size,
            evaluation_due=iteration % training.eval_interval == 0
            or iteration == training.train_iters,
        )
        if log is not None:
            log.step(self._account.metrics(self._progress, update, reduced, seconds), update.batch)
        # `all_written` comes from the reduction, so that all ranks enter `finish`, which is
        # collective, in the same step.
        if reduced.all_written:
            self._saved.finish(log)
        if reduced.stop:
            signals.agreed.set()
        return reduced.stop

    def _save(self, log: RunLog | None) -> None:
        self._saved.save(self._progress, self._queue, log)
