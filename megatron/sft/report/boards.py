"""pure. Boards that draw a running run, behind one interface: TensorBoard and Weights & Biases."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from megatron.packing.folder_gate import write_output
from megatron.sft.options.output import OutputConfig

WANDB_ID_FILE = "wandb_run_id"
"""File with the id of the run at Weights & Biases, by which a resumed run continues it."""


class Board(Protocol):
    """Draws numbers over steps."""

    def add(self, values: Mapping[str, float], iteration: int) -> None:
        """Adds a point to each curve."""

    def close(self) -> None:
        """Sends all remaining points."""


def open_boards(
    output: OutputConfig, run_dir: Path, resume_iteration: int | None, options: Mapping[str, Any]
) -> list[Board]:
    """Returns the boards of --tensorboard-dir and --wandb-project. Raises ValueError if one cannot
    be opened.

    Args:
        resume_iteration: number of steps that a continued run has done; None for a new run.
        options: all options of the run, which boards show beside its curves.
    """
    boards: list[Board] = []
    if output.tensorboard_dir is not None:
        boards.append(TensorBoard(output.tensorboard_dir, first_step=(resume_iteration or 0) + 1))
    if output.wandb_project is not None:
        boards.append(WeightsAndBiases(output, run_dir, resume_iteration is not None, options))
    return boards


class TensorBoard:
    """Writes to TensorBoard. Steps from `first_step` on that a killed run has left in the folder
    are hidden.
    """

    def __init__(self, folder: str | Path, first_step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ValueError(
                "--tensorboard-dir needs the package tensorboard; do pip install tensorboard"
            ) from error
        self._writer = SummaryWriter(str(folder), purge_step=first_step)

    def add(self, values: Mapping[str, float], iteration: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, iteration)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """Writes to Weights & Biases. A run that is stopped and resumed is one run there, and steps
    that it has already are not sent again.

    Environment variables of wandb (WANDB_MODE=offline, WANDB_API_KEY) have their usual effect.
    """

    def __init__(
        self, output: OutputConfig, run_dir: Path, is_resumed: bool, options: Mapping[str, Any]
    ) -> None:
        import wandb

        id_file = run_dir / WANDB_ID_FILE
        known = (
            id_file.read_text(encoding="utf-8").strip()
            if is_resumed and id_file.is_file()
            else None
        )
        try:
            self._run = wandb.init(
                project=output.wandb_project,
                entity=output.wandb_entity,
                name=output.wandb_exp_name or run_dir.name,
                dir=output.wandb_save_dir or str(run_dir),
                id=known,
                resume="allow",
                config=dict(options),
            )
        except Exception as failure:  # of many kinds: no key, no network, no such entity
            raise ValueError(
                f"--wandb-project {output.wandb_project}: {failure}; run wandb login, or set "
                "WANDB_MODE=offline"
            ) from failure
        write_output(id_file, self._run.id)

    def add(self, values: Mapping[str, float], iteration: int) -> None:
        self._run.log(dict(values), step=iteration)

    def close(self) -> None:
        # wandb shows a run with another exit code as failed.
        self._run.finish(exit_code=int(sys.exc_info()[0] is not None))
