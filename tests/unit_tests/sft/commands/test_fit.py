"""Options of `megatron-sft fit`; what it prints is in tests/functional_tests."""

import pytest

from megatron.packing.flags import FlagError
from megatron.sft.commands.fit import parse


def test_a_command_without_a_model_names_the_short_way():
    """A list of missing numbers lets a stranger look them up; a released model has them all."""
    with pytest.raises(FlagError, match=r"--num-layers, .*; or pass --pretrained-checkpoint"):
        parse([], "megatron-sft fit")
