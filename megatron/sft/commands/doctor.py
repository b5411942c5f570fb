"""pure. `megatron-sft doctor`: whether packed sequences see one another in a trainer."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.packing.flag_help import Command
from megatron.packing.flags import FlagError
from megatron.sft.arguments.defaults import chosen_options
from megatron.sft.arguments.parse import COMMON, parse_run_options
from megatron.sft.arguments.pretrained import implied_options
from megatron.sft.environment import (
    exit_with_message,
    outlive_output,
    quick_imports,
    silence_warnings,
    world_from_environment,
)
from megatron.sft.options.config import GROUPS, SFTConfig

_OTHERS = ("--model", "--subject", "--script")


def main(arguments: Sequence[str], program: str) -> None:
    """Examines a trainer, and prints the report; status 1 if a fault is found, 2 for a mistake."""
    outlive_output()
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments  # not a script's
    names = {argument.partition("=")[0] for argument in own}
    is_of_run = "--config" in names or "--pretrained-checkpoint" in names
    try:
        if is_of_run and not names & {*_OTHERS}:
            status = _examine_run(arguments, program)
        else:
            from megatron.packing.doctor.command import run_doctor  # imports torch

            status = run_doctor(arguments, program)
    except (FlagError, ValueError, OSError) as failure:
        exit_with_message(program, failure)
    sys.exit(status)


def _examine_run(arguments: Sequence[str], program: str) -> int:
    """Examines a small model of a run's own: on the CPU, or in its layout under a launcher."""
    rank, world_size = world_from_environment()
    if world_size == 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch: others may use the GPUs
    silence_warnings(rank)
    with quick_imports():
        from megatron.packing.doctor.command import ReportOptions, report_once
        from megatron.packing.doctor.examine import examine
        from megatron.sft.distributed import process_groups
        from megatron.sft.doctor.shrink import small_run
        from megatron.sft.doctor.subject import subject_of_run
    command = Command(
        program=program,
        about="Examine a small model of a run, packed and trained as the run does it.",
        usage="--config run.yaml [--json FILE] [--html FILE] [options of training]",
        common={"Report": ("json", "html"), **{title: COMMON[title] for title in COMMON}},
    )
    *groups, options = parse_run_options(
        (*GROUPS, ReportOptions), arguments, command, _without_data, []
    )
    small = small_run(SFTConfig.of(groups), world_size=world_size)
    small.check(world_size)
    with process_groups(small) as device:
        diagnosis = examine(subject_of_run(small, device))
        return report_once(diagnosis, options, rank == 0)


def _without_data(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns values for options that no examination depends on."""
    ours: dict[str, Any] = {"global_batch_size": 8, "lr": 1e-5, "train_iters": 1}
    if {"train_epochs", "train_samples"} & given.keys():
        del ours["train_iters"]
    if not any(given.get(name) for name in ("data_path", "valid_data_path", "mock_data")):
        ours["mock_data"] = True
    chosen = {name: v for name, v in chosen_options(given).items() if name == "seq_length"}
    return ours | chosen | implied_options(given)
