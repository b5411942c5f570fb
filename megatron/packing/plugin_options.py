"""mcore. Options of the packing plug-in: on a script's command line, and as megatron-core's config
and `PackingOptions` hold them.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING, Any, get_args

from megatron.packing.batch.layout import OverLengthPolicy
from megatron.packing.flags import add_fields
from megatron.packing.scheduling.fitted_cost import read_fitted_cost
from megatron.packing.scheduling.options import SchedulerOptions
from megatron.packing.scheduling.registry import SCHEDULERS
from megatron.packing.step.delay import DelayQueue

if TYPE_CHECKING:
    from megatron.packing.step.payloads import PayloadStore
    from megatron.packing.step.settings import PackingOptions

_OPTIONS = (
    "over_length_policy",
    "pack_cost",
    "prefetch_global_batches",
    "logits_of_masked_tokens",
)
"""Arguments that become `PackingOptions`, beside those of `SchedulerOptions`."""


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the options of packing that `parser` does not have yet."""
    section = parser.add_argument_group("sequence packing")
    options: dict[str, dict[str, Any]] = {
        "--sequence-packing": {
            "action": "store_true",
            "help": "pack sequences into microbatches without padding between them (THD)",
        },
        "--sequence-packing-scheduler": {
            "metavar": "NAME",
            "help": "scheduler that assigns sequences to ranks and microbatches: "
            f"{', '.join(SCHEDULERS)}, or a function of yours as module:function "
            "(default: default, the least modelled step time)",
        },
        "--max-seqlen-per-dp-cp-rank": {
            "type": int,
            "metavar": "N",
            "help": "tokens of a pack that one rank holds, at most",
        },
        "--over-length-policy": {
            "choices": get_args(OverLengthPolicy),
            "default": "error",
            "help": "treatment of a sequence that no pack can hold (default: error)",
        },
        "--pack-cost": {
            "metavar": "FILE",
            "help": "what megatron-sft calibrate wrote: schedule by measured times "
            "(default: by FLOPs)",
        },
        "--prefetch-global-batches": {
            "type": int,
            "default": 0,
            "metavar": "K",
            "help": "global batches that a thread prepares ahead; the script's iterator then "
            "stands K batches ahead of the step (default: 0)",
        },
        "--logits-of-masked-tokens": {
            "action": "store_true",
            "help": "compute the output layer and the loss of masked tokens as well (to compare; "
            "losses are equal)",
        },
    }
    for flag, settings in options.items():
        if flag not in parser._option_string_actions:
            section.add_argument(flag, **settings)
    add_fields(section, SchedulerOptions, skipped=parser._option_string_actions)
    return parser


def asks_for_packing(arguments: argparse.Namespace) -> bool:
    """Returns whether --sequence-packing is given; ValueError for an option that needs it."""
    asks = bool(getattr(arguments, "sequence_packing", False))
    for name in ("sequence_packing_scheduler", "pack_cost"):
        if not asks and getattr(arguments, name, None) is not None:
            raise ValueError(f"--{name.replace('_', '-')} needs --sequence-packing")
    return asks


def configure(
    config: Any,
    arguments: argparse.Namespace | None,
    megatron_lm_calls: bool,
    payloads: PayloadStore | None,
) -> None:
    """Writes the options to Megatron-LM's fields of `config`, the others as `PackingOptions`."""
    from megatron.packing.step.settings import PackingOptions

    for name in ("sequence_packing_scheduler", "max_seqlen_per_dp_cp_rank"):
        value = getattr(arguments, name, None)
        if value is not None:
            setattr(config, name, value)
    if getattr(config, "sequence_packing_scheduler", None) is None:
        config.sequence_packing_scheduler = "default"
    options = _options(PackingOptions.of(config), config, arguments)
    is_megatron_lm = megatron_lm_calls or options.megatron_lm_calls
    config.sequence_packing_options = replace(
        options,
        megatron_lm_calls=is_megatron_lm,
        payloads=options.payloads if payloads is None else payloads,
    )


def _options(options: PackingOptions, config: Any, arguments: object) -> PackingOptions:
    """Returns the options with those of the command line."""
    from megatron.packing.step.settings import measured_cost

    given = {name: getattr(arguments, name, None) for name in _OPTIONS}
    changes: dict[str, Any] = {}
    for name in ("over_length_policy", "prefetch_global_batches", "logits_of_masked_tokens"):
        if given[name]:
            changes[name] = given[name]
    if changes.get("prefetch_global_batches", 0) < 0:
        raise ValueError(
            "--prefetch-global-batches must be at least 0, but is "
            f"{changes['prefetch_global_batches']}"
        )
    if given["pack_cost"] is not None:
        changes["cost"] = measured_cost(read_fitted_cost(given["pack_cost"]), config)
    scheduling = options.scheduling.updated(arguments)
    if scheduling.outlier_delay_steps and options.delay_queue is None:
        changes["delay_queue"] = DelayQueue(scheduling.outlier_delay_steps)
    return replace(options, scheduling=scheduling, **changes)
