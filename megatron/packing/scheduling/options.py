"""pure. Options of scheduling that a user gives, carried whole from the flags to a scheduler.

A field of `SchedulerOptions` is a flag of the trainer and of scripts with the plug-in, and the
docstring under it is the help. What passes the options on names none of them:

    flags    ->    `PackingOptions.scheduling`    ->    `PackingSettings.options`
             ->    `ScheduleRequest.options`, and `StepLayout.options` in the record of a step

Another option is one more field here, and the line of code that reads it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

from megatron.packing.quoting import shown
from megatron.packing.rules import Rule, check_rules


def _is_no_number_of_steps(options: Any) -> dict[str, str]:
    steps = options.outlier_delay_steps
    # A file may hold anything.
    return {"value": shown(steps)} if type(steps) is not int or steps < 0 else {}


@dataclass(frozen=True, kw_only=True)
class SchedulerOptions:
    """Scheduling of packs."""

    outlier_delay_steps: int = field(default=0, metadata={"only_with": "sequence_packing"})
    """Hold an unusually long sequence for up to N steps, to schedule several together (default:
    0, never).
    """

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            when=_is_no_number_of_steps,
            why="{outlier_delay_steps.flag} must be at least 0, a whole number, but is {value}",
        ),
    )

    def __post_init__(self) -> None:
        check_rules(self.rules, options=self)

    @property
    def non_defaults(self) -> tuple[str, ...]:
        """Names of the options that are not at their default."""
        return tuple(
            field.name for field in fields(self) if getattr(self, field.name) != field.default
        )

    def updated(self, arguments: object) -> SchedulerOptions:
        """Returns these options, with each one that `arguments`, a namespace of argparse, sets to
        something other than its default.
        """
        values: dict[str, Any] = {
            field.name: getattr(arguments, field.name, None) for field in fields(self)
        }
        # Checks the values, also those at their defaults.
        parsed = SchedulerOptions(**{name: v for name, v in values.items() if v is not None})
        return replace(self, **{name: values[name] for name in parsed.non_defaults})
