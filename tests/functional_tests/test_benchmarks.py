"""What is to run on a GPU runs on CPU at tiny size: nobody would see it break, where there is no
GPU.
"""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from examples.benchmarks import throughput
from tests.functional_tests.forked_runs import command_forked


class Fork:
    """A case's process as `subprocess.Popen` gives it; forked when its result is asked for."""

    def __init__(self, arguments: list[str]) -> None:
        self._arguments = arguments

    def communicate(self, _: str, __: float) -> tuple[str, str]:
        """Runs it, and returns what it printed."""
        module = "examples.benchmarks.throughput_case"
        script = partial(runpy.run_module, module, run_name="__main__")
        self.returncode, told, errors = command_forked(self._arguments, script=script)
        return told, errors

    def kill(self) -> None:
        """Does nothing: it is over."""

    def wait(self) -> None:
        """Does nothing: it is over."""


def test_throughput_runs_dry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first three cases: packed, with its costliest kernels, transformers, and matrix
    products, each in a fork.
    """
    output = tmp_path / "dry.md"
    options = "--device cpu --tiny --profile --cases 3 --output".split()
    monkeypatch.setattr(sys, "argv", ["throughput", *options, str(output)])
    started = subprocess.Popen
    commands: list[list[str]] = []

    def start(command: list[str], **options: Any) -> Any:
        if "examples.benchmarks.throughput_case" not in command:
            return started(command, **options)
        commands.append(command)
        return Fork(command[3:])

    monkeypatch.setattr(subprocess, "Popen", start)
    throughput.main()
    assert len(commands) == 3
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
