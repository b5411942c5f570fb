"""Numbers out of their limits, of every group of options."""

import pytest

from megatron.packing.flags import FlagError
from tests.unit_tests.sft.command_line import parse

AT_LEAST_ONE = [
    "num-layers",
    "hidden-size",
    "num-attention-heads",
    "seq-length",
    "moe-router-topk",
    "ffn-hidden-size",
    "kv-channels",
    "num-experts",
    "num-query-groups",
    "moe-ffn-hidden-size",
    "make-vocab-size-divisible-by",
    "moe-shared-expert-intermediate-size",
    "tensor-model-parallel-size",
    "pipeline-model-parallel-size",
    "context-parallel-size",
    "expert-model-parallel-size",
    "num-layers-per-virtual-pipeline-stage",
    "max-seqlen-per-dp-cp-rank",
    "vocab-size",
    "train-iters",
    "global-batch-size",
    "micro-batch-size",
    "eval-interval",
    "lr-decay-iters",
    "log-interval",
    "save-interval",
]


@pytest.mark.parametrize(
    ("option", "limits"),
    [(f"{name} {value}", "at least 1") for name in AT_LEAST_ONE for value in (0, -2)]
    + [
        (option, "at least 0")
        for option in (
            "lr nan",
            "lr inf",
            "lr -0.1",
            "weight-decay -1.0",
            "clip-grad -1.0",
            "eval-iters -1",
            "seed -1",
        )
    ]
    + [
        (f"{name} {value}", "from 0 to")
        for name in ("hidden-dropout", "adam-beta1")
        for value in (1.5, -0.5)
    ]
    + [
        ("distributed-timeout-minutes 0.0", "at least 0.01"),
        ("rotary-base 0.5", "at least 1"),
    ],
)
def test_value_out_of_range_is_refused(option, limits):
    """It would be taken for no value, divide by zero, or end in an error that does not name the
    option.
    """
    name, value = option.split()
    with pytest.raises(FlagError) as failure:
        parse(f"--sequence-packing --save folder --{name}={value}")
    assert str(failure.value).startswith(f"--{name} must be {limits}")
    assert str(failure.value).endswith(f", but is {value}")
