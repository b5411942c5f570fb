"""Options of `megatron-sft fit`; what it prints is in tests/functional_tests."""

import pytest

from megatron.packing.flags import FlagError
from megatron.sft.commands.fit import parse, way_line
from megatron.sft.memory_estimate import WayOut

GIB = 1 << 30


def test_a_command_without_a_model_names_the_short_way():
    """A list of missing numbers lets a stranger look them up; a released model has them all."""
    with pytest.raises(FlagError, match=r"--num-layers, .*; or pass --pretrained-checkpoint"):
        parse([], "megatron-sft fit")


def test_a_way_out_says_whether_it_is_enough():
    """Three ways that save little looked like three solutions."""
    way = WayOut("--context-parallel-size 2", 2 * GIB)
    assert way_line(way, 2 * GIB) == "  --context-parallel-size 2  2.00 GiB less, then it fits"
    assert way_line(way, 5 * GIB).endswith("2.00 GiB less, still 3.00 too much")
