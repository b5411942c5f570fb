"""The answer of the process that estimates memory, whatever else it prints, and its failures."""

from __future__ import annotations

import os
import site
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest

import megatron.sft
from megatron.sft.memory_estimate import MemoryEstimate, WayOut, estimate_memory
from megatron.sft.options.config import SFTConfig

STAGES = b'{"stages": [{"name": "every rank", "peak": 7, "margin": 2, "states": {}, "passes": {}}]}'
WAY = b'["--recompute-granularity full", 3]'


def asked(printed: bytes = b"", errors: bytes = b"", **given: Any) -> MemoryEstimate:
    """Returns the estimate of a process that prints that."""
    done = subprocess.CompletedProcess([], 0, printed, errors)
    with mock.patch.object(subprocess, "run", **({"return_value": done} | given)):
        return estimate_memory(cast(SFTConfig, None), 96, 2, ways_out=True, seconds=1.0)


@pytest.mark.parametrize(
    "noise", [b"", b"loading\n", b"[W101 pin_memory.cpp] slow\n", b"{not json}\n", b"[1]\n{}\n"]
)
def test_lines_of_libraries_are_skipped(noise: bytes) -> None:
    """They would end the line of a run that is out of memory in a traceback."""
    found = asked(noise + STAGES + b"\n" + noise + WAY + b"\n" + noise)
    assert [(stage.name, stage.peak, stage.margin) for stage in found.stages] == [
        ("every rank", 7, 2)
    ]
    assert found.ways_out == (WayOut("--recompute-granularity full", 3),)
    assert found.failure is None


def test_a_late_answer_counts_as_far_as_it_is_whole() -> None:
    """Ways out take an estimate each: a large model has one when the time is over."""
    printed = STAGES + b"\n" + WAY + b"\n" + WAY[:9]
    late = subprocess.TimeoutExpired([], 1.0, output=printed)
    assert len(asked(side_effect=late).ways_out) == 1
    assert asked(side_effect=subprocess.TimeoutExpired([], 1.0)).failure is not None


@pytest.mark.parametrize(
    ("given", "failure"),
    [
        ({}, "the process that estimates it gave no answer"),
        ({"errors": b"Traceback\n  x\nKeyError: 'y'\n"}, "gave no answer: KeyError: 'y'"),
        ({"printed": b'{"failed": "ValueError: z"}\n'}, "ValueError: z"),
        (
            {"printed": b'["stages"]\n', "errors": b"\xff\n"},
            "gave no answer: \N{REPLACEMENT CHARACTER}",
        ),
        ({"side_effect": OSError(12, "Cannot allocate memory")}, "Cannot allocate memory"),
    ],
)
def test_no_estimate_says_why(given: dict[str, Any], failure: str) -> None:
    """A host without memory must not hide that a GPU has none."""
    found = asked(**given)
    assert found.stages == ()
    assert str(found.failure).endswith(failure)


@pytest.fixture
def python_path(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """Returns a function: the folders on the process's PYTHONPATH, of one that has /elsewhere."""
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")

    def of_process() -> list[str]:
        done = subprocess.CompletedProcess([], 0, b"", b"")
        with mock.patch.object(subprocess, "run", return_value=done) as run:
            estimate_memory(cast(SFTConfig, None), 96, 2)
        assert run.call_args.args[0][:3] == [sys.executable, "-m", "megatron.sft"]
        path: str = run.call_args.kwargs["env"]["PYTHONPATH"]
        return path.split(os.pathsep)

    return of_process


def test_the_process_imports_what_this_one_did(python_path: Callable[[], list[str]]) -> None:
    """A checkout that is not installed is on the path by its script's folder alone."""
    (own, given) = python_path()
    assert Path(own, "megatron", "sft") in map(Path, megatron.sft.__path__)
    assert given == "/elsewhere"


@pytest.mark.parametrize("kind", ["getsitepackages", "getusersitepackages"])
def test_installed_packages_do_not_shadow_the_standard_library(
    python_path: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """PYTHONPATH stands before it: a backport such as typing.py would be imported in its place."""
    own = str(Path(megatron.sft.__path__[0]).parents[1])
    monkeypatch.setattr(site, kind, lambda: [own] if kind == "getsitepackages" else own)
    assert python_path() == ["/elsewhere"]
