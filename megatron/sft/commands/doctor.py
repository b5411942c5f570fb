"""pure. `megatron-sft doctor`: whether packed sequences see one another in a trainer."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megatron.packing.flags import FlagError
from megatron.sft.environment import exit_with_message, outlive_output


def main(arguments: Sequence[str], program: str) -> None:
    """Examines a trainer, and prints the report; status 1 if a fault is found, 2 for a mistake."""
    outlive_output()
    from megatron.packing.doctor.command import run_doctor  # imports torch

    try:
        status = run_doctor(arguments, program)
    except (FlagError, ValueError, OSError) as failure:
        exit_with_message(program, failure)
    sys.exit(status)
