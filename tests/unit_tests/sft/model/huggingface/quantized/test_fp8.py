"""Numbers of 8 bits, beside torch's own conversion."""

import torch

from megatron.sft.model.huggingface.quantized.fp8 import UNIT, from_fp8


def test_all_codes_are_torchs_numbers():
    """A subnormal that became zero, or a NaN that became a number, would change few weights of a
    model, in silence.
    """
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(8, 32)
    values = torch.empty(8, 32)
    from_fp8(codes, values)
    values /= UNIT
    expected = codes.to(torch.float32)
    assert torch.equal(values.isnan(), expected.isnan())
    assert expected.isnan().sum() == 2
    # Bits, so that -0.0 is not 0.0.
    known = ~expected.isnan()
    assert torch.equal(values[known].view(torch.int32), expected[known].view(torch.int32))


def test_slices_of_columns_are_read():
    """A tensor-parallel rank reads columns, which do not lie together in memory."""
    codes = torch.randn(6, 40).to(torch.float8_e4m3fn)
    values = torch.empty(6, 8)
    from_fp8(codes[:, 16:24], values)
    assert torch.equal(values / UNIT, codes[:, 16:24].to(torch.float32))
