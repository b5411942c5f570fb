"""Kernels in Triton, by its interpreter: no GPU is needed."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton: make kernels")
def test_kernels_compute_what_torch_does() -> None:
    """They never run where these tests do, and an error in them would be a wrong loss on GPUs."""
    name = "tests.functional_tests.triton_interpreted"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", name],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.endswith("equal\n")
