"""Stand-ins for kernels of gated delta nets keep what flash-linear-attention's sources say."""

from __future__ import annotations

import torch

from megatron.packing.model.parts.delta_kernels import convolution, rule
from megatron.sft.fit.counter import ByteCounter

TOKENS, HEADS, WIDTH = 256, 2, 16


def test_the_rule_keeps_what_its_sources_say() -> None:
    """Its memory would be a guess, or that of plain torch, which is several times as much."""
    shape = 1, TOKENS, HEADS, WIDTH
    wide = [torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    decay = torch.zeros(shape[:3], requires_grad=True)
    beta = torch.zeros(shape[:3], dtype=torch.bfloat16, requires_grad=True)
    ends = torch.tensor([0, 100, 256])
    with ByteCounter() as counter:
        with counter.phase("forward"):
            out, _ = rule(wide[0], wide[1], wide[2], decay, beta, cu_seqlens=ends)
        with counter.phase("backward"):
            found = torch.autograd.grad(out, [*wide, decay, beta], torch.zeros_like(out))
    row, rows = TOKENS * HEADS * WIDTH * 2, TOKENS * HEADS
    # Queries and keys of unit length, their lengths, sums of decays, a triangle per chunk, output.
    assert counter.phases[0].end == 2 * row + 3 * rows * 4 + rows * 64 * 2 + row
    assert [x.shape for x in found] == [x.shape for x in (*wide, decay, beta)]
    assert [x.dtype for x in found] == [x.dtype for x in (*wide, decay, beta)]
    states = (4 + 1) * HEADS * WIDTH * WIDTH * 2  # one chunk more where a sequence ends within one
    beside = counter.phases[1].peak - counter.phases[1].start
    assert beside >= 2 * states + 8 * row


def test_the_convolution_keeps_its_input_alone() -> None:
    """Plain torch keeps four products and their sums."""
    x = torch.zeros(1, TOKENS, 8, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.zeros(8, 4, dtype=torch.bfloat16, requires_grad=True)
    with ByteCounter() as counter, counter.phase("forward"):
        out, _ = convolution(x, weight, activation="silu", cu_seqlens=None)
    assert counter.phases[0].end == out.nbytes
    found = torch.autograd.grad(out, [x, weight], torch.zeros_like(out))
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in (x, weight)]
