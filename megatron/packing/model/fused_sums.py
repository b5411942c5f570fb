"""tensor. Sums of rows in Triton: outputs of a token's experts, and gradients of its copies.

All rows of a sum are asked for at once, 16 bytes a thread; torch's `embedding_bag` reads one number
a thread and waits for each row. Sums are float32, and rounded once. Needs `triton`, which comes
with torch for CUDA.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK, _WARPS = 1024, 4
"""Channels that a program sums: eight for each thread."""


def row_sums(rows: Tensor, places: Tensor) -> Tensor:
    """Returns for each sum the rows [rows, width] at its `places` [sums, rows of each], int64,
    added: [sums, width]. Floats of at most 32 bits.
    """
    rows, places = rows.contiguous(), places.contiguous()
    num_sums, num_rows = places.shape
    out = torch.empty(num_sums, rows.shape[1], dtype=rows.dtype, device=rows.device)
    if out.numel():
        grid = num_sums, triton.cdiv(rows.shape[1], _BLOCK)
        _sum_rows[grid](
            rows, places, out, rows.shape[1], NUM_ROWS=num_rows, BLOCK=_BLOCK, num_warps=_WARPS
        )
    return out


@triton.jit
def _sum_rows(rows, places, out, width, NUM_ROWS: tl.constexpr, BLOCK: tl.constexpr):
    number = tl.program_id(0).to(tl.int64)  # rows times channels go beyond int32
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < width
    total = tl.zeros((BLOCK,), tl.float32)
    for one in tl.static_range(NUM_ROWS):
        place = tl.load(places + number * NUM_ROWS + one)
        total += tl.load(rows + place * width + column, mask=is_column, other=0.0).to(tl.float32)
    tl.store(out + number * width + column, total.to(out.dtype.element_ty), mask=is_column)
