"""pure. A training run: options -> data sets -> process groups -> trainer -> report.

`main` reads the command line, `run` trains. The order inside `run` is by cost: options, folders and
data are checked first, on every rank, before process groups and a model exist.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.packing.flag_help import Command
from megatron.packing.quoting import shortened
from megatron.sft.arguments.megatron_flags import megatron_flag_notes
from megatron.sft.arguments.other_trainers import answers_to
from megatron.sft.arguments.parse import COMMON, parse_with_notes
from megatron.sft.base_exceptions import is_failure
from megatron.sft.commands import table
from megatron.sft.environment import (
    check_temporary_folder,
    end_with_launcher,
    fail,
    let_memory_grow,
    outlive_output,
    quick_imports,
    silence_warnings,
    world_from_environment,
)
from megatron.sft.launch import Launch, is_launched, launch, taken_apart
from megatron.sft.options.config import SFTConfig

if TYPE_CHECKING:
    from megatron.sft.training.train import Trainer


def main(arguments: Sequence[str], program: str, command: Command | None = None) -> None:
    """Runs `megatron-sft train`. `program` is the command as the user typed it, for messages;
    `command` what another command says of itself in its help.
    """
    faulthandler.register(signal.SIGUSR1)  # kill -USR1 shows where a rank stands
    end_with_launcher()
    outlive_output()
    command = command or Command(
        program=program,
        about="Fine-tune a GPT on packed sequences with Megatron-Core.",
        usage="[--nproc-per-node 8] --pretrained-checkpoint FOLDER --data-path FILE [options]",
        common=COMMON,
        answers=answers_to,
        footer=f"Subcommands (--help of each says more):\n{table()}",
    )
    rank = 0
    try:
        rank, world_size = world_from_environment()
        check_temporary_folder()
        found = taken_apart(arguments) if not is_launched() else Launch([], list(arguments))
        world_size = found.world_size or world_size
        config, notes = parse_with_notes(found.training, world_size, command)
    except ValueError as failure:  # a FlagError, or the environment's
        fail(str(failure), rank, getattr(failure, "details", ()))
    if found.torchrun:
        launch(found, program)
    for line in [*megatron_flag_notes(arguments), *notes] if rank == 0 else ():
        print(line)
    silence_warnings(rank)
    run(config, rank, world_size)


def run(config: SFTConfig, rank: int, world_size: int) -> None:
    """Runs one rank of a training run."""
    if config.output.dry_run:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch: others may use the GPUs
    let_memory_grow()
    # Imports that take seconds come after the command line is checked, so that a wrong flag is
    # answered at once.
    with quick_imports():
        import torch

        from megatron.packing.step.decide import GlobalBatchError
        from megatron.sft.data.datasets import build_datasets
        from megatron.sft.data.trained_tokens import check_trained
        from megatron.sft.distributed import meet, process_groups
        from megatron.sft.model.huggingface.pretrained import open_pretrained
        from megatron.sft.peers import abort, end_unless_all_answer, heartbeats
        from megatron.sft.preflight.dry_run import dry_run
        from megatron.sft.preflight.fit_to_memory import fit_to_memory
        from megatron.sft.preflight.notes_on_data import notes_on_data
        from megatron.sft.preflight.read_files import fingerprints
        from megatron.sft.preflight.samples_of_run import (
            notes_on_samples,
            with_samples_of_checkpoint,
        )
        from megatron.sft.report.run_folder import RUNS, prepare_output
        from megatron.sft.training.preference.scoring import (
            check_files_of_score,
            check_reference,
        )
        from megatron.sft.training.stop import StopSignals
        from megatron.sft.training.train import Trainer

    chosen = config.output.run_dir or config.output.save
    run_dir = Path(chosen or f"{RUNS}/{time.strftime('%Y%m%d-%H%M%S')}")  # only rank 0 writes to it
    minutes = config.parallel.distributed_timeout_minutes
    with ExitStack() as end:  # keeps the signal handlers until the report is printed
        try:
            store = meet(rank, world_size, timedelta(minutes=minutes)) if world_size > 1 else None
            # First of all: a rank whose data are refused ends the others with its message.
            end.enter_context(heartbeats(rank, world_size, store, minutes))
            prepare_output(config.output)
            if rank == 0:
                check_files_of_score(config.preference)
            given, config = config, with_samples_of_checkpoint(config)
            datasets = build_datasets(config)
            notes = notes_on_samples(given, config, datasets.train_turns)
            tokens = filter(None, [datasets.tokenizer_note()])
            for line in [*tokens, *notes, *notes_on_data(config, datasets)] if rank == 0 else ():
                print(shortened(line), flush=True)
            check_trained(datasets, is_evaluated=config.training.eval_iters > 0)
            config = config.for_records(len(datasets.train))
            size = max(world_size, config.parallel.least_world_size)  # alone, for all ranks
            config = fit_to_memory(config, datasets.vocab_size, rank, size, store)
            pad = None if datasets.tokenizer is None else datasets.tokenizer.pad
            pretrained = open_pretrained(config, datasets.vocab_size, pad)
            if config.output.dry_run:
                dry_run(config, datasets, pretrained, store)
                return
            scores = check_reference(config, datasets, pretrained)
            read = fingerprints(config, datasets, pretrained)
            with process_groups(config, read, store) as device:
                if config.output.doctor:
                    from megatron.sft.doctor.before_run import examine_run

                    examine_run(config, device)
                trainer = Trainer(config, datasets, device, run_dir, pretrained)
                if config.preference.only_scores:
                    trainer.score(scores)
                    return

                def on_sigterm(agreed: threading.Event) -> None:
                    trainer.limit_data_wait()
                    end_unless_all_answer(agreed)

                trainer.train(end.enter_context(StopSignals(on_sigterm)))
        except BaseException as raised:
            if not is_failure(raised):
                raise
            failure = raised
            if isinstance(raised, torch.OutOfMemoryError) and torch.distributed.is_initialized():
                from megatron.sft.out_of_memory import explained

                failure = explained(raised, config, datasets.vocab_size, world_size)
            # With a single process, an unexpected error keeps its traceback.
            if world_size == 1 and not isinstance(failure, (ValueError, OSError, GlobalBatchError)):
                raise
            abort(failure)
        if rank == 0:
            _say_end(trainer, run_dir, config.training.train_iters)


def _say_end(trainer: Trainer, run_dir: Path, train_iters: int) -> None:
    """Prints the report of a run that has ended, or a line if there was nothing to do."""
    from megatron.sft.report.report import report

    if not trainer.num_steps_done:
        done = trainer.progress.iteration
        early = f" of {train_iters}, and stopped early" if done < train_iters else ""
        print(f"nothing to do: {done} steps are done{early}")
        return
    try:
        report(run_dir, trainer.progress.iteration)
    except (OSError, ValueError) as failure:  # somebody removed its files; training has succeeded
        print(f"no report: {failure}")
