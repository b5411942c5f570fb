"""tensor. Reads weights in MXFP4, as gpt-oss is released: four bits per value and one power of two
per 32 values (OCP Microscaling Formats, version 1.0).
"""

from __future__ import annotations

import torch
from torch import Tensor

# The 8 values of 3 bits: two bits of exponent, one of mantissa. The fourth bit is the sign.
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SCALE_BIAS = 127


def from_mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Returns the values [..., 32 * groups] of an MXFP4 tensor. A byte has two values, the low half
    first. The result is exact in bfloat16, unless a value is outside of its range.

    A byte 0x2F has the values -6 (0xF) and 1 (0x2). A scale of 128 doubles both.

    Args:
        blocks: uint8 [..., groups, 16].
        scales: uint8 [..., groups]; scale s multiplies by 2 ** (s - 127).
    """
    if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise ValueError(
            f"MXFP4 blocks and scales must be uint8, but are {blocks.dtype} and {scales.dtype}"
        )
    if blocks.shape[:-1] != scales.shape or blocks.shape[-1] != 16:
        raise ValueError(
            f"MXFP4 blocks must be [..., groups, 16] with scales [..., groups], but are "
            f"{tuple(blocks.shape)} with {tuple(scales.shape)}"
        )
    values = torch.tensor((*_VALUES, *(-value for value in _VALUES)), dtype=dtype)
    halves = torch.stack((blocks & 0x0F, blocks >> 4), dim=-1).flatten(-2)
    exponents = scales.to(torch.int32).sub_(_SCALE_BIAS).unsqueeze(-1)
    return torch.ldexp(values[halves.to(torch.int32)], exponents).flatten(-2)
