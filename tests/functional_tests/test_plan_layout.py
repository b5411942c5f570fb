"""`plan --auto-layout` from data to flags, and a chosen layout that trains as it was predicted."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from megatron.planner.layout.search import Candidate, Choice, Search
from megatron.sft.arguments.parse import parse_config
from megatron.sft.commands import plan_layout
from megatron.sft.commands.plan import main
from megatron.sft.fit.layout_search import Memory
from megatron.sft.fit.report import LIBRARIES_BYTES, with_margin
from megatron.sft.fit.step import StepData
from tests.functional_tests.fit_check import (
    COMMON,
    GROUPED,
    LORA,
    PACKED,
    VOCAB_SIZE,
    Case,
    check,
)

IS_WHOLE = os.environ.get("FIT_CHECK") == "all"
MODEL = f"--num-layers 2 {COMMON} {GROUPED}".replace("--mock-data ", "")


def test_a_chosen_layout_trains_as_predicted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flags that the trainer refuses, or bytes that no run has, would make the plan worthless."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    lengths, page = tmp_path / "lengths.txt", tmp_path / "page.html"
    lengths.write_text("\n".join(str(length) for length in (40, 64, 12, 33, 7, 50) * 10))
    arguments = f"{MODEL} --auto-layout --world-size 2 --data-path {lengths} --html {page} --bf16"
    arguments = arguments.replace(f"--vocab-size {VOCAB_SIZE}", "")
    main([*arguments.split(), "--layouts", "2"], "plan")
    printed = capsys.readouterr().out
    flags = re.findall(r"flags  (.*)", printed)
    # One of the two may be slower and no smaller.
    assert len(flags) == 2 - len(re.findall("^1 more fit", printed, re.MULTILINE))
    assert "modelled as a range" in printed
    assert not re.search(r" 0\.0+ s per step", printed)
    assert page.read_text().count("<section>") == len(flags)
    ranks, found = check(Case(2, f"{GROUPED} {flags[0]} --bf16", StepData(lengths=((64,),))))
    assert not found, "\n".join(found)
    assert len(ranks) == 2


@pytest.mark.parametrize("lora", ["", LORA] if IS_WHOLE else [""])
def test_what_a_layout_needs_at_least_is_no_more_than_it_needs(
    lora: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bound that is none would drop the best layout unseen; one of nothing would trace them
    all.
    """
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    flags = f"--num-layers 6 {COMMON} {PACKED} {GROUPED} {lora} --bf16"
    memory = Memory(base=parse_config(flags.split(), 1), vocab_size=VOCAB_SIZE, limit=2**40)
    of_states = 0  # its own test is `test_bounds_are_bounds`
    for one in (
        Candidate(dp=1, pp=3, vpp=2, capacity=4096),
        Candidate(dp=1, cp=2, capacity=8192, recompute="full"),
    ):
        needed = memory.num_bytes(one)  # of stages 0 and 2, where there are three
        assert needed == with_margin(max(stage.peak for stage in memory.stages(one)))
        states = sum(part.num_bytes for part in memory.stages(one)[0].states)
        assert memory.least_bytes(one, of_states) <= memory.least_bytes(one, states) <= needed
        least = memory.least_bytes(one, states) - LIBRARIES_BYTES
        if one.recompute == "none":  # else a layer's own temporaries are most of it
            assert least > 0.4 * (needed - LIBRARIES_BYTES), one


@pytest.mark.parametrize("num_found", [0, 1])
def test_an_interrupted_search_shows_what_it_found(
    num_found: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Minutes of search would be lost; a table of nothing says nothing."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("5\n6\n")
    found = Search([Choice(Candidate(capacity=64), 1.0, 2**30)] * num_found, 9, 4, 1, 0)

    def interrupt(*arguments: Any) -> Search:
        arguments[4](found)  # progress
        raise KeyboardInterrupt

    monkeypatch.setattr(plan_layout, "search", interrupt)
    arguments = f"{MODEL} --auto-layout --world-size 1 --data-path {lengths}"
    with pytest.raises((SystemExit, KeyboardInterrupt)) as ended:
        main(arguments.replace(f"--vocab-size {VOCAB_SIZE}", "").split(), "plan")
    printed = capsys.readouterr().out
    if num_found:
        assert ended.value.args == (130,)
        assert "interrupted: only 1 found" in printed
    else:
        assert (ended.type, printed) == (KeyboardInterrupt, "")


def test_what_never_fits_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty list would be taken for a fault."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("5\n6\n")
    arguments = f"{MODEL} --auto-layout --world-size 1 --data-path {lengths} --memory 1KiB"
    main(arguments.replace(f"--vocab-size {VOCAB_SIZE}", "").split(), "plan")
    assert "no layout fits; take more GPUs" in capsys.readouterr().out
