"""mcore. Saves and loads a run: its checkpoints, and the HuggingFace folder at its end."""

from __future__ import annotations

import hashlib
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.utils import unwrap_model

from megatron.packing.model.parts import parts_in
from megatron.packing.step.delay import DelayQueue
from megatron.packing.user_files import disk_fault
from megatron.sft.data.datasets import Datasets
from megatron.sft.data.sample_set import match_saved_form
from megatron.sft.model.build import Training
from megatron.sft.model.checkpoints.content import (
    Progress,
    Wanted,
    load_checkpoint,
    whole_parameters,
)
from megatron.sft.model.checkpoints.delayed import gather_delayed
from megatron.sft.model.checkpoints.files import written_or_refused
from megatron.sft.model.checkpoints.folder import (
    BEST,
    best_iteration,
    checkpoint_path,
    huggingface_source,
    remove_old,
    track,
    unfinished_path,
)
from megatron.sft.model.checkpoints.save import CheckpointSave
from megatron.sft.model.huggingface.companions import Companions
from megatron.sft.model.huggingface.folder import fingerprint, open_folder
from megatron.sft.model.huggingface.read import MegatronCheckpoint, Pretrained
from megatron.sft.model.huggingface.write import write_folder
from megatron.sft.model.lora.names import AdapterWeights
from megatron.sft.model.lora.write import merged_values, write_adapter
from megatron.sft.options.config import SFTConfig
from megatron.sft.preflight.output_check import Locks
from megatron.sft.preflight.read_files import weights_at_start, weights_in_words
from megatron.sft.report.model_card import write_card
from megatron.sft.report.run_folder import RunLog


def model_options(
    config: SFTConfig,
    datasets: Datasets,
    pretrained: Pretrained | MegatronCheckpoint | None = None,
) -> dict[str, Any]:
    """Returns the options that must be the same in a checkpoint and in the run that loads it.

    pretrained: the weights that the run begins with, which are the reference of some losses.
    """
    sharded = config.shards_optimizer
    options = {
        **config.model.identity(),
        **datasets.vocabulary(),
        "use_distributed_optimizer": sharded,
    }
    if config.preference.scores_answers:
        options["score_head"] = True
    if config.preference.needs_reference:
        files = repr(weights_at_start(config, pretrained)).encode()
        options["reference"] = hashlib.sha256(files).hexdigest()[:16]
        options["reference_source"] = weights_in_words(config)
    if not sharded:  # sharded, the state is float32 in both precisions, under the same keys
        options["bf16"] = config.training.bf16
    options |= config.lora.identity(
        parts=[part.name for part in parts_in(config.model)],
        has_experts=config.model.num_experts is not None,
        has_shared_experts=bool(config.model.moe_shared_expert_intermediate_size),
        has_dense_layers=0 in config.model.moe_layer_freq,
    )
    options |= config.images.identity()
    if config.lora.lora or config.images.freezes:
        assert config.output.pretrained_checkpoint is not None
        options["base_folder"] = config.output.pretrained_checkpoint
        # 16 hex digits: enough to distinguish base models, and readable in an error.
        options["base"] = fingerprint(open_folder(config.output.pretrained_checkpoint))[:16]
    return options


class SavedRun:
    """The checkpoints of a run, by its options. All methods are collective, except for `close` and
    `note_best`.
    """

    def __init__(
        self,
        companions: Companions,
        datasets: Datasets,
        training: Training,
        locks: Locks,
        pretrained: Pretrained | MegatronCheckpoint | None,
    ) -> None:
        """locks: locks of the folders to write to (see `check_output`); `close` releases them."""
        config = companions.config
        self._output = config.output
        # A run that only scores has no place in the data.
        self._takes_weights = config.output.finetune or config.preference.only_scores
        self._lora = config.lora
        self._allow_changed_data = config.data.allow_changed_data
        self._training = training
        self._locks = locks
        self._identity = datasets.train.identity
        self._model_options = model_options(config, datasets, pretrained)
        # Identity of the validation data. If it changes, new losses are not compared with the best
        # one so far.
        num_evaluated = min(
            config.training.eval_iters * config.training.global_batch_size, len(datasets.valid)
        )
        identity = datasets.valid.identity
        evaluated = [
            str((form, num_evaluated, config.model.seq_length))
            # the latter by earlier versions
            for form in (identity, match_saved_form({}, identity))
        ]
        self._evaluated, self._same_evaluated = evaluated[0], {None, *evaluated}
        self._companions = companions
        self._saved_iteration: int | None = None
        self._best_iteration: int | None = None
        self._notes: set[str] = set()
        self._save: CheckpointSave | None = None

    def load(self) -> Progress | None:
        """Loads the checkpoint of --load, and returns its progress. Returns None if there is none,
        or if only its weights are loaded (--finetune, or scoring).
        """
        folder, save, takes_weights = self._output.load, self._output.save, self._takes_weights
        if folder is None:
            return None
        wanted = Wanted(
            iteration=self._output.ckpt_step,
            optimizer=self._output.load_optim and not takes_weights,
            random_states=self._output.load_rng and not takes_weights,
            progress=not takes_weights,
            changed_blend=self._allow_changed_data,
        )
        loaded = load_checkpoint(
            folder, self._training, self._model_options, self._identity, wanted
        )
        if loaded is not None and not takes_weights:
            self._check_schedule(loaded)
        if (
            loaded is not None
            and save is not None
            and Path(folder).resolve() == Path(save).resolve()
        ):
            # This step is saved already: a run that is stopped at once must not save it again.
            self._saved_iteration = loaded.iteration
            if dist.get_rank() == 0:
                self._go_back(save, loaded)
        if dist.get_rank() == 0:
            done = "taking the weights of" if takes_weights else "continuing"
            found = f"no checkpoint in {folder}; starting again"
            print(
                found if loaded is None else f"{done} {folder} after step {loaded.iteration}",
                flush=True,
            )
        if loaded is None or takes_weights or loaded.evaluated in self._same_evaluated:
            return None if takes_weights else loaded
        if dist.get_rank() == 0 and loaded.best_loss is not None:
            print(
                "note: other validation data than before; the lowest loss is looked for again",
                flush=True,
            )
        return loaded._replace(best_loss=None, best_iteration=None, evaluations_since_best=0)

    def _check_schedule(self, loaded: Progress) -> None:
        """Raises ValueError where no step would train: schedules count samples, so that they may be
        over after steps of more sequences than now.
        """
        training, schedule = self._companions.config.training, self._training.scheduler
        num_left = training.train_iters - loaded.iteration
        is_over = schedule.num_steps >= schedule.lr_decay_steps and num_left > 0
        if (
            is_over
            and training.lr_decay_style != "constant"
            and training.lr
            and not training.min_lr
        ):
            samples = schedule.num_steps + num_left * training.global_batch_size
            raise ValueError(
                f"the learning rate has decayed to 0 after {schedule.lr_decay_steps} samples, and "
                f"{schedule.num_steps} are behind: {num_left} steps would train nothing; pass "
                f"--lr-decay-samples {samples}, or --min-lr"
            )

    def save(self, progress: Progress, queue: DelayQueue | None, log: RunLog | None) -> None:
        """Saves a checkpoint to --save, unless this step is saved already. With --async-save it
        only starts saving, and `finish` completes it.
        """
        folder = self._output.save
        if folder is None or self._saved_iteration == progress.iteration:
            return
        self.finish(log)  # one save at a time: complete the last one first
        with written_or_refused(unfinished_path(checkpoint_path(folder, progress.iteration))):
            if self._locks.save is not None:
                self._locks.save.renew()
        self._save = CheckpointSave(
            folder,
            self._training,
            progress._replace(waiting=gather_delayed(queue), evaluated=self._evaluated),
            self._model_options,
            self._identity,
            partial(self._write_companions, log=log) if self._companions.are_saved() else None,
            in_background=self._output.async_save,
        )
        self._saved_iteration = progress.iteration
        if not self._output.async_save:
            self.finish(log)

    def _go_back(self, folder: str, loaded: Progress) -> None:
        """Corrects the tracker of the best checkpoint when a run goes back to an earlier step
        (--ckpt-step): it must not name a later one.
        """
        best = best_iteration(folder)
        if best is None or best <= loaded.iteration:
            return
        if (
            loaded.best_iteration is not None
            and checkpoint_path(folder, loaded.best_iteration).exists()
        ):
            track(folder, BEST, loaded.best_iteration)
        else:
            (Path(folder) / BEST).unlink()

    @property
    def is_written(self) -> bool:
        """True if a save is under way and this rank has written its files."""
        return self._save is not None and self._save.is_written

    def finish(self, log: RunLog | None) -> None:
        """Completes a save that is under way, then removes old checkpoints. Collective."""
        folder, save = self._output.save, self._save
        if folder is None or save is None:
            return
        self._save = None
        save.finish()
        if log is not None:
            # Write the tracker of the best first: the removal keeps the checkpoint that it names.
            if self._best_iteration == save.iteration:
                track(folder, BEST, save.iteration)
            self._remove_old(folder)
            log.say(f"saved step {save.iteration} to {folder}")

    def note_best(self, progress: Progress) -> None:
        """Makes the tracker of the best checkpoint name that of `progress`, as soon as it is
        complete.
        """
        self._best_iteration = progress.iteration
        if self._output.save is not None and self._save is None and dist.get_rank() == 0:
            track(self._output.save, BEST, progress.iteration)
            self._remove_old(self._output.save)  # the former best one may go now

    def _remove_old(self, folder: str) -> None:
        """Removes old checkpoints by --keep-checkpoints. Prints a note, once, for each that cannot
        be removed.
        """
        if self._output.keep_checkpoints is None:
            return
        for note in remove_old(folder, self._output.keep_checkpoints):
            if note not in self._notes:
                print(f"note: {note}", flush=True)
            self._notes.add(note)

    def write_hf(self, log: RunLog | None) -> None:
        """Writes the model to --save-hf, if given. Raises ValueError on a rank that cannot write:
        the others may be inside a collective, and cannot be told.
        """
        folder, save = self._output.save_hf, self._output.save
        if folder is None:
            return
        try:
            self._write_hf(folder, log)
        except OSError as error:
            way_out = "make room there"
            if save is not None:
                way_out += f", and start again with --load {save}: all steps are saved"
            raise ValueError(
                f"--save-hf {folder} could not be written: {disk_fault(error)} "
                f"({error.filename}); {way_out}"
            ) from None
        if log is not None:
            what = "adapter" if self._lora.writes_adapter else "model"
            log.say(
                f"wrote the {what} to {folder}, for "
                f"{'peft' if what == 'adapter' else 'transformers'} and others"
            )

    def _write_hf(self, folder: str, log: RunLog | None) -> None:
        whole_parameters(self._training)
        chunks = [unwrap_model(chunk) for chunk in self._training.model]
        weights, companions = self._companions.weights(), self._companions
        if self._lora.writes_adapter:
            adapter = AdapterWeights(weights, self._lora)

            def write_beside(target: Path) -> None:
                companions.write_beside_adapter(adapter, target)
                self._write_card(target, log)

            write_adapter(folder, chunks, adapter, write_beside)
        else:
            source = self._companions.source()
            base = huggingface_source(self._output.pretrained_checkpoint)
            if source is None and base is not None and log is not None:
                log.say(
                    f"{base} has no weights any more: tensors beside "
                    f"the language model's, if there were any, are not in {folder}"
                )
            write_folder(
                folder,
                chunks,
                weights,
                partial(self._write_companions, log=log),
                values_of=merged_values(chunks),
                source=source,
            )

    def _write_companions(self, folder: Path, log: RunLog | None) -> str:
        """Writes the HuggingFace files other than weights; returns the type of the weights."""
        self._write_card(folder, log)
        return self._companions.write(folder)

    def _write_card(self, folder: Path, log: RunLog | None) -> None:
        """Writes README.md, without results if the metrics cannot be read."""
        config = self._companions.config
        run_dir, last = (None, None) if log is None else (log.run_dir, log.iteration)
        try:
            write_card(folder, config, run_dir, last)
        except ValueError:
            write_card(folder, config, None)

    def close(self) -> None:
        """Releases the locks, so that another run may save there."""
        self._locks.release()
