"""Values that are probably mistyped."""

import json

import pytest

from megatron.sft.arguments.value_notes import value_notes
from tests.unit_tests.sft.command_line import parse

LORA = "--lora --save-hf out "


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("", []),
        ("--lr 2", ["note: --lr 2 is far above what Adam trains with (1e-6 to 1e-3"]),
        ("--lr 0", ["note: --lr 0 trains nothing"]),
        ("--weight-decay 10", ["note: --weight-decay 10 is far above the usual 0.01 to 0.1"]),
        ("--exit-interval 5", ["note: --exit-interval may end the run without a checkpoint"]),
        ("--exit-interval 5 --save x", []),
        ("--attention-backend flash", ["note: --attention-backend flash has no effect without Tr"]),
        ("--attention-backend local", []),
        ("--cp-comm-type a2a --context-parallel-size 2", ["note: --cp-comm-type a2a has no effec"]),
        ("--cp-comm-type p2p --context-parallel-size 2", []),
        (LORA + "--lora-rslora", ["note: --lora-rslora scales by 32 / sqrt(16); peft and vLLM"]),
        (LORA + "--lora-rslora --lora-merge", []),
        (LORA, []),
    ],
)
def test_notes(arguments, said, monkeypatch):
    """A learning rate of 2 was begun without a word, and cost what a run costs."""
    monkeypatch.setattr("megatron.sft.arguments.value_notes.find_spec", lambda name: None)
    lines = value_notes(parse(arguments, 2))
    assert len(lines) == len(said)
    assert all(line.startswith(start) for line, start in zip(lines, said))


@pytest.mark.parametrize(("original", "rotates"), [(128, "short_factor"), (127, "long_factor")])
def test_the_list_of_long_rope_is_told(original, rotates):
    """Two lengths of one run's samples are rotated by one list: which one is the user's to know."""
    rope = {"rope_type": "longrope", "factor": 4, "original_max_position_embeddings": original}
    lists = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    text = json.dumps(rope | lists).replace(" ", "")
    (line,) = value_notes(
        parse(f"--position-embedding-type rope --rope-scaling {text} --kv-channels 8", 1)
    )
    assert line.startswith("long rope: --seq-length")
    assert f"{rotates} rotates all samples" in line


def test_transformer_engine_takes_the_backend(monkeypatch):
    """The note would be untrue there."""
    monkeypatch.setattr("megatron.sft.arguments.value_notes.find_spec", lambda name: name)
    assert value_notes(parse("--attention-backend flash")) == []
