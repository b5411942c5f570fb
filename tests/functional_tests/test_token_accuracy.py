"""Token accuracy, counted beside the loss, and answers to prompts: the same in every layout, and
what the logits say.
"""

import json
from pathlib import Path

import pytest

from tests.functional_tests.forked_runs import train_forked

MODEL = Path(__file__).parents[1] / "fixtures" / "released" / "qwen"
TEXT = {"text": "The quick brown fox jumps over the lazy dog. " * 3}


PROMPTS = ("The quick brown", "The quick brown fox jumps over the", "The")


def accuracies(folder: Path, world_size: int, *layout: str) -> tuple[list[float], list[str]]:
    """Of each step and evaluation of a run that learns a sentence by heart; and its answers."""
    path = folder.parent / "texts.jsonl"
    path.write_text((json.dumps(TEXT) + "\n") * 8)
    options = (
        f"--pretrained-checkpoint {MODEL} --data-path {path} --run-dir {folder} --split 1 --seed 1 "
        "--seq-length 256 --train-iters 6 --global-batch-size 4 --lr 0.03 --num-workers 0 "
        f"--valid-data-path {path} --eval-iters 1"
    )
    if "--logits-of-masked-tokens" not in layout:
        prompts = folder.parent / "prompts.jsonl"
        prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
        options += f" --sample-prompts {prompts} --sample-tokens 6"
    status, output = train_forked(world_size, [*options.split(), *layout])
    assert status == 0, output
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    answers = [line["answers"] for line in lines if line.get("event") == "answers"]
    return (
        [line["token_accuracy"] for line in lines if "token_accuracy" in line],
        [pair["answer"] for pairs in answers for pair in pairs],
    )


def test_every_layout_counts_the_same(tmp_path):
    """A part of the vocabulary or of the sequence would be counted as the whole."""
    alone, answers = accuracies(tmp_path / "alone", 1)
    assert len(answers) == 2 * len(PROMPTS)
    assert answers[3:] != answers[:3]
    assert 0 <= alone[0] < 0.2 < alone[-1]
    layouts = {
        "tensor": "--tensor-model-parallel-size 2 --sequence-parallel --sequence-packing",
        "context": "--context-parallel-size 2 --sequence-packing",
        "pipeline": "--pipeline-model-parallel-size 2",
    }
    for name, layout in layouts.items():
        found, its_answers = accuracies(tmp_path / name, 2, *layout.split())
        assert found == pytest.approx(alone, abs=0.02)
        assert its_answers == answers


def test_it_is_left_out_where_nobody_looks(tmp_path):
    """The plain output layer counts nothing; a zero would be taken for a bad model."""
    found, _ = accuracies(tmp_path / "plain", 1, "--logits-of-masked-tokens")
    assert found == [None] * len(found)
