"""Products that are added to float32 on this device, beside float64."""

from __future__ import annotations

import pytest
import torch

from megatron.sft.model.weight_gradients import add_product


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("rows", "out", "width"), [(4096, 384, 256), (37, 1, 64), (129, 33, 17), (0, 33, 16)]
)
def test_they_are_added_without_rounding_in_between(
    rows: int, out: int, width: int, dtype: torch.dtype, device: torch.device
) -> None:
    """What is there, by an addition of another shape (`beta`, a vector), would be lost, or counted
    in every row. On CUDA sums are not rounded to the operands' precision.
    """
    generator = torch.Generator(device).manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    x, gradient = random(rows, width).to(dtype), random(rows, out).to(dtype)
    buffer = random(out * width + 64)  # as gradients lie in megatron-core's
    total = buffer[64:].view(out, width)
    expected = total.double() + gradient.double().t() @ x.double()
    for_all = buffer[:64].clone()
    add_product(x, gradient, total)
    is_rounded = dtype == torch.bfloat16 and device.type == "cpu"
    apart = 2e-2 if is_rounded else 1e-5
    scale = max(rows, 1) ** 0.5
    torch.testing.assert_close(total.double(), expected, rtol=apart, atol=apart * scale)
    assert torch.equal(buffer[:64], for_all)
