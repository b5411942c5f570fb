"""A small run's command line: its options, or what is refused in them."""

import pytest

from megatron.packing.flags import FlagError
from megatron.sft.arguments.parse import parse_config
from megatron.sft.options.config import SFTConfig

MODEL = "--num-layers 8 --hidden-size 64 --num-attention-heads 8 --seq-length 128"
STEPS = "--train-iters 10 --global-batch-size 16 --lr 1e-3"
BASE = f"{MODEL} {STEPS}"


def parse(arguments: str = "", world_size: int = 1, base: str = f"{BASE} --mock-data") -> SFTConfig:
    return parse_config([*base.split(), *arguments.split()], world_size)


def assert_refused(arguments: str, world_size: int, words: list[str]) -> None:
    """In one line that holds these words: the flags that contradict, and what to do."""
    with pytest.raises(FlagError) as failure:
        parse(arguments, world_size)
    message = str(failure.value)
    assert "\n" not in message
    for word in words:
        assert word in message
