"""Scales of blocks, beside their definition in float64."""

import pytest
import torch

from megatron.sft.model.huggingface.quantized.scales import dequantize, widened


@pytest.mark.parametrize("block", [(128, 128), (1, 32), (300, 200), (1, 200), (7, 5)])
def test_any_rectangle_has_the_scales_of_its_blocks(block):
    """A rank reads a rectangle that begins and ends within blocks. Off by one row, it would be
    multiplied by the scales of others.
    """
    num_rows, num_columns = 300, 200
    down, across = -(-num_rows // block[0]), -(-num_columns // block[1])
    numbers = torch.randint(-8, 8, (num_rows, num_columns)).float()
    scales = torch.rand(down, across) + 0.5
    rows, columns = (torch.arange(n) // size for n, size in zip(numbers.shape, block))
    exact = numbers.double() * scales.double()[rows][:, columns]
    for top, bottom, left, right in ((0, 300, 0, 200), (127, 259, 31, 33), (5, 6, 199, 200)):
        out = torch.empty(bottom - top, right - left, dtype=torch.bfloat16)

        def decode(begin, end, values):
            values.copy_(numbers[top + begin : top + end, left:right])  # noqa: B023

        dequantize(decode, scales, block, (top, left), out)
        # To float32 first, as the product is computed in it.
        expected = exact[top:bottom, left:right].float().to(torch.bfloat16)
        assert torch.equal(out, expected)


def test_bytes_are_exponents():
    """A byte taken for a number would be a scale of about 120 instead of 1."""
    scales = torch.tensor([[0, 126, 127, 130]], dtype=torch.uint8)
    assert widened(scales).tolist() == [[2.0**-127, 0.5, 1, 8]]
    exponents = scales.view(torch.float8_e8m0fnu)
    assert widened(exponents).tolist() == [[2.0**-127, 0.5, 1, 8]]
