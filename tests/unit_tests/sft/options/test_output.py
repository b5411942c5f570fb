"""The options of output: what needs a folder."""

import pytest

from tests.unit_tests.sft.command_line import assert_refused, parse

CONTRADICTIONS = [
    ("--save-interval 5", 1, ["--save-interval", "needs --save"]),
    ("--finetune", 1, ["--finetune needs --load"]),
    ("--no-load-optim", 1, ["--no-load-optim needs --load"]),
    ("--ckpt-step 4", 1, ["--ckpt-step needs --load"]),
    ("--finetune --load runs/a --save runs/../runs/a", 1, ["pass another --save than --load"]),
    ("--wandb-exp-name first", 1, ["--wandb-exp-name", "needs --wandb-project"]),
    ("--sequence-packing --dump-schedule 3 0", 1, ["--dump-schedule", "but is 0"]),
]


@pytest.mark.parametrize(("arguments", "world_size", "words"), CONTRADICTIONS)
def test_contradiction_is_refused_with_a_way_out(arguments, world_size, words):
    """The run would end without what was asked for, after all its steps."""
    assert_refused(arguments, world_size, words)


def test_what_is_not_loaded() -> None:
    """Megatron-LM's names begin with no, as ours do that take something back."""
    output = parse("--load checkpoints --no-load-optim --no-load-rng").output
    assert (output.load_optim, output.load_rng) == (False, False)
    output = parse("--load checkpoints").output
    assert (output.load_optim, output.load_rng) == (True, True)
