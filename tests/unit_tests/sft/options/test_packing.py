"""The options of packing: what needs what."""

import pytest

from tests.unit_tests.sft.command_line import assert_refused

CONTRADICTIONS = [
    ("--max-seqlen-per-dp-cp-rank 256", 1, ["--max-seqlen-per-dp-cp-rank", "--sequence-packing"]),
    ("--outlier-delay-steps 4", 1, ["--outlier-delay-steps", "--sequence-packing"]),
    (
        "--outlier-delay-steps -1 --sequence-packing",
        1,
        ["--outlier-delay-steps must be at least 0", "-1"],
    ),
    (
        "--outlier-delay-steps 4 --sequence-packing --sequence-packing-scheduler empty",
        1,
        ["--outlier-delay-steps", "--sequence-packing-scheduler default"],
    ),
    ("--pack-cost cost.json", 1, ["--pack-cost", "--sequence-packing"]),
    (
        "--sequence-packing --pack-cost absent.json",
        1,
        ["--pack-cost absent.json cannot be read", "calibrate"],
    ),
    (
        "--sequence-packing-scheduler empty --no-sequence-packing",
        1,
        ["--sequence-packing-scheduler", "--sequence-packing"],
    ),
]


def test_a_scheduler_whose_module_ends_the_program(tmp_path, monkeypatch):
    """Training would end with its exit status, before any work and without a word."""
    (tmp_path / "ends_the_program.py").write_text("raise SystemExit(0)")
    monkeypatch.syspath_prepend(tmp_path)
    words = ["--sequence-packing-scheduler 'ends_the_program:f'", "raises SystemExit(0); guard"]
    assert_refused("--sequence-packing --sequence-packing-scheduler ends_the_program:f", 1, words)


@pytest.mark.parametrize(("arguments", "world_size", "words"), CONTRADICTIONS)
def test_contradiction_is_refused_with_a_way_out(arguments, world_size, words):
    """An option that is passed over without a word is believed to work."""
    assert_refused(arguments, world_size, words)
