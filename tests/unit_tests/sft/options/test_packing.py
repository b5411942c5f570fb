"""The options of packing: what needs what."""

import pytest

from tests.unit_tests.sft.command_line import assert_refused

CONTRADICTIONS = [
    ("--max-seqlen-per-dp-cp-rank 256", 1, ["--max-seqlen-per-dp-cp-rank needs --sequence-packing"]),
    ("--outlier-delay-steps 4", 1, ["--outlier-delay-steps needs --sequence-packing"]),
    ("--outlier-delay-steps -1 --sequence-packing", 1, ["--outlier-delay-steps must be at least 0", "-1"]),
    (
        "--outlier-delay-steps 4 --sequence-packing --sequence-packing-scheduler empty",
        1,
        ["--outlier-delay-steps", "--sequence-packing-scheduler default"],
    ),
    ("--pack-cost cost.json", 1, ["--pack-cost needs --sequence-packing"]),
    ("--sequence-packing --pack-cost absent.json", 1, ["--pack-cost absent.json cannot be read", "calibrate"]),
    ("--sequence-packing-scheduler empty", 1, ["--sequence-packing-scheduler needs --sequence-packing"]),
]


@pytest.mark.parametrize(("arguments", "world_size", "words"), CONTRADICTIONS)
def test_contradiction_is_refused_with_a_way_out(arguments, world_size, words):
    """An option that is passed over without a word is believed to work."""
    assert_refused(arguments, world_size, words)
