"""The doctor on this device. Never run on a GPU so far, only as a dry run on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.functional_tests.doctor_loops import LOOP_CASES, patched
from tests.functional_tests.forked_runs import ROOT
from tests.functional_tests.test_plugin import PACKING

LAUNCHER = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
TIMEOUT_SECONDS = 240.0
CASES = {
    case.name: case
    for case in LOOP_CASES
    if case.script == "plug-in's example" and (not case.expected or "borders" in case.name)
}


@pytest.mark.parametrize("name", CASES)
def test_a_script_is_judged_on_this_device(name: str, tmp_path: Path, device: torch.device) -> None:
    """Atomics and autotuned kernels repeat less well than those of a CPU: a sound script could be
    blamed, or what counts as nothing be so large that a leak is passed over.
    """
    case = CASES[name]
    script = tmp_path / "train.py"
    script.write_text(patched(case, "float32"))
    result = subprocess.run(
        [
            *(sys.executable, "-W", "ignore", *LAUNCHER, "1", "-m", "megatron.sft", "doctor"),
            *("--script", str(script), "--", *PACKING.split()),
        ],
        cwd=ROOT,
        env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    verdict = "; ".join(case.expected) or "no contamination found"
    assert f"this script: {verdict}." in result.stdout, result.stdout + result.stderr
    assert bool(result.returncode) == bool(case.expected)
