"""Values that are probably mistyped."""

import pytest

from megatron.sft.arguments.value_notes import value_notes
from tests.unit_tests.sft.command_line import parse


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
    ],
)
def test_notes(arguments, said, monkeypatch):
    """A learning rate of 2 was begun without a word, and cost what a run costs."""
    monkeypatch.setattr("megatron.sft.arguments.value_notes.find_spec", lambda name: None)
    lines = value_notes(parse(arguments, 2))
    assert len(lines) == len(said)
    assert all(line.startswith(start) for line, start in zip(lines, said))


def test_transformer_engine_takes_the_backend(monkeypatch):
    """The note would be untrue there."""
    monkeypatch.setattr("megatron.sft.arguments.value_notes.find_spec", lambda name: name)
    assert value_notes(parse("--attention-backend flash")) == []
