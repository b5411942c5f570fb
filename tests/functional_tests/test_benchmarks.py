"""What is to run on a GPU runs on CPU at tiny size: nobody would see it break, where there is no
GPU.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from examples.benchmarks import throughput, throughput_case
from tests.functional_tests.forked_runs import command_forked


def test_throughput_runs_dry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first three cases: packed, with its costliest kernels, transformers, and matrix products.
    The first is a process of its own, as all are for users; the others are forks.
    """
    output = tmp_path / "dry.md"
    options = "--device cpu --tiny --profile --cases 3 --output".split()
    monkeypatch.setattr(sys, "argv", ["throughput", *options, str(output)])
    started = subprocess.run
    commands: list[list[str]] = []

    def start(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        if len(commands) == 1 or command[1:3] != commands[0][1:3]:
            return started(command, **options)
        status, printed, errors = command_forked(command[3:], script=throughput_case.main)
        return subprocess.CompletedProcess(command, status, printed, errors)

    monkeypatch.setattr(subprocess, "run", start)
    throughput.main()
    assert commands[0][:3] == [sys.executable, "-m", "examples.benchmarks.throughput_case"]
    text = output.read_text()
    assert "This is a dry run" in text
    rows = re.findall(
        r"^\| 1B \| chats \| 16,384 \| (\w+).*?\| ([\d,]+) \| [\d.]+ \|", text, re.MULTILINE
    )
    assert [way for way, _ in rows] == ["packed", "transformers", "matrix"], text
    assert all(int(speed.replace(",", "")) > 0 for _, speed in rows)
    assert len(re.findall(r"^\| `", text, re.MULTILINE)) == 10


def test_gpu_tests_run_dry(monkeypatch: pytest.MonkeyPatch) -> None:
    """All are found; the shortest of them runs."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    options = "--device cpu -q -n 0 -p no:cacheprovider -k"
    arguments = ["tests/gpu_tests", *options.split(), "test_attention or arrive_whole"]

    def run() -> None:
        raise SystemExit(pytest.main(arguments))

    status, told, errors = command_forked([], script=run)
    assert status == 0, told + errors
    assert re.search(r"\d+ passed, \d+ deselected", told), told
