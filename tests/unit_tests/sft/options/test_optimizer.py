"""Options of the optimizer's state, and of kernels: which belong together."""

from __future__ import annotations

import pytest

from megatron.packing.flags import FlagError
from tests.unit_tests.sft.command_line import parse

PRECISION = "--use-distributed-optimizer --use-precision-aware-optimizer"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--exp-avg-dtype bf16", "--exp-avg-dtype needs --use-precision-aware-optimizer; pass it"),
        ("--optimizer-cpu-offload", "--optimizer-cpu-offload needs --use-precision-aware-optimiz"),
        (
            f"{PRECISION} --optimizer-offload-fraction 0.5",
            "--optimizer-offload-fraction needs --optimizer-cpu-offload; pass it",
        ),
        (
            f"{PRECISION} --optimizer-cpu-offload --optimizer-offload-fraction 1.5",
            "--optimizer-offload-fraction must be from 0 to 1, but is 1.5",
        ),
        (
            f"{PRECISION} --optimizer-cpu-offload --exp-avg-sq-dtype bf16",
            "--optimizer-cpu-offload keeps --main-params-dtype, --exp-avg-dtype and --exp-avg-sq",
        ),
        (
            "--use-precision-aware-optimizer",
            "--use-precision-aware-optimizer needs --use-distributed-optimizer; pass it",
        ),
        (f"{PRECISION} --lora --lora-rank 2", "--use-precision-aware-optimizer saves little with"),
        ("--bias-swiglu-fusion", "--bias-swiglu-fusion needs --swiglu; drop it"),
        (
            "--swiglu --bias-swiglu-fusion --activation-func-clamp-value 7",
            "--bias-swiglu-fusion leaves out --activation-func-clamp-value",
        ),
        (
            "--swiglu --bias-swiglu-fusion --num-experts 4",
            "--bias-swiglu-fusion of experts needs --disable-bias-linear; drop it",
        ),
        (
            "--cross-entropy-loss-fusion --final-logit-softcapping 30",
            "--cross-entropy-loss-fusion leaves out --final-logit-softcapping",
        ),
        ("--moe-permute-fusion", "--moe-permute-fusion needs --num-experts; drop it"),
        (
            "--gradient-accumulation-fusion --lora --lora-rank 2",
            "--gradient-accumulation-fusion is of weights that --lora does not train; drop it",
        ),
        (
            "--tp-comm-overlap",
            "--tp-comm-overlap (its buffers are of one length, and microbatches are not; drop it)",
        ),
    ],
)
def test_contradictions_are_refused(arguments: str, message: str) -> None:
    """megatron-core ignores some of them, and fails at others after the model is built."""
    with pytest.raises(FlagError) as failure:
        parse(arguments)
    assert message in str(failure.value)
