"""tensor. Multiplies numbers by scales that blocks of a matrix share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_NUM_VALUES = 1 << 19
"""Values at a time: few enough for a processor's cache, and all the memory beside the result."""
_EXPONENT_BIAS = 127


def dequantize(
    decode: Callable[[int, int, Tensor], None],
    scales: Tensor,
    block: tuple[int, int],
    first: tuple[int, int],
    out: Tensor,
    rounding: torch.dtype | None = None,
) -> None:
    """Fills `out` with numbers times the scales of their blocks. The product is that of float32,
    rounded once to the type of `out`.

    Args:
        decode: function that fills a float32 tensor with the numbers of rows [begin, end) of `out`.
        scales: [a, b], of the whole matrix.
        block: rows and columns that share a scale.
        first: row and column in the matrix at which `out` begins.
        out: [n, k] of any type of floats.
        rounding: type to round the product to before that.
    """
    num_rows, num_columns = out.shape
    rows_at_once = min(num_rows, max(1, _NUM_VALUES // max(1, num_columns)))
    buffer = torch.empty(rows_at_once, num_columns)
    for begin in range(0, num_rows, max(1, rows_at_once)):
        end = min(begin + rows_at_once, num_rows)
        values = buffer[: end - begin]
        decode(begin, end, values)
        of_rows = _of_range(scales, 0, block[0], first[0] + begin, end - begin)
        values.mul_(_of_range(of_rows, 1, block[1], first[1], num_columns))
        out[begin:end] = values if rounding is None else values.to(rounding)


def _of_range(scales: Tensor, dim: int, size: int, first: int, count: int) -> Tensor:
    """Returns the scale of each row (or column) from `first` on. Where all have the same, it
    returns one, which broadcasts.

    Rows 3 to 6 in blocks of 4 have the scales 0, 1, 1, 1.
    """
    begin, end = first // size, (first + count - 1) // size + 1
    some = scales.narrow(dim, begin, end - begin)
    if end - begin == 1:
        return some
    return some.repeat_interleave(size, dim).narrow(dim, first - begin * size, count)


def widened(scales: Tensor) -> Tensor:
    """Returns scales as float32. Bytes are exponents: s stands for 2 ** (s - 127)."""
    if scales.dtype == torch.uint8:
        return torch.ldexp(torch.ones(scales.shape), scales.to(torch.int32) - _EXPONENT_BIAS)
    return scales.to(torch.float32)
