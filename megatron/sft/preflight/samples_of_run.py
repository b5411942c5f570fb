"""mcore. Takes the options that decide how a conversation becomes samples (--train-turns,
--template-date, --chat-template-kwargs) from the checkpoint, unless the user gives them. Notes on
samples for the user.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from megatron.sft.base_exceptions import is_failure
from megatron.sft.model.checkpoints.content import read_common
from megatron.sft.model.checkpoints.folder import checkpoint_path, latest_iteration
from megatron.sft.options.chat_template import to_json
from megatron.sft.options.config import SFTConfig
from megatron.sft.options.data import TrainTurns


def with_samples_of_checkpoint(config: SFTConfig) -> SFTConfig:
    """Returns the options of a run, with the three options above from the checkpoint of --load if
    they are not given.

    A checkpoint does not record defaults: without a record it was trained with all turns in one
    rendering, no date and no variables.
    """
    data = config.data
    given = (data.train_turns, data.template_date, data.chat_template_kwargs)
    if data.mock_data or None not in given:
        return config
    saved = _saved(config)
    if saved is None:
        return config
    return replace(
        config,
        data=replace(
            data,
            train_turns=data.train_turns or saved.get("train_turns", "all"),
            template_date=data.template_date or saved.get("template_date"),
            chat_template_kwargs=data.chat_template_kwargs or saved.get("chat_template_kwargs"),
        ),
    )


def _saved(config: SFTConfig) -> dict[str, Any] | None:
    """Returns the record of the data in the checkpoint of --load; None without a checkpoint."""
    folder = config.output.load
    if folder is None or config.output.finetune:
        return None
    iteration = config.output.ckpt_step or latest_iteration(folder)
    if iteration is None:
        return None
    try:
        found: dict[str, Any] = read_common(checkpoint_path(folder, iteration)).get("data", {})
    except BaseException as error:  # a damaged file, by any error: loading it reports the fault
        if not is_failure(error):
            raise
        return None
    return found


def notes_on_samples(given: SFTConfig, resolved: SFTConfig, turns: TrainTurns) -> Iterator[str]:
    """Yields lines to print about the three options, with where they come from.

    Args:
        given: the options as the user gave them.
        resolved: the options of the run, those of the checkpoint among them.
        turns: the turns that are trained.
    """
    if turns != "all" and not resolved.preference.is_on:
        what = {
            "served": "each of the assistant's turns behind the prompt that it is generated from",
            "last": "the assistant's last turn of each conversation",
        }[turns]
        why = "" if resolved.data.train_turns else ", as the chat template renders turns again"
        yield f"training {what} (--train-turns {turns}{why})"
    if resolved.data.today is not None:
        whose = "" if given.data.template_date else ", as the checkpoint has it"
        yield f"the chat template's date is {resolved.data.today} (--template-date{whose})"
    variables = resolved.data.template_choice.variables
    if variables:
        whose = "" if given.data.chat_template_kwargs else ", as the checkpoint has it"
        yield (
            f"the chat template's variables are {to_json(variables)} (--chat-template-kwargs"
            f"{whose}); serve the model with the same"
        )
