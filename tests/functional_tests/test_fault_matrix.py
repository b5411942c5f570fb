"""A part of the matrix of faults, which `make faults` goes through, with each kind, phase
and layout in it.
"""

from __future__ import annotations

import os
import subprocess
import sys

from tests.functional_tests.forked_runs import ROOT


def test_faults_end_runs_or_only_delay_them() -> None:
    """A run that hangs at a fault, leaves processes behind, saves too little, or does not say what
    happened.
    """
    command = [sys.executable, "-m", "tests.functional_tests.faults", "--covering"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": holds") > 12
