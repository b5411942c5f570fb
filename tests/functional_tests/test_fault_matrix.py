"""A part of the matrix of faults, which `make faults` goes through, with each kind, phase
and layout in it.
"""

from __future__ import annotations

from tests.functional_tests import faults
from tests.functional_tests.forked_runs import command_forked


def test_faults_end_runs_or_only_delay_them() -> None:
    """A run that hangs at a fault, leaves processes behind, saves too little, or does not say what
    happened.
    """
    options = ["--covering"]
    status, told, errors = command_forked(options, script=faults.main, limit_seconds=300)
    assert status == 0, told + errors
    assert told.count(": holds") > 10
