"""pure. `megatron-sft calibrate`: the time that packs of a model take on this device, as a fitted
cost for --pack-cost.

The measurement is `megatron.planner.calibrate`. The model that a HuggingFace folder describes is
the trainer's knowledge.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from megatron.packing.flags import FlagError
from megatron.packing.model.options import Architecture
from megatron.sft.arguments.defaults import chosen_options
from megatron.sft.arguments.pretrained import implied_options
from megatron.sft.environment import exit_with_message, outlive_output, silence_warnings

_MODEL = {field.name for field in fields(Architecture)} | {"vocab_size"}


def main(arguments: Sequence[str], program: str) -> None:
    """Measures packs of a model on the device at hand and fits the pack cost to them."""
    outlive_output()
    silence_warnings(0)
    # Imported here, since it takes seconds: megatron-core.
    from megatron.planner.calibrate import calibrate_here, parse_arguments

    try:
        calibrate_here(parse_arguments(arguments, program, implied))
    except (FlagError, ValueError, OSError) as failure:
        exit_with_message(program, failure)


def implied(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the model's options by a HuggingFace folder, and a --seq-length that it knows."""
    folder = given.get("pretrained_checkpoint")
    if folder is None:
        return {}
    of_model = implied_options({"pretrained_checkpoint": folder})
    found = {name: value for name, value in of_model.items() if name in _MODEL}
    return found | {
        name: value for name, value in chosen_options(given).items() if name == "seq_length"
    }
