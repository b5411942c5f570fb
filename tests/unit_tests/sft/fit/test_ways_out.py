"""Options that are tried to take less memory."""

from __future__ import annotations

import pytest

from megatron.sft.fit.fewer_bytes import flags_between
from megatron.sft.fit.ways_out import changes
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


def test_options_of_long_contexts_are_a_way_out() -> None:
    """A run of long sequences needs all of them, and is the one that asks."""
    layout = "--context-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel"
    config = parse(f"{layout} --bf16 --use-distributed-optimizer", 4)
    ways = [flags_between(config, way) for way, _ in changes(config, 4)]
    everything = (
        "--recompute-granularity full --query-groups-per-gather 1 --mlp-chunks-for-training 16 "
        "--attention-chunks-for-training 16 --fine-grained-activation-offloading"
    )
    assert ways.index("--recompute-granularity full") + 1 == ways.index(everything)
    assert "--use-precision-aware-optimizer --optimizer-cpu-offload" in ways
