"""mcore. The training loop: steps, evaluations, checkpoints, a clean end on Ctrl-C."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import tee
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.timers import Timers
from megatron.core.utils import get_model_config, unwrap_model

from megatron.packing.model.pipeline import PackedLosses, packed
from megatron.packing.step.decide import GlobalBatchError
from megatron.packing.step.groups import is_drawing_rank
from megatron.packing.step.settings import PackingOptions
from megatron.sft.data.datasets import Datasets
from megatron.sft.data.mixture import Mixture
from megatron.sft.data.stream import SampleStream, Share
from megatron.sft.finite import NonFiniteError, check_loss, guard_step
from megatron.sft.model.build import build_training
from megatron.sft.model.checkpoint import (
    Progress,
    gather_delayed,
    load_checkpoint,
    restored_queue,
    save_checkpoint,
    whole_parameters,
)
from megatron.sft.model.checkpoint_files import check_folder
from megatron.sft.model.checkpoint_folder import BEST, remove_old, track
from megatron.sft.model.forward import forward_step, padded_batches
from megatron.sft.model.hf_companions import Companions
from megatron.sft.model.hf_read import Pretrained
from megatron.sft.model.hf_write import write_folder
from megatron.sft.options.config import SFTConfig
from megatron.sft.report.metrics import Evaluation
from megatron.sft.report.run_folder import RunLog
from megatron.sft.step_account import StepAccount, Update, counts_samples, reduce
from megatron.sft.stop import StopSignals

_STARTED = time.monotonic()
"""When this process was started, but for its first imports."""


class Trainer:
    """Trains to `train_iters`, or to the step at which it is asked to stop."""

    def __init__(
        self,
        config: SFTConfig,
        datasets: Datasets,
        device: torch.device,
        run_dir: Path,
        pretrained: Pretrained | None = None,
    ) -> None:
        self._config = config
        self._datasets = datasets
        self._device = device
        self._run_dir = run_dir
        self._timers = Timers(log_level=0, log_option="max")
        self._lock = check_folder(config.output.save) if config.output.save is not None else None
        self._training = build_training(config, datasets.vocab_size, device, pretrained)
        guard_step(self._training.optimizer, self._training.model, self._step_name)
        dtype = str(get_model_config(self._training.model[0]).params_dtype).removeprefix("torch.")
        self._companions = Companions(config, datasets.tokenizer, datasets.vocab_size, dtype)
        self._packing = config.packing.sequence_packing
        self._share = Share(
            rank=parallel_state.get_data_parallel_rank(),
            num_ranks=parallel_state.get_data_parallel_world_size(),
            global_batch_size=config.training.global_batch_size,
            micro_batch_size=config.training.micro_batch_size,
        )
        self._saved_iteration: int | None = None
        self._num_skipped = 0
        self._progress = self._load() or Progress(0, 0, evaluation_due=True)
        self._first_iteration = self._progress.iteration
        self._queue = restored_queue(config.packing, self._progress.waiting, self._share.rank, self._share.num_ranks)
        forward_backward = get_forward_backward_func()
        self._forward_backward = packed(forward_backward, self._queue) if self._packing else forward_backward
        self._padded_seconds = 0.0
        if not counts_samples():
            logging.getLogger("megatron.blending").setLevel(logging.ERROR)  # others draw the same samples, and tell
        self._names = [source.name for source in datasets.train.sources]
        self._account = StepAccount(config, self._share, self._training.cost, self._names)
        self._stream = SampleStream(
            datasets.train, self._share, is_endless=True, consumed_samples=self._progress.consumed_samples
        )

    @property
    def progress(self) -> Progress:
        """Steps done and samples consumed."""
        return self._progress

    @property
    def num_steps_done(self) -> int:
        """By this process, after what it loaded."""
        return self._progress.iteration - self._first_iteration

    def train(self) -> None:
        """Runs to the end; saves at intervals, at the end, on a stop signal, and before a data error is raised.

        NonFiniteError, and nothing saved, where a loss or gradient norm is NaN or infinite.
        """
        log = RunLog(self._config, self._run_dir, self._progress) if dist.get_rank() == 0 else None
        try:
            with StopSignals() as signals:
                try:
                    self._run_steps(signals, log)
                except GlobalBatchError:  # raised alike on every rank, before the step changed anything
                    self._save(log)
                    raise
                self._save(log)
                self._write_hf(log)
        finally:
            if log is not None:
                log.close()
            if self._lock is not None:
                self._lock.release()

    def _run_steps(self, signals: StopSignals, log: RunLog | None) -> None:
        config = self._config
        data = self._batches(self._stream)
        last = config.training.train_iters
        ends_here = self._progress.iteration < last or self._progress.evaluation_due
        self._evaluate_if_due(log)
        while self._progress.iteration < last and not self._stops_early():
            if self._queue is not None and self._progress.iteration == last - 1:
                self._queue.max_steps = 0  # the last step takes all that is delayed
            stop = self._step(data, signals, log)
            iteration = self._progress.iteration
            if stop:
                if log is not None:
                    folder = config.output.save
                    way_on = f"continue with --load {folder}" if folder else "not saved: there is no --save"
                    cause = "--exit-duration-in-mins" if self._is_out_of_time() else "a signal"
                    log.say(f"stopped by {cause} after step {iteration}; {way_on}")
                return
            self._evaluate_if_due(log)
            if config.output.save_interval is not None and iteration % config.output.save_interval == 0:
                self._save(log)
        if log is not None and self._stops_early():
            log.say(f"stopped early: no lower validation loss in {self._progress.evaluations_since_best} evaluations")
        if ends_here:
            self._evaluate(self._datasets.test, "test", log)

    def _stops_early(self) -> bool:
        limit = self._config.training.early_stopping
        return limit is not None and self._progress.evaluations_since_best >= limit

    def _is_out_of_time(self) -> bool:
        minutes = self._config.training.exit_duration_in_mins
        return minutes is not None and time.monotonic() - _STARTED > 60 * minutes

    def _evaluate_if_due(self, log: RunLog | None) -> None:
        if not self._progress.evaluation_due:
            return
        loss = self._evaluate(self._datasets.valid, "valid", log)
        self._progress = self._progress._replace(evaluation_due=False)
        if loss is None:
            return
        if self._progress.best_loss is not None and loss >= self._progress.best_loss:
            since = self._progress.evaluations_since_best + 1
            self._progress = self._progress._replace(evaluations_since_best=since)
            return
        self._progress = self._progress._replace(best_loss=loss, evaluations_since_best=0)
        folder = self._config.output.save
        if self._config.output.keep_best and folder is not None and self._progress.iteration:
            self._save(log)
            if log is not None:
                track(folder, BEST, self._progress.iteration)

    def _step(self, data: Iterator[Any], signals: StopSignals, log: RunLog | None) -> bool:
        """Takes one optimizer step; returns whether some rank was asked to stop."""
        timer = self._timers("step", log_level=0)
        timer.start()
        counted = self._stream.counts
        if self._packing:
            shared = get_model_config(self._training.model[0])
            shared.sequence_packing_options = replace(PackingOptions.of(shared), step=self._progress.iteration)
        losses, data_seconds, passes_seconds = self._passes(data)
        stops = signals.requested or self._is_out_of_time()
        reduced = reduce(losses, stops, self._stream.counts - counted, self._device)
        try:
            check_loss(reduced, losses, self._names, self._step_name())
            lr, grad_norm, succeeded = self._update()
        except NonFiniteError as failure:
            lr, grad_norm, succeeded = self._skip(failure, log)
        update = Update(losses, data_seconds, passes_seconds, lr, grad_norm, not succeeded)
        timer.stop()
        training, iteration = self._config.training, self._progress.iteration + 1
        self._progress = self._progress._replace(
            iteration=iteration,
            consumed_samples=self._progress.consumed_samples + training.global_batch_size,
            evaluation_due=iteration % training.eval_interval == 0 or iteration == training.train_iters,
        )
        if log is not None:
            log.step(self._account.metrics(self._progress, update, reduced, timer.elapsed()), update.batch)
        return reduced.stop

    def _skip(self, failure: NonFiniteError, log: RunLog | None) -> tuple[float, float, bool]:
        """As `_update`, of a step that changes nothing; raises `failure` where no more may be left out."""
        most = self._config.training.skip_nan_steps
        if self._num_skipped == most:
            raise failure
        self._num_skipped += 1
        if log is not None:
            log.say(f"{failure.what}; left out, {self._num_skipped} of --skip-nan-steps {most}")
        return self._training.optimizer.param_groups[0]["lr"], math.nan, False

    def _step_name(self) -> str:
        return f"step {self._progress.iteration + 1}"

    def _passes(self, data: Iterator[Any]) -> tuple[list[Any], float, float]:
        """Forward and backward of a global batch: its losses, seconds that it waited for data, other seconds."""
        self._padded_seconds = 0.0
        for chunk in self._training.model:
            chunk.zero_grad_buffer()
        self._training.optimizer.zero_grad()
        timer = self._timers("passes", log_level=0)
        timer.start()
        losses = self._run(data, len(self._names), forward_only=False)
        timer.stop()
        data_seconds = losses.batch.seconds if isinstance(losses, PackedLosses) else self._padded_seconds
        return losses, data_seconds, timer.elapsed() - data_seconds

    def _update(self) -> tuple[float, float, bool]:
        """Change the weights: learning rate of this step, gradient norm, whether they were changed."""
        _, optimizer, scheduler, _ = self._training
        lr = optimizer.param_groups[0]["lr"]  # that of this step; the scheduler goes on to the next one's
        succeeded, grad_norm, _ = optimizer.step()
        if succeeded:
            scheduler.step(increment=self._config.training.global_batch_size)
        return lr, float(grad_norm or 0.0), succeeded

    def _evaluate(self, dataset: Mixture, split: str, log: RunLog | None) -> float | None:
        """Returns the mean loss per token over up to `eval_iters` global batches of `dataset`, always the same; None
        where there are none.
        """
        size = self._config.training.global_batch_size
        num_batches = min(self._config.training.eval_iters, -(-len(dataset) // size))
        if num_batches == 0:
            return None
        names = [source.name for source in dataset.sources]
        stream = SampleStream(dataset, self._share, is_endless=False)
        data = self._batches(stream)
        for chunk in self._training.model:
            chunk.eval()
        losses: list[Any] = []
        with torch.no_grad():
            for _ in range(num_batches):
                losses.extend(self._run(data, len(names), forward_only=True))
        for chunk in self._training.model:
            chunk.train()
        reduced = reduce(losses, False, stream.counts, self._device)
        check_loss(reduced, losses, names, f"split {split} after step {self._progress.iteration}")
        if log is not None:
            log.writer.evaluation(
                Evaluation(
                    iteration=self._progress.iteration,
                    split=split,
                    loss=reduced.loss,
                    num_tokens=reduced.num_loss_tokens,
                    dropped_samples=reduced.counts.num_dropped,
                    cut_samples=reduced.counts.num_cut,
                    dropped=reduced.dropped_by_source(names),
                    sources=reduced.by_source(names),
                )
            )
        return reduced.loss

    def _run(self, data: Any, num_sources: int, *, forward_only: bool) -> list[Any]:
        return self._forward_backward(
            forward_step_func=partial(forward_step, num_sources=num_sources),
            data_iterator=data,
            model=self._training.model if len(self._training.model) > 1 else self._training.model[0],
            num_microbatches=self._share.num_draws,
            seq_length=self._config.model.seq_length,
            micro_batch_size=self._config.training.micro_batch_size,
            forward_only=forward_only,
        )

    def _batches(self, stream: SampleStream) -> Any:
        """Returns what forward-backward functions draw from: samples on drawing ranks, or padded batches on all."""
        num_chunks = len(self._training.model)
        if self._packing:
            groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp", "pp"])
            source: Any = stream if is_drawing_rank(groups) else None
            return source if num_chunks == 1 else [source] * num_chunks
        return self._padded(stream, num_chunks)

    def _padded(self, stream: SampleStream, num_chunks: int) -> Any:
        batches = self._waited_for(
            padded_batches(stream, self._config.model.seq_length, self._config.training.micro_batch_size, self._device)
        )
        if num_chunks == 1:
            return batches
        return list(tee(batches, num_chunks))

    def _waited_for(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yields the same batches; counts the time that the model waited for them."""
        while True:
            start = time.perf_counter()
            batch = next(batches, None)
            self._padded_seconds += time.perf_counter() - start
            if batch is None:
                return
            yield batch

    def _save(self, log: RunLog | None) -> None:
        if self._config.output.save is None or self._saved_iteration == self._progress.iteration:
            return
        progress = self._progress._replace(waiting=gather_delayed(self._queue))
        save_checkpoint(
            self._config.output.save,
            self._training,
            progress,
            self._model_options(),
            self._datasets.train.identity(),
            self._companions if self._companions.has_family() else None,
        )
        self._saved_iteration = self._progress.iteration
        if log is not None and self._config.output.keep_checkpoints is not None:
            remove_old(self._config.output.save, self._config.output.keep_checkpoints)
        if log is not None:
            log.say(f"saved step {self._progress.iteration} to {self._config.output.save}")

    def _write_hf(self, log: RunLog | None) -> None:
        folder = self._config.output.save_hf
        is_done = self._progress.iteration >= self._config.training.train_iters or self._stops_early()
        if folder is None or not is_done:
            return
        whole_parameters(self._training)
        chunks = [unwrap_model(chunk) for chunk in self._training.model]
        write_folder(folder, chunks, self._companions.weights(), self._companions.write)
        if log is not None:
            log.say(f"wrote the model to {folder}, for transformers and others")

    def _load(self) -> Progress | None:
        """Returns that of the newest checkpoint of --load; None without one."""
        folder, save = self._config.output.load, self._config.output.save
        if folder is None:
            return None
        loaded = load_checkpoint(
            folder,
            self._training,
            self._model_options(),
            self._datasets.train.identity(),
            self._config.data.allow_changed_data,
        )
        if loaded is not None and save is not None and Path(folder).resolve() == Path(save).resolve():
            self._saved_iteration = loaded.iteration
        if dist.get_rank() == 0:
            found = f"no checkpoint in {folder}; starting anew"
            print(found if loaded is None else f"continuing {folder} after step {loaded.iteration}", flush=True)
        return loaded

    def _model_options(self) -> dict[str, Any]:
        """Returns what a checkpoint must share with the run that loads it."""
        sharded = self._config.parallel.use_distributed_optimizer
        vocabulary = self._datasets.vocabulary()
        return {**self._config.model.identity(), **vocabulary, "use_distributed_optimizer": sharded}
