"""tensor. Rotary embeddings in Triton: one pass over queries, and one over keys.

torch's operations (`rotary`) read and write each of them three times. Here products and sums are
float32, and rounded once. Needs `triton`, which comes with torch for CUDA.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_MOST_PAIRS = 2048
"""Pairs of channels that a program holds at most."""
_PAIRS_PER_WARP = 256
"""Eight for each thread: it reads 16 bytes at once in half precision."""


def turned(x: Tensor, cos: Tensor, sin: Tensor, is_interleaved: bool, sign: int = 1) -> Tensor:
    """Returns `x` with each pair of channels turned, and the others as they are: a new tensor.

    x: [t, b, heads, d], of any strides. cos, sin: those of `Turns`, dense. sign: -1 turns back.
    """
    tokens, batch, heads, width = x.shape
    if x.stride(-1) != 1:
        x = x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    sizes = sizes_of(heads, width, sin.shape[-1])
    if out.numel():
        _turn[(tokens * batch, triton.cdiv(heads, sizes["HEAD_BLOCK"]))](
            x,
            out,
            cos,
            sin,
            float(sign),  # as an int, 1 would be compiled into a kernel of its own
            batch,
            heads,
            x.stride(0),
            x.stride(1),
            x.stride(2),
            cos.stride(0),
            sin.stride(0),
            IS_INTERLEAVED=is_interleaved,
            **sizes,
        )
    return out


def sizes_of(heads: int, width: int, num_pairs: int) -> dict[str, int]:
    """Returns the constants of the kernel for heads of `width` channels, and its warps."""
    pair_block = triton.next_power_of_2(num_pairs)
    head_block = min(triton.next_power_of_2(heads), max(1, _MOST_PAIRS // pair_block))
    num_rest = width - 2 * num_pairs
    return {
        "WIDTH": width,
        "NUM_PAIRS": num_pairs,
        "HEAD_BLOCK": head_block,
        "PAIR_BLOCK": pair_block,
        "REST_BLOCK": triton.next_power_of_2(num_rest) if num_rest else 0,
        "num_warps": min(8, max(1, head_block * pair_block // _PAIRS_PER_WARP)),
    }


@triton.jit
def _turn(
    x,
    out,
    cos,
    sin,
    sign,
    batch,
    heads,
    token_stride,
    batch_stride,
    head_stride,
    cos_stride,
    sin_stride,
    WIDTH: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    PAIR_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)  # tokens times channels go beyond int32
    token = row // batch
    x += token * token_stride + (row % batch) * batch_stride
    out += row * heads * WIDTH
    head = tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)[:, None]
    is_head = head < heads
    pair = tl.arange(0, PAIR_BLOCK)[None, :]
    is_pair = pair < NUM_PAIRS
    if IS_INTERLEAVED:
        first = 2 * pair
        second = first + 1
    else:
        first = pair
        second = first + NUM_PAIRS
    c = tl.load(cos + token * cos_stride + first, mask=is_pair, other=0.0).to(tl.float32)
    s = tl.load(sin + token * sin_stride + pair, mask=is_pair, other=0.0).to(tl.float32) * sign
    mask = is_head & is_pair
    a = tl.load(x + head * head_stride + first, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x + head * head_stride + second, mask=mask, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    tl.store(out + head * WIDTH + first, (a * c - b * s).to(dtype), mask=mask)
    tl.store(out + head * WIDTH + second, (b * c + a * s).to(dtype), mask=mask)
    if REST_BLOCK > 0:
        rest = 2 * NUM_PAIRS + tl.arange(0, REST_BLOCK)[None, :]
        stays = is_head & (rest < WIDTH)
        kept = tl.load(x + head * head_stride + rest, mask=stays, other=0.0)
        tl.store(out + head * WIDTH + rest, kept, mask=stays)
