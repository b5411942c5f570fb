"""tensor. Reads numbers of 8 bits, float8_e4m3fn: a sign, 4 bits of exponent and 3 of mantissa (OCP
8-bit Floating Point Specification, revision 1.0).
"""

from __future__ import annotations

import torch
from torch import Tensor

UNIT = 2.0**-8
"""Factor of the numbers that `from_fp8` returns: exponents of float16 count from 2 ** -15, those of
codes from 2 ** -7.
"""
_NAN = 0x7F
"""Code of NaN without its sign. It would be 480, above the largest number, 448."""


def from_fp8(codes: Tensor, values: Tensor) -> None:
    """Fills `values` with the numbers that codes stand for, times `UNIT`.

    The 7 bits of a code behind its sign become the lower 4 of the 5 bits of a float16's exponent
    and the upper 3 of its mantissa. 0x38 (1.0) becomes 0x1C00, which is 2 ** -8. Subnormal codes
    become subnormal, exactly. On a CPU this takes a tenth of the time of torch's own conversion
    (2.13: 7 ns a number).

    Args:
        codes: float8_e4m3fn [n, k].
        values: float32 [n, k].
    """
    bits = codes.view(torch.int8).to(torch.int16)  # both upper bits are the sign
    values.copy_(bits.bitwise_left_shift_(7).bitwise_and_(~0x4000).view(torch.float16))
    # The largest code, read with and without a sign, is NaN if there is any.
    signed, unsigned = codes.view(torch.int8), codes.view(torch.uint8)
    if codes.numel() and (signed.amax() == _NAN or unsigned.amax() == _NAN + 0x80):
        values[unsigned.bitwise_and(_NAN) == _NAN] = torch.nan
