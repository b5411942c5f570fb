"""The options of training: rates and steps that contradict."""

import pytest

from megatron.packing.flags import FlagError
from tests.unit_tests.sft.command_line import assert_refused, parse

CONTRADICTIONS = [
    ("--min-lr 1e-2", 1, ["--min-lr 0.01", "--lr 0.001"]),
    ("--min-lr=-1e-2", 1, ["--min-lr -0.01"]),
    ("--lr-warmup-iters 10", 1, ["--lr-warmup-iters 10", "--lr-decay-iters"]),
    ("--lr-warmup-iters 4 --lr-decay-iters 4", 1, ["--lr-warmup-iters 4", "--lr-decay-iters"]),
    ("--lr-warmup-iters -1", 1, ["--lr-warmup-iters -1"]),
]


@pytest.mark.parametrize(("arguments", "world_size", "words"), CONTRADICTIONS)
def test_contradiction_is_refused_with_a_way_out(arguments, world_size, words):
    """The learning rate would be another one than either option says."""
    assert_refused(arguments, world_size, words)


def test_adam_that_never_forgets_is_refused():
    """torch refuses it without the option's name, after the process groups are built."""
    with pytest.raises(FlagError, match="--adam-beta2"):
        parse("--adam-beta2 1.0")
