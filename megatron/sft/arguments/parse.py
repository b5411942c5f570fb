"""pure. Turns the command line into the options of a run.

A value comes from the first of these that has it: the command line, the YAML file of --config, the
model's folder, a default. Options that contradict the model's folder are errors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron.packing.flag_help import Command
from megatron.packing.flags import FlagError, parse_flags
from megatron.sft.arguments.defaults import choice_notes, chosen_options, preference_options
from megatron.sft.arguments.megatron_flags import without_megatron_flags
from megatron.sft.arguments.other_trainers import answer_to_loss
from megatron.sft.arguments.pretrained import check_training, implied_options
from megatron.sft.arguments.value_notes import loss_notes, value_notes
from megatron.sft.options.config import GROUPS, SFTConfig
from megatron.sft.options.hub_names import check_hub_names

COMMON = {
    "Start from": ("config", "pretrained_checkpoint", "load", "lora", "lora_rank", "lora_alpha"),
    "Data": (
        "data_path",
        "valid_data_path",
        "split",
        "seq_length",
        "over_length_policy",
        "sequence_packing",
        "mock_data",
    ),
    "Training": (
        "loss",
        "beta",
        "train_epochs",
        "train_iters",
        "global_batch_size",
        "lr",
        "min_lr",
        "lr_decay_style",
        "lr_warmup_fraction",
        "bf16",
        "recompute_granularity",
        "seed",
    ),
    "Layout": (
        "tensor_model_parallel_size",
        "sequence_parallel",
        "pipeline_model_parallel_size",
        "context_parallel_size",
        "expert_model_parallel_size",
        "use_distributed_optimizer",
    ),
    "Output": (
        "save",
        "save_interval",
        "save_hf",
        "eval_interval",
        "eval_iters",
        "run_dir",
        "tensorboard_dir",
        "wandb_project",
        "dry_run",
    ),
}
"""Options that --help shows."""


def _implied(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns values for options that are not given, from those that are."""
    implied = implied_options(given) | chosen_options(given)
    check_training(given)
    if given.get("sequence_packing_scheduler") is not None:
        implied["sequence_packing"] = True
    implied |= preference_options(given)
    samples = given.get("train_samples")
    batch = given.get("global_batch_size", implied.get("global_batch_size", 0))
    if samples is not None and batch > 0:
        implied["train_iters"] = samples // batch
    return implied


def parse_config(
    arguments: Sequence[str], world_size: int, command: Command | None = None
) -> SFTConfig:
    """Returns the options of a run. Raises FlagError if they are wrong."""
    return parse_with_notes(arguments, world_size, command or Command())[0]


def parse_run_options(
    groups: Sequence[type[Any]],
    arguments: Sequence[str],
    command: Command,
    imply: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    notes: list[str],
) -> list[Any]:
    """Returns groups of options as `parse_flags` does, and adds its notes to `notes`. Megatron-LM's
    flags are accepted, and the error about missing options mentions --pretrained-checkpoint.
    """
    ours = without_megatron_flags(arguments)

    def imply_from_paths(given: Mapping[str, Any]) -> Mapping[str, Any]:
        check_hub_names(given)
        return imply(given)

    try:
        return parse_flags(groups, ours, command, imply=imply_from_paths, notes=notes)
    except FlagError as failure:
        if (answer := answer_to_loss(str(failure))) is not None:
            raise FlagError(answer) from None
        if "arguments are required" not in str(failure):
            raise
        hint = (
            "or pass --pretrained-checkpoint FOLDER, a released model, which decides most of them"
        )
        raise FlagError(f"{failure}; {hint}") from None


def parse_with_notes(
    arguments: Sequence[str], world_size: int, command: Command
) -> tuple[SFTConfig, list[str]]:
    """Returns the options of a run, and lines for the user about defaults that were chosen."""
    notes: list[str] = []

    def imply(given: Mapping[str, Any]) -> dict[str, Any]:
        notes.extend(choice_notes(given))
        return _implied(given)

    config = SFTConfig.of(parse_run_options(GROUPS, arguments, command, imply, notes))
    # A dry run needs no launcher: one process checks the parallel layout of many.
    alone = config.output.dry_run and world_size == 1
    config.check(config.parallel.least_world_size if alone else world_size)
    return config, [*notes, *loss_notes(config.preference), *value_notes(config)]
