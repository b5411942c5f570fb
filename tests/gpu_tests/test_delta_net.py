"""The gated delta net's kernels on this device, against the same rule in float64, and each sequence
alone.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron.packing.device import Device
from megatron.packing.model.parts.delta_rule import (
    Inputs,
    causal_convolution,
    gated_delta_rule,
    has_kernels,
)

LENGTHS = (1, 300, 64, 5, 129)
HEADS, WIDTH = 4, 64


@pytest.fixture(autouse=True)
def kernels(device: torch.device) -> None:
    if device.type == "cuda" and not has_kernels(Device.at(device), torch.bfloat16):
        pytest.skip("flash-linear-attention is not installed")


def leaves(device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(sum(LENGTHS), *shape, generator=generator)

    tensors = [random(HEADS, WIDTH), random(HEADS, WIDTH), random(2 * HEADS, WIDTH)]
    tensors = [x.to(torch.bfloat16) for x in tensors]
    tensors += [-random(2 * HEADS).exp(), random(2 * HEADS).sigmoid().to(torch.bfloat16)]
    return [x.to(device).requires_grad_() for x in tensors]


def with_gradients(inputs: list[Tensor], lengths: tuple[int, ...]) -> list[Tensor]:
    out = gated_delta_rule(Inputs(*inputs), lengths)
    generator = torch.Generator().manual_seed(2)
    weights = torch.randn(out.shape, generator=generator).to(out)
    gradients = torch.autograd.grad((out * weights).sum(), inputs)
    return [x.double().cpu() for x in (out.detach(), *gradients)]


def relative(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


def test_rule_and_its_gradients_are_those_in_float64(device: torch.device) -> None:
    """A state that leaks over a border of sequences still trains."""
    inputs = leaves(device)
    try:
        with_gradients(inputs, LENGTHS)
    except RuntimeError as failure:  # its own word on some releases of Triton and some devices
        if "incorrect results" not in str(failure):
            raise
        pytest.skip(f"flash-linear-attention refuses: {failure}")
    exact = [x.detach().double().cpu().requires_grad_() for x in inputs]
    for found, expected in zip(with_gradients(inputs, LENGTHS), with_gradients(exact, LENGTHS)):
        assert relative(found, expected) < 8 * torch.finfo(torch.bfloat16).eps


def test_each_sequence_alone(device: torch.device) -> None:
    inputs = leaves(device)
    whole = gated_delta_rule(Inputs(*inputs), LENGTHS).split(LENGTHS)
    x, weight = inputs[2].flatten(1), torch.randn(2 * HEADS * WIDTH, 4).to(inputs[2])
    convolved = causal_convolution(x, weight, LENGTHS).split(LENGTHS)
    end = 0
    for number, length in enumerate(LENGTHS):
        part = slice(end, end + length)
        end += length
        alone = gated_delta_rule(Inputs(*(y[part] for y in inputs)), (length,))
        assert relative(whole[number].double(), alone.double()) < 1e-2
        alone = causal_convolution(x[part], weight, (length,))
        assert relative(convolved[number].double(), alone.double()) < 1e-2
