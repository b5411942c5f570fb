"""What is to run on a GPU runs on CPU at tiny size: nobody would see it break, where there is no
GPU.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> str:
    process = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env={"OMP_NUM_THREADS": "1", **os.environ, "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    assert process.returncode == 0, process.stdout
    return process.stdout


def test_throughput_runs_dry(tmp_path: Path) -> None:
    """The first three cases: packed, with its costliest kernels, transformers, and matrix
    products."""
    output = tmp_path / "dry.md"
    run(
        "examples.benchmarks.throughput",
        *"--device cpu --tiny --profile --cases 3 --output".split(),
        str(output),
    )
    text = output.read_text()
    assert "This is a dry run" in text
    rows = re.findall(
        r"^\| 1B \| chats \| 16,384 \| (\w+).*?\| ([\d,]+) \| [\d.]+ \|", text, re.MULTILINE
    )
    assert [way for way, _ in rows] == ["packed", "transformers", "matrix"], text
    assert all(int(speed.replace(",", "")) > 0 for _, speed in rows)
    assert len(re.findall(r"^\| `", text, re.MULTILINE)) == 10


def test_gpu_tests_run_dry() -> None:
    """All are found; the shortest of them runs."""
    told = run(
        "pytest",
        "tests/gpu_tests",
        "--device",
        "cpu",
        "-q",
        "-n",
        "0",
        "-k",
        "test_attention or arrive_whole",
    )
    assert re.search(r"\d+ passed, \d+ deselected", told), told
