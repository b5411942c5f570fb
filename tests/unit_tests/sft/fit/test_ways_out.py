"""Options that are tried to take less memory."""

from __future__ import annotations

import pytest

from megatron.sft.fit.ways_out import changes, flags_between
from tests.unit_tests.sft.command_line import parse


def test_kept_logits_are_the_first_way_out() -> None:
    """They were asked for, and giving them up changes nothing else."""
    config = parse("--keep-logits")
    assert flags_between(config, next(changes(config, 1))[0]) == "without --keep-logits"
    assert not any("logits" in flags_between(parse(""), way) for way, _ in changes(parse(""), 1))


@pytest.mark.parametrize("other", ["--logits-of-masked-tokens", "--final-logit-softcapping 30"])
def test_logits_that_cannot_be_kept_are_refused(other: str) -> None:
    """Kept in vain, or not kept, nobody would see it."""
    with pytest.raises(ValueError, match="--keep-logits"):
        parse(f"--keep-logits {other}")
