"""Options of `plan --auto-layout`; what it prints is in tests/functional_tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron.packing.flags import FlagError
from megatron.sft.commands import plan
from megatron.sft.commands.plan_layout import _lengths, _parse
from megatron.sft.fit.vocabulary import vocab_size_of

SHAPE = "--auto-layout --num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 64"
WORDS = "--vocab-size 999"


def test_lengths_alone_are_enough(tmp_path: Path) -> None:
    """Who plans often has lengths, and no data: their words came from the byte tokenizer."""
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("40\n64\n12\n")
    config, options, _ = _parse([str(lengths), *f"{SHAPE} {WORDS}".split()], "plan")
    found = _lengths(config, options.source, vocab_size_of(config), needed=3)
    assert (found.lengths.tolist(), vocab_size_of(config)) == ([40, 64, 12], 999)
    with pytest.raises(FlagError, match="size of the vocabulary is missing"):
        _parse([str(lengths), *SHAPE.split()], "plan")


def test_lengths_stand_in_for_the_data_of_a_config(tmp_path: Path) -> None:
    """The data of a run that is planned on a laptop are elsewhere."""
    lengths, run = tmp_path / "lengths.csv", tmp_path / "run.yaml"
    lengths.write_text("7\n9\n")
    run.write_text(f"data_path: {tmp_path}/elsewhere.jsonl\n")
    arguments = [str(lengths), "--config", str(run), *SHAPE.split()]
    config, options, _ = _parse(arguments, "plan")
    found = _lengths(config, options.source, 999, needed=2)
    np.testing.assert_array_equal(found.lengths, [7, 9])


def test_missing_lengths_are_named() -> None:
    """--data-path was all that the error knew."""
    with pytest.raises(FlagError, match="lengths are missing; name a file of lengths or chats"):
        _parse(SHAPE.split(), "plan")


def test_a_vision_tower_is_refused() -> None:
    """The search would find layouts of the language model alone, and say nothing."""
    with pytest.raises(ValueError, match="does not count the time of a vision tower"):
        _parse(f"{SHAPE} {WORDS} --images lengths.txt".split(), "plan")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("--data-path a.jsonl b.jsonl", "--auto-layout reads one file; name it, or a file of len"),
        ("--mock-data", "--mock-data needs --sft-mock-dataset-config-json here, which says what"),
    ],
)
def test_data_without_one_source_of_lengths_are_refused(data: str, said: str) -> None:
    """The first of the files, or lengths that nobody chose, would stand for all."""
    with pytest.raises(ValueError, match=f"^{said}"):
        _parse(f"{SHAPE} {WORDS} {data}".split(), "plan")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--gpu", "h100"], "--gpu needs --auto-layout; pass it, or drop --gpu"),
        (["--nosuch", "3"], "unknown option --nosuch; see --help"),
        (["--auto-layout", "--dp", "2"], "drop it: the processes that other sizes leave"),
    ],
)
def test_options_of_the_other_plan_are_named(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An option that --help shows would be called unknown, since another option is not there."""
    with pytest.raises(SystemExit):
        plan.main(["lengths.csv", *arguments], "plan")
    assert said in capsys.readouterr().err
