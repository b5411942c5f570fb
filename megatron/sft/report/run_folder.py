"""mcore. The folders of a run: creates and checks them before any work, and writes to them on rank
0.
"""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from tempfile import TemporaryFile

import torch.distributed as dist

from megatron.packing.folder_gate import check_outputs, open_output, write_output
from megatron.packing.step.global_batch import GlobalBatch
from megatron.packing.user_files import disk_fault
from megatron.planner.lengths import OPTIONS_FILE
from megatron.planner.step_page import page
from megatron.planner.step_picture import picture_of
from megatron.planner.step_record import StepLayout, StepRecord
from megatron.sft.model.checkpoints.content import Progress
from megatron.sft.model.checkpoints.folder import check_load, latest_iteration
from megatron.sft.model.checkpoints.lock import OUTPUTS as CHECKPOINT_OUTPUTS
from megatron.sft.options.config import SFTConfig
from megatron.sft.options.output import OutputConfig
from megatron.sft.report.boards import WANDB_ID_FILE, open_boards
from megatron.sft.report.line_file import LineFile
from megatron.sft.report.metrics import StepMetrics
from megatron.sft.report.metrics_file import (
    METRICS_FILE,
    PACKS_FILE,
    json_line,
    truncate_after,
)
from megatron.sft.report.metrics_writer import MetricsWriter
from megatron.sft.report.report import PLOT_FILE

RUNS = "runs"
"""Parent of the folders of runs that have neither --run-dir nor --save."""
_OUTPUTS = (METRICS_FILE, PACKS_FILE, OPTIONS_FILE, PLOT_FILE, WANDB_ID_FILE, "schedule_*")
"""Patterns of the files that a run writes into the folder of its logs."""


def prepare_output(output: OutputConfig) -> None:
    """Creates the folders that a run writes to. Raises ValueError, before any work is done, if one
    cannot be written to, or has the checkpoints of another run.
    """
    folders = {
        "--save": output.save,
        "--run-dir": output.run_dir if output.run_dir or output.save else RUNS,
        "--tensorboard-dir": output.tensorboard_dir,
        "--wandb-save-dir": output.wandb_save_dir,
    }
    if output.save_hf is not None:
        target = Path(output.save_hf).resolve()
        for flag, path in folders.items():
            if path is not None and target == Path(path).resolve():
                raise ValueError(
                    f"--save-hf {output.save_hf} is the folder of {flag}, too; give each its own"
                )
        folders["--save-hf"] = str(target.parent)
    for flag, path in folders.items():
        if path is not None:
            _check_writable(flag, Path(path))
    for flag, path in {"--save": output.save, "--run-dir": output.run_dir}.items():
        if path is not None:
            check_outputs(path, (*CHECKPOINT_OUTPUTS, *_OUTPUTS), flag)
    _check_checkpoints(output)


def _check_writable(flag: str, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Try a write: permissions do not show full disks and quotas, and do not apply to root.
        with TemporaryFile(dir=folder) as file:
            file.write(b"tried")
    except OSError as error:
        raise ValueError(
            f"{folder} must be a folder that can be written to, but: {disk_fault(error)}; "
            f"pass another {flag}"
        ) from None


def _check_checkpoints(output: OutputConfig) -> None:
    if output.load is not None:
        check_load(output.load, output.save, output.ckpt_step)
    is_continued = (
        output.load is not None and Path(output.load).resolve() == Path(output.save or "").resolve()
    )
    if (
        output.save is not None
        and not is_continued
        and (found := latest_iteration(output.save)) is not None
    ):
        raise ValueError(
            f"--save {output.save} holds a run's checkpoints, up to step {found}; "
            f"continue it with --load {output.save}, or pass another --save"
        )


def record_of(batch: GlobalBatch, title: str, *, in_seconds: bool) -> StepRecord:
    """Returns the packs of a batch, with all that it takes to account for and draw them; on the
    rank that decided.

    in_seconds: whether the batch was scheduled by a measured cost, as --pack-cost names one.
    """
    settings, decision = batch.settings, batch.decision
    assert decision is not None, "only the rank that decided knows all packs"
    layout = StepLayout(
        num_ranks=decision.stats.num_ranks,
        capacity=settings.capacity,
        alignment=settings.alignment,
        cost=settings.cost.at_loss_share(
            decision.stats.num_loss_tokens / max(decision.stats.tokens, 1)
        ),
        microbatch_multiple=settings.microbatch_multiple,
        model=settings.model,
        options=settings.options,
        seconds_per_unit=1.0 if in_seconds else None,
    )
    return StepRecord(
        title=title,
        scheduler=settings.scheduler,
        layout=layout,
        packs=decision.pack_lengths(),
        sizes=decision.pack_sizes() or None,
    )


def dump_schedule(stem: Path, record: StepRecord) -> list[Path]:
    """Writes `stem`.json, which the planner reads, .html and, where matplotlib is, .png; returns
    their paths.
    """
    paths = [stem.with_name(f"{stem.name}.json"), stem.with_name(f"{stem.name}.html")]
    write_output(paths[0], record.to_json() + "\n")
    picture = picture_of(record)
    lead = "as it ran; megatron-sft plan compares it with other schedules"
    write_output(paths[1], page(record.title, lead, [picture], None, []))
    if importlib.util.find_spec("matplotlib") is not None:
        from megatron.planner.step_plot import figure_of

        paths.append(stem.with_name(f"{stem.name}.png"))
        with open_output(paths[-1], "wb") as file:
            figure_of([picture]).savefig(file, format="png")
    return paths


class RunLog:
    """Writes what rank 0 leaves of a run: metrics.jsonl, packs.jsonl, the options, and lines for
    the user.
    """

    def __init__(self, config: SFTConfig, run_dir: Path, progress: Progress) -> None:
        resumed = progress.iteration if progress.iteration else None
        if resumed is None:
            earlier = [name for name in (METRICS_FILE, PACKS_FILE) if (run_dir / name).exists()]
            for name in earlier:
                os.replace(run_dir / name, run_dir / f"{name}.previous")
            if earlier:
                self.say(
                    f"note: {run_dir} has the logs of an earlier run; they are now "
                    f"{', '.join(f'{name}.previous' for name in earlier)}, in place of older ones"
                )
        self.writer = MetricsWriter(
            run_dir,
            train_iters=config.training.train_iters,
            log_interval=config.output.log_interval,
            resume_iteration=resumed,
            boards=open_boards(config.output, run_dir, resumed, config.to_dict()),
        )
        truncate_after(run_dir / PACKS_FILE, -1 if resumed is None else resumed)
        self._packs = LineFile(run_dir / PACKS_FILE)
        self._log_interval = config.output.log_interval
        self._dumped_steps = config.output.dump_schedule
        self.run_dir = run_dir
        self.iteration = progress.iteration
        """The last step that is done."""
        self._in_seconds = config.packing.fitted_cost is not None
        options = run_dir / OPTIONS_FILE
        try:
            write_output(options, json.dumps(config.to_dict(), indent=2) + "\n")
        except OSError as error:
            raise ValueError(
                f"{options} cannot be written: {disk_fault(error)}; make room there, or pass "
                "another --run-dir"
            ) from None
        self.writer.event(
            "run" if resumed is None else "resumed",
            iteration=progress.iteration,
            seq_length=config.model.seq_length,
            global_batch_size=config.training.global_batch_size,
            world_size=dist.get_world_size(),
        )

    def step(self, metrics: StepMetrics, batch: GlobalBatch | None) -> None:
        """Writes one step and, of a packed `batch`, its packs at every `log_interval`-th and
        schedules asked for.
        """
        self.iteration = metrics.iteration
        self.writer.step(metrics)
        if batch is None or batch.decision is None:
            return
        if metrics.iteration % self._log_interval == 0:
            decision = batch.decision
            packs = {"capacity": batch.settings.capacity, "packs": decision.pack_lengths()}
            if sizes := decision.pack_sizes():
                packs["sizes"] = sizes
            self._packs.write(json_line("packs", iteration=metrics.iteration, **packs))
        if metrics.iteration in self._dumped_steps:
            title = f"step {metrics.iteration} of {self.run_dir}"
            record = record_of(batch, title, in_seconds=self._in_seconds)
            try:
                files = dump_schedule(self.run_dir / f"schedule_{metrics.iteration}", record)
                self.say(f"schedule of step {metrics.iteration}: {', '.join(map(str, files))}")
            except OSError as error:
                self.say(f"note: the schedule of step {metrics.iteration} is not written: {error}")

    def say(self, text: str) -> None:
        """Prints one line for the user."""
        print(text, flush=True)

    def close(self) -> None:
        """Closes the files."""
        self.writer.close()
        self._packs.close()
