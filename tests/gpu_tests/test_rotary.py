"""Rotary embeddings by Triton's kernel on this device, beside torch's operations in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.packing.device import triton_fault
from megatron.packing.model.attention.rotary import _is_fused, _Turn, turns_of

TOKENS, GROUPS, SHARED = 1000, 4, 3
"""Heads that share a key come before it in the product of all groups, and its value behind it."""


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize(
    ("width", "turned"), [(64, 64), (80, 80), (128, 128), (256, 256), (96, 40)]
)
def test_queries_and_keys_are_turned_as_in_float64(
    width: int, turned: int, is_interleaved: bool, device: torch.device
) -> None:
    """A pair of the wrong channels, or a stride of another head, trains on other positions."""
    options: dict[str, Any] = {
        "device": device,
        "generator": torch.Generator(device).manual_seed(1),
    }
    channels = GROUPS * (SHARED + 2) * width
    product = torch.randn(TOKENS, 1, channels, dtype=torch.bfloat16, **options)
    angles = 100 * torch.rand(TOKENS, 1, 1, turned // 2, **options)
    twice = angles.repeat_interleave(2, -1) if is_interleaved else torch.cat((angles, angles), -1)
    cos, sin, _ = turns_of(twice, width, is_interleaved, 1.2, torch.bfloat16)
    weights = torch.randn(TOKENS, 1, channels, dtype=torch.bfloat16, **options)

    def parts(x: torch.Tensor) -> list[torch.Tensor]:
        """As megatron-core cuts them."""
        query, key, _ = x.view(TOKENS, 1, GROUPS, -1).split((SHARED * width, width, width), -1)
        return [query.reshape(TOKENS, 1, -1, width), key]

    def outputs_and_gradient(dtype: torch.dtype) -> list[torch.Tensor]:
        x = product.detach().to(dtype).requires_grad_()
        out = _Turn.apply(*parts(x), cos.to(dtype), sin.to(dtype), is_interleaved)
        return [*out, *torch.autograd.grad(out, x, parts(weights.to(dtype)))]

    found = outputs_and_gradient(torch.bfloat16)
    if device.type == "cuda":
        assert triton_fault() is None
        assert _is_fused(product)
    # Torch's operations round products, the kernel only its outputs.
    atol = 1e-6 if device.type == "cuda" else 4e-2
    for one, expected in zip(found, outputs_and_gradient(torch.float64), strict=True):
        torch.testing.assert_close(one.double(), expected, rtol=2**-7, atol=atol)
