"""tensor. Reads whole numbers of 4 bits, eight in an int32, as compressed-tensors packs them."""

from __future__ import annotations

import torch
from torch import Tensor

_BITS = 4
_PER_WORD = 8
_ZERO = 8


def from_int4(words: Tensor, values: Tensor, first: int = 0) -> None:
    """Fills `values` with the numbers -8 to 7 that words hold, the lowest bits first.

    The word 0x0000009F has the numbers 7 (0xF), 1 (0x9), and six times -8.

    Args:
        words: int32 [n, w].
        values: float32 [n, k].
        first: column of the first number to take, of the 8 * w that the words have.
    """
    shifts = torch.arange(0, _BITS * _PER_WORD, _BITS, dtype=torch.int32)
    numbers = words.unsqueeze(-1).bitwise_right_shift(shifts).bitwise_and_(0xF).sub_(_ZERO)
    values.copy_(numbers.flatten(1)[:, first : first + values.shape[1]])
