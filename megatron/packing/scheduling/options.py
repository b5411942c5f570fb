"""pure. Options of scheduling that a user gives, carried whole from the flags to a scheduler.

A field of `SchedulerOptions` is a flag of the trainer and of scripts with the plug-in, and the
docstring under it is the help. What passes the options on names none of them:

    flags    ->    `PackingOptions.scheduling`    ->    `PackingSettings.options`
             ->    `ScheduleRequest.options`, and `StepLayout.options` in the record of a step

So another option is a field here, and the line that reads it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any


@dataclass(frozen=True, kw_only=True)
class SchedulerOptions:
    """Scheduling of packs."""

    outlier_delay_steps: int = 0
    """Hold an unusually long sequence for up to N steps, to schedule several together (default:
    0, never).
    """

    def __post_init__(self) -> None:
        if self.outlier_delay_steps < 0:
            raise ValueError(
                f"--outlier-delay-steps must be at least 0, but is {self.outlier_delay_steps}"
            )

    @property
    def given(self) -> tuple[str, ...]:
        """Names of the options that are not at their default."""
        return tuple(
            field.name for field in fields(self) if getattr(self, field.name) != field.default
        )

    def updated(self, arguments: object) -> SchedulerOptions:
        """Returns these options with those that `arguments`, as argparse returns them, have besides
        at other values than their defaults.
        """
        found: dict[str, Any] = {
            field.name: getattr(arguments, field.name, None) for field in fields(self)
        }
        said = SchedulerOptions(**{name: each for name, each in found.items() if each is not None})
        return replace(self, **{name: found[name] for name in said.given})
