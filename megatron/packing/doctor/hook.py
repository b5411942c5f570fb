"""pure. The hook of a training script: `megatron-sft doctor --script train.py` examines there.

    from megatron.packing.doctor.hook import examine_here

    examine_here(lambda: Subject(...))  # in front of the loop; does nothing in a plain run

A script that runs by itself passes the hook at once, and the function is not called.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.packing.doctor.report import Diagnosis
    from megatron.packing.doctor.subject import Subject

ENVIRONMENT = "MEGATRON_SFT_DOCTOR"
"""Set while the doctor runs a script."""


class Examined(BaseException):
    """Ends a script behind its hook. No Exception, so that handlers of errors let it pass."""

    def __init__(self, diagnosis: Diagnosis, is_first: bool) -> None:
        super().__init__(diagnosis.verdict())
        self.diagnosis = diagnosis
        self.is_first = is_first


def is_examining() -> bool:
    """Returns whether the doctor runs this script."""
    return bool(os.environ.get(ENVIRONMENT))


def examine_here(make_subject: Callable[[], Subject]) -> None:
    """Examines what a function returns, and ends the script; returns at once in a plain run.

    All ranks call it alike.

    Raises:
        Examined: behind the examination, for the doctor.
        ValueError: if the subject cannot be made or run.
    """
    if not is_examining():
        return
    from megatron.packing.doctor.command import diagnose_subject  # imports torch
    from megatron.packing.doctor.unusable import Unusable

    if not callable(make_subject):
        raise Unusable(
            f"examine_here was given a {type(make_subject).__name__}; pass a function without "
            "arguments that returns a Subject"
        )
    raise Examined(*diagnose_subject(make_subject()))
