"""pure. `megatron-sft plan lengths.csv --dp 64`: compares packing schedulers without a GPU.

The planner itself is `megatron.planner`, which does not import the trainer. This module gives it
what the trainer knows: how lengths are read from data, and the model and the parallel layout in a
HuggingFace folder or in the YAML file of a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from megatron.packing.flags import FlagError, flag_of
from megatron.planner.plan import plan
from megatron.planner.plan_options import ModelOptions, layout_of_run
from megatron.sft.arguments.pretrained import implied_options
from megatron.sft.commands.length_sources import count_forward_passes, lengths_from
from megatron.sft.environment import exit_with_message, outlive_output

_SHAPE = {field.name for field in fields(ModelOptions)}


def main(arguments: Sequence[str], program: str) -> None:
    """Prints the comparison and advice, and draws pictures; one line and status 2 for a user's
    mistake.
    """
    outlive_output()
    try:
        if "--auto-layout" in arguments:
            from megatron.sft.commands.plan_layout import plan_layout

            return plan_layout(arguments, program)
        plan(arguments, lengths_from, program, implied)
    except FlagError as failure:
        exit_with_message(program, _of_search(arguments, failure))
    except (ValueError, OSError) as failure:
        exit_with_message(program, failure)


def _of_search(arguments: Sequence[str], failure: FlagError) -> FlagError:
    """Returns the fault of an option that is unknown without --auto-layout alone."""
    from megatron.sft.commands.plan_layout import SEARCH_GROUPS

    flags = {flag_of(each.name) for group in SEARCH_GROUPS for each in fields(group)}
    for word in arguments:
        flag = word.split("=", 1)[0]
        if flag in flags and str(failure).startswith(f"unknown option {flag};"):
            return FlagError(f"{flag} needs --auto-layout; pass it, or drop {flag}")
    return failure


def implied(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns planner options that follow from a HuggingFace folder and a run's YAML file.

    given: the options that were given, the run's among them.
    """
    found: dict[str, Any] = {}
    if "loss" in given:
        found["forward_passes"] = count_forward_passes(given)
    folder = given.get("pretrained_checkpoint")
    if folder is not None:
        of_model = implied_options({"pretrained_checkpoint": folder})
        found = {name: value for name, value in of_model.items() if name in _SHAPE}
        found["tokenizer_model"] = of_model.get("tokenizer_model")
    found |= layout_of_run(given, given.get("num_layers", found.get("num_layers")))
    paths = given.get("data_path")
    if isinstance(paths, str) or (isinstance(paths, list) and len(paths) == 1):
        found["source"] = paths if isinstance(paths, str) else str(paths[0])
    return found
