"""The options of output: what needs a folder."""

import pytest

from tests.unit_tests.sft.command_line import assert_refused

CONTRADICTIONS = [
    ("--save-interval 5", 1, ["--save-interval", "needs --save"]),
    ("--wandb-exp-name first", 1, ["--wandb-exp-name", "needs --wandb-project"]),
    ("--sequence-packing --dump-schedule 3 0", 1, ["--dump-schedule", "but is 0"]),
]


@pytest.mark.parametrize(("arguments", "world_size", "words"), CONTRADICTIONS)
def test_contradiction_is_refused_with_a_way_out(arguments, world_size, words):
    """The run would end without what was asked for, after all its steps."""
    assert_refused(arguments, world_size, words)
