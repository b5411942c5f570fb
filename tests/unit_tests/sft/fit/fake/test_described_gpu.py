"""What a described GPU allocates: what its kernels and those of torch and megatron-core would."""

from __future__ import annotations

from typing import Any

import torch

from megatron.packing.device import CPU
from megatron.packing.model.loss import cross_entropy
from megatron.sft.fit.counter import ByteCounter
from megatron.sft.fit.fake import described_gpu
from megatron.sft.fit.fake.described_gpu import DescribedGPU, flash_backward_bytes


def test_a_sum_of_products_is_held_once() -> None:
    """On a CPU a product in bfloat16 is held beside it, half as large."""
    left, right = (torch.empty(2, size, dtype=torch.bfloat16, device="meta") for size in (96, 32))
    peaks = []
    for device in (DescribedGPU(), CPU):
        with ByteCounter() as counter, counter.phase("sum"):
            total = None
            for _ in range(3):
                total = cross_entropy._add_product(total, left.t(), right, torch.float32, device)
        peaks.append(counter.phases[0].peak)
    assert peaks == [4 * 96 * 32, 6 * 96 * 32]


def test_workspace_of_flash_attention() -> None:
    """1,000 tokens in two sequences, 8 heads that share 2 groups of keys, 64 channels."""
    query, key = torch.empty(1000, 8, 64, device="meta"), torch.empty(1000, 2, 64, device="meta")
    rows = 1000 + 2 * 128
    expected = 4 * rows * 8 * 64 + 4 * rows * 8 + 2 * 2 * 1000 * 8 * 64
    assert flash_backward_bytes(query, key, torch.empty(3, device="meta")) == expected


def test_stand_ins_return_what_fused_swiglu_does() -> None:
    """Another shape or type would be counted as other bytes, and no run would fail."""
    fused_bias_swiglu = described_gpu.fused_bias_swiglu
    x, gradient = (torch.ones(6, width, dtype=torch.bfloat16) for width in (8, 4))
    bias, weights = torch.ones(8, dtype=torch.bfloat16), torch.ones(6, 1)
    arguments = {
        "swiglu": (x,),
        "bias_swiglu": (x, bias),
        "weighted_swiglu": (x, weights),
        "swiglu_back": (gradient, x),
        "bias_swiglu_back": (gradient, x, bias),
        "weighted_swiglu_back": (gradient, x, weights),
    }
    assert list(described_gpu._COMPILED) == list(arguments)
    for name, stand_in in described_gpu._COMPILED.items():
        with torch.compiler.set_stance("force_eager"):
            expected = getattr(fused_bias_swiglu, name)(*arguments[name])
        found = stand_in(*arguments[name])
        for one, other in zip(tensors(found), tensors(expected), strict=True):
            assert (one.shape, one.dtype) == (other.shape, other.dtype), name


def tensors(value: object) -> tuple[Any, ...]:
    """Returns the tensors of a result."""
    return value if isinstance(value, tuple) else (value,)
