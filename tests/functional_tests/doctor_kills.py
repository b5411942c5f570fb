"""Runs tests under a mutant of packing code: the suite has to notice what the doctor names.

Each mutant runs in a fork of a process that has imported megatron-core, so that ranks which a test
forks have it, too.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.functional_tests.doctor_mutants import Mutant, mutated
from tests.functional_tests.forks import before_fork

_ROOT = Path(__file__).parents[2]


class _Failures:
    """Collects the tests that fail."""

    def __init__(self) -> None:
        self.failed: list[str] = []
        self.num_passed = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)
        self.num_passed += report.when == "call" and report.passed


def tests_that_die(mutant: Mutant | None, selection: str) -> tuple[list[str], int]:
    """Returns the tests that fail under a mutant, and how many pass.

    Args:
        mutant: None for none.
        selection: a file or a test, which pytest is to run.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    before_fork()
    process = context.Process(target=_run, args=(sender, mutant, selection))
    process.start()
    sender.close()
    try:
        failed, num_passed, text = receiver.recv()
    except EOFError as error:
        raise AssertionError(f"pytest {selection} ended its process") from error
    finally:
        process.join()
    assert failed or num_passed, f"pytest {selection} ran no test:\n{text}"
    return failed, num_passed


def _run(sender: Connection, mutant: Mutant | None, selection: str) -> None:
    os.chdir(_ROOT)
    failures, text = _Failures(), io.StringIO()
    arguments = [selection, "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(text))
        if mutant is not None:
            stack.enter_context(mutated(mutant))
        pytest.main([*arguments, "-o", "addopts=--import-mode=importlib"], plugins=[failures])
    sender.send((failures.failed, failures.num_passed, text.getvalue()[-2000:]))
    os._exit(0)


_UNIT = "tests/unit_tests/packing"
_LAYOUTS = "tests/functional_tests/test_layouts.py::test"
_ATTENTION = f"{_UNIT}/model/attention/test_core_attention.py"
_ZIGZAG = f"{_UNIT}/model/attention/test_zigzag.py"
_DELTA = f"{_UNIT}/model/parts/test_delta_net.py"
_FORWARD = "tests/unit_tests/sft/model/test_forward.py"


def _layout(name: str) -> str:
    return f"{_LAYOUTS}_layout_trains_like_each_sequence_alone[{name}]"


def _mechanism(name: str) -> str:
    return f"{_LAYOUTS}_mechanisms_train_like_each_sequence_alone[{name}]"


SELECTIONS = {
    "first border one too late": _ATTENTION,
    "attention of the second stage joins sequences": _layout(
        "tp1-pp2-cp1-dp1-experts-sharded-dp_balanced"
    ),
    "attention joins sequences": _ATTENTION,
    "window one too narrow": _ATTENTION,
    "causal mask is lost": _ATTENTION,
    "pieces of context-parallel ranks attend as one another": _ZIGZAG,
    "keys of context-parallel ranks one too far": _ZIGZAG,
    "convolution runs over borders": _DELTA,
    "state of delta nets is kept": _DELTA,
    "further predictions run over borders": f"{_UNIT}/model/loss/test_packed_roll.py",
    "positions run on": _layout("tp4sp-pp1-cp1-dp1-learned-plain-default"),
    "last target is lost": f"{_UNIT}/model/loss/test_head.py",
    "labels are the tokens themselves": f"{_UNIT}/model/test_get_batch.py",
    "padding is trained": f"{_UNIT}/batch/test_microbatches.py",
    "sample weights are lost": f"{_UNIT}/batch/test_samples.py",
    "divided by all slots": _FORWARD,
    "weights count in the number of tokens": _FORWARD,
    "tokens of context-parallel ranks are not counted": _layout(
        "tp1-pp1-cp2-dp2-tied-plain-dp_balanced"
    ),
    "gradient is scaled": _layout("tp1-pp1-cp1-dp3-tied-sharded-default"),
    "last words of tensor-parallel ranks are none": _layout(
        "tp4sp-pp1-cp1-dp1-learned-plain-default"
    ),
    "last sample of a rank is lost": "tests/functional_tests/test_global_batch.py",
    "norms of sequence-parallel ranks are not summed": _layout(
        "tp2sp-pp1-cp1-dp2-experts-overlapped-default"
    ),
    "gated norms of tensor-parallel ranks are not summed": _mechanism(
        "tp2sp-pp2i-cp1-dp1-learned-sharded-default-qwen3.5"
    ),
    "gradient of keys over context parallel is not summed": _layout(
        "tp1-pp1-cp2-dp2-tied-plain-dp_balanced"
    ),
}
"""Mutant -> where in the suite a test fails under it."""


def killer(mutant: Mutant) -> str:
    """Returns the test that fails under a mutant and passes without it, or "" for none."""
    failed, _ = tests_that_die(mutant, SELECTIONS[mutant.name])
    if not failed:
        return ""
    others, _ = tests_that_die(None, failed[0])
    return "" if others else failed[0]
