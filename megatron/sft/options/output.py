"""pure. Options of the output of a run: checkpoints, logs, pictures."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

from megatron.packing.rules import Rule, at_least, check_rules


@dataclass(frozen=True, kw_only=True)
class OutputConfig:
    """Checkpoints and logs."""

    save: str | None = None
    """Folder to save checkpoints to."""
    load: str | None = None
    """Folder of checkpoints to continue from. If it is that of --save, it may be empty."""
    ckpt_step: int | None = field(default=None, metadata={"only_with": "load"})
    """Step of the checkpoint of --load to take (default: the newest)."""
    finetune: bool = field(default=False, metadata={"only_with": "load"})
    """Take only the weights of --load. Steps, data, optimizer and random states restart."""
    load_optim: bool = field(default=True, metadata={"only_with": "load"})
    """Load the optimizer's state of --load. With --no-load-optim it restarts, at the learning
    rate of its step.
    """
    load_rng: bool = field(default=True, metadata={"only_with": "load"})
    """Load the random states (dropout) of --load, if the parallel layout is the same. With
    --no-load-rng they restart.
    """
    pretrained_checkpoint: str | None = None
    """HuggingFace model folder to start from, with weights, architecture, tokenizer and chat
    template (options take precedence over the last two). Or a folder of Megatron-LM's checkpoints
    (torch_dist), whose model the options describe. If --load has a checkpoint, its weights are
    used.
    """
    save_hf: str | None = None
    """Folder to write the trained model to, in HuggingFace format, after the last step."""
    save_interval: int | None = field(default=None, metadata={"only_with": "save"})
    """Steps between checkpoints (default: only at the end)."""
    async_save: bool = field(default=False, metadata={"only_with": "save"})
    """Write checkpoints in the background, from a copy in host memory. A later step completes
    them.
    """
    keep_checkpoints: int | None = field(default=None, metadata={"only_with": "save"})
    """Newest checkpoints to keep (default: all)."""
    keep_best: bool = field(default=False, metadata={"only_with": ("save", "eval_iters>=1")})
    """Save whenever the validation loss is the lowest so far, and keep that checkpoint.
    best_checkpointed_iteration.txt beside the checkpoints names it.
    """
    dry_run: bool = False
    """Check options, data and all output folders, print what the run would do, and exit."""
    doctor: bool = field(default=False, metadata={"only_with": "sequence_packing"})
    """Before the first step, examine a small model of the run in its own layout: whether packed
    sequences see one another, and what a step is the sum of. Ends the run if a fault is found.
    """
    log_interval: int = 1
    """Steps between log lines."""
    run_dir: str | None = None
    """Folder for metrics.jsonl and packs.jsonl (default: --save, else runs/TIME)."""
    tensorboard_dir: str | None = None
    """Folder for TensorBoard."""
    wandb_project: str | None = None
    """Weights & Biases project. A continued run continues there."""
    wandb_exp_name: str | None = field(default=None, metadata={"only_with": "wandb_project"})
    """Name of the run in Weights & Biases (default: that of the run's folder)."""
    wandb_entity: str | None = field(default=None, metadata={"only_with": "wandb_project"})
    """User or team that owns the project (default: the one that is logged in)."""
    wandb_save_dir: str | None = field(default=None, metadata={"only_with": "wandb_project"})
    """Folder for the local files of wandb (default: the run's)."""
    dump_schedule: tuple[int, ...] = field(
        default=(), metadata={"only_with": "sequence_packing", "repeatable": True}
    )
    """Steps whose packs are written to schedule_STEP.json in the run's folder, and drawn beside
    it.
    """

    rules: ClassVar[tuple[Rule, ...]] = (
        *at_least(1, "log_interval", "save_interval", "keep_checkpoints", "ckpt_step"),
        Rule(
            when=lambda options: (
                options.finetune
                and options.save is not None
                and Path(options.load or "").resolve() == Path(options.save).resolve()
            ),
            why="{finetune.flag} would begin again at each start of the run",
            way_out="pass another {save.flag} than {load.flag}",
        ),
        Rule(
            when=lambda options: (
                min(options.dump_schedule, default=1) < 1 and {"step": min(options.dump_schedule)}
            ),
            why="{dump_schedule.flag} must be steps, the first of which is 1, but is {step}",
        ),
    )

    def __post_init__(self) -> None:
        check_rules(self.rules, options=self)
        self._check_boards()

    def saves_after(self, iteration: int) -> bool:
        """Returns whether --save-interval saves after a step. The last step is always saved."""
        return self.save_interval is not None and iteration % self.save_interval == 0

    def num_saves(self, done: int, last: int) -> int:
        """Returns the number of checkpoints after step `done` and up to the last step."""
        interval = self.save_interval or last
        return math.ceil(last / interval) - done // interval if done < last else 0

    def _check_boards(self) -> None:
        """Raises ValueError for packages that are missing. No rule: options do not tell."""
        if self.tensorboard_dir is not None and find_spec("tensorboard") is None:
            raise ValueError(
                "--tensorboard-dir needs the package tensorboard; do pip install tensorboard"
            )
        if self.wandb_project is not None and find_spec("wandb") is None:
            raise ValueError("--wandb-project needs the package wandb; do pip install wandb")
