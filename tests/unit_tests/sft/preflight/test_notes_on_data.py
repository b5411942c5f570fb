"""What a run says about its data before it trains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.sft.data.datasets import build_datasets
from megatron.sft.preflight.notes_on_data import notes_on_data
from tests.unit_tests.sft.command_line import BASE, parse

NO_NEWS = "its validation loss says nothing about other records"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two files of 40 records, and a link to the first and a copy of it."""
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        lines = [json.dumps({"text": f"{name} {number}"}) + "\n" for number in range(40)]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    (tmp_path / "link.jsonl").symlink_to("a.jsonl")
    (tmp_path / "copy.jsonl").write_bytes((tmp_path / "a.jsonl").read_bytes())
    return tmp_path


def notes(arguments: str) -> list[str]:
    config = parse(arguments, base=f"{BASE} --num-workers 0")
    return [line.removeprefix("note: ") for line in notes_on_data(config, build_datasets(config))]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--data-path a.jsonl b.jsonl", []),
        ("--data-path a.jsonl --valid-data-path b.jsonl", []),
        ("--data-path 5 a.jsonl 3 b.jsonl", []),
        (
            "--data-path a.jsonl ./a.jsonl",
            [
                "FOLDER/a.jsonl stands in --data-path more than once: an epoch trains its records "
                "twice"
            ],
        ),
        (
            "--data-path 5 a.jsonl 3 link.jsonl",
            ["FOLDER/a.jsonl stands in --data-path more than once: its weights add up"],
        ),
        (
            "--data-path 5 a.jsonl 3 copy.jsonl",
            ["copy and a have the same records: they are trained twice"],
        ),
        (
            "--data-path b.jsonl a.jsonl --valid-data-path link.jsonl",
            [f"link.jsonl is trained, too: {NO_NEWS}"],
        ),
        (
            "--data-path b.jsonl a.jsonl --valid-data-path copy.jsonl",
            [f"copy has the records of a, which are trained: {NO_NEWS}"],
        ),
    ],
)
def test_the_same_records_twice_are_noted(folder, arguments, said):
    """A validation loss that falls with the training loss is taken for success, and a file that is
    named twice weighs twice.
    """
    assert notes(arguments) == [line.replace("FOLDER", str(folder)) for line in said]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            "--data-path a.jsonl --split 99.9,0.1,0",
            "--split 99.9,0.1,0 leaves none; raise its seco",
        ),
        (
            "--data-path a.jsonl --split 100,0,0 --eval-interval 5",
            "--split 100,0,0 leaves none; ra",
        ),
        ("--data-path a.jsonl --split 100,0,0", None),
        ("--data-path a.jsonl --split 99.9,0.1,0 --eval-iters 0", None),
    ],
)
def test_an_evaluation_without_records_is_noted(folder, arguments, says):
    """A run of a night ended without a validation loss, and nobody had been told."""
    said = [line for line in notes(arguments) if "no evaluations" in line]
    assert len(said) == (says is not None)
    assert says is None or f"validate with: {says}" in said[0]


def test_records_fewer_than_a_batch_are_noted(folder) -> None:
    """Three records are five copies of each in a step of 16, which looks like 16 samples: one epoch
    of them was ten.
    """
    (folder / "three.jsonl").write_text("".join(Path("a.jsonl").read_text().splitlines(True)[:3]))
    (note,) = notes("--data-path three.jsonl --split 100,0,0 --train-iters 0 --train-epochs 1")
    assert note == (
        "3 records to train on are fewer than --global-batch-size 16: a step trains records more "
        "than once (5.3 epochs in 1 step); lower it"
    )
    assert notes_on_data(parse(), build_datasets(parse())) == []  # mock data
