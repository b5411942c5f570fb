"""The estimate of memory beside what torch's allocator holds on this device."""

from __future__ import annotations

from multiprocessing import get_context

import pytest
import torch

from megatron.packing.device import CPU
from megatron.sft.arguments.parse import parse_config
from megatron.sft.fit.counter import ByteCounter
from megatron.sft.fit.estimate import Request, estimates
from megatron.sft.fit.fake.described_gpu import DescribedGPU
from megatron.sft.fit.verify import AllocatorCounter, comparison, measured

COMMON = (
    "--num-layers 4 --hidden-size 1024 --num-attention-heads 16 --seq-length 8192 --mock-data "
    "--vocab-size 32000 --global-batch-size 16 --lr 1e-4 --train-iters 1 --eval-iters 0 --bf16 "
    "--sequence-packing --position-embedding-type rope --swiglu --normalization RMSNorm "
    "--disable-bias-linear --untie-embeddings-and-output-weights --use-distributed-optimizer"
)
TINY = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 64 --vocab-size 96"
TOLERANCE = 0.05
"""What kernels hold within an operation is not in the estimate, but for the table of workspaces."""


def _estimated(request: Request) -> object:
    return estimates(request)[0]


@pytest.mark.parametrize(
    "flags", ["", "--recompute-granularity full", "--lora --lora-rank 8", "--num-experts 4"]
)
def test_an_estimate_is_what_is_held(
    device: torch.device, flags: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is said to fit must fit; one that is said not to must not."""
    is_dry = device.type == "cpu"
    config = parse_config(f"{COMMON} {TINY * is_dry} {flags}".split(), 1)
    request = Request(
        config=config, vocab_size=32000, world_size=1, device=CPU if is_dry else DescribedGPU()
    )
    counter = ByteCounter() if is_dry else AllocatorCounter()
    found = measured(request, counter)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # of the child, as a fake world is a CPU's
    with get_context("spawn").Pool(1) as pool:
        stage = pool.apply(_estimated, (request,))
    for name, expected, size in comparison(stage, found):  # type: ignore[arg-type]
        print(f"{flags or 'plain'}, {name}: {expected:,} estimated, {size:,} held")
        assert size == pytest.approx(expected, rel=TOLERANCE), name
