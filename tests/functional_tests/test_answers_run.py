"""Whole runs on records of several answers, against runs in which each answer is a record."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.functional_tests.forked_runs import train_forked
from tests.functional_tests.test_run import MODEL, steps_of

RECORDS: list[dict[str, Any]] = [
    {
        "prompt": [{"role": "user", "content": "why " * (1 + number % 3) + str(number)}],
        "responses": ["so " * (1 + (number * answer) % 5) + "!" for answer in range(1, 2 + number)],
        "weight": 1 + number % 2,
    }
    for number in range(4)
]
"""Records of 1, 2, 3 and 4 answers."""


def run(folder: Path, records: list[dict[str, Any]], *options: str) -> dict[int, dict[str, Any]]:
    """Train four steps on all records each; the metrics of each step."""
    path = folder / "records.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    arguments = [*MODEL, "--data-path", str(path), "--split", "1", "--eval-iters", "0"]
    arguments += ["--global-batch-size", str(len(records)), "--train-iters", "4"]
    arguments += ["--run-dir", str(folder / "run"), "--save", str(folder / "checkpoints")]
    status, output = train_forked(2, [*arguments, "--save-interval", "2", *options])
    assert status == 0, output
    return steps_of(folder / "run")


def test_answers_train_as_records_of_their_own(tmp_path: Path) -> None:
    """The only run in which trees are encoded by workers, prepared ahead, moved, saved and
    continued: a path that is lost on the way, or an answer that follows another one, trains on.
    """
    apart = [
        {
            "prompt": record["prompt"],
            "completion": [{"role": "assistant", "content": text}],
            "weight": record["weight"],
        }
        for record in RECORDS
        for text in record["responses"]
    ]
    for name in ("trees", "apart"):
        (tmp_path / name).mkdir()
    trees = run(tmp_path / "trees", RECORDS, "--outlier-delay-steps", "1")
    expected = run(tmp_path / "apart", apart)
    assert list(trees) == list(expected) == [1, 2, 3, 4]
    shutil.rmtree(tmp_path / "trees/checkpoints/iter_0000004")
    shutil.rmtree(tmp_path / "trees/run")
    (tmp_path / "trees/checkpoints/latest_checkpointed_iteration.txt").write_text("2")
    load = ("--load", str(tmp_path / "trees/checkpoints"), "--context-parallel-size", "2")
    continued = run(tmp_path / "trees", RECORDS, "--outlier-delay-steps", "1", *load)
    assert list(continued) == [3, 4]
    for found in (trees, continued):
        for iteration, step in found.items():
            reference = expected[iteration]
            assert step["num_loss_tokens"] == reference["num_loss_tokens"]
            assert step["path_tokens"] == reference["tokens"] > step["tokens"]
            for name in ("loss", "grad_norm", "token_accuracy"):
                assert step[name] == pytest.approx(reference[name], rel=2e-5), (iteration, name)
