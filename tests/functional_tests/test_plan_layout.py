"""`plan --auto-layout` from data to flags, and a chosen layout that trains as it was predicted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron.sft.commands.plan import main
from megatron.sft.fit.step import StepData
from tests.functional_tests.fit_check import COMMON, GROUPED, VOCAB_SIZE, Case, check

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
    assert len(flags) == 2
    assert "modelled" in printed
    assert page.read_text().count("<section>") == 2
    ranks, found = check(Case(2, f"{GROUPED} {flags[0]} --bf16", StepData(lengths=((64,),))))
    assert not found, "\n".join(found)
    assert len(ranks) == 2


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
