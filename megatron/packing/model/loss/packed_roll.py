"""mcore. Multi-token prediction looks one token further in all sequences of a pack at once.

megatron-core rolls tokens, labels and masks sequence by sequence, and with context parallel sends
the borders of each sequence in messages of their own. Here a roll is a handful of operations, and
one gather of all borders.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, update_wrapper
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.packing.device import to_device
from megatron.packing.model.attention.zigzag import Lengths, padded_lengths


class PackedRoll:
    """megatron-core's `_roll_tensor_packed_seq`: of [..., t], each token's successor in its
    sequence, or zero.
    """

    def __init__(self, plain: Callable[..., Any]) -> None:
        update_wrapper(self, plain)

    def __call__(
        self,
        tensor: Tensor,
        shifts: int,
        dims: int,
        packed_seq_params: Any,
        cp_group: dist.ProcessGroup | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See megatron-core: the roll is by one to the left, of the last dimension; its sum comes
        with it.
        """
        assert (shifts, dims % tensor.dim()) == (-1, tensor.dim() - 1)
        size = 1 if cp_group is None else cp_group.size()
        firsts, lasts = _ends_of_pieces(padded_lengths(packed_seq_params), size, tensor.device)
        rolled = tensor.roll(-1, -1)
        if cp_group is None or size == 1:
            rolled.index_fill_(-1, lasts, 0)
        else:
            rolled.index_copy_(-1, lasts, _successors(tensor.index_select(-1, firsts), cp_group))
        return rolled, rolled.sum()


@lru_cache(maxsize=32)
def _ends_of_pieces(lengths: Lengths, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns int64 [pieces]: first and last token of each piece of a shard: two of a sequence, or
    one without cp.
    """
    segments = np.array([length for length in lengths if length], np.int64)
    pieces = segments if size == 1 else (segments // (2 * size)).repeat(2)
    ends = pieces.cumsum()
    return to_device(torch.from_numpy(ends - pieces), device), to_device(
        torch.from_numpy(ends - 1), device
    )


def _successors(firsts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns what follows each piece, from the first tokens [..., 2 * sequences] of each rank's
    pieces.

    Rank r's pieces are r and 2 cp - 1 - r. After the first comes rank r + 1's first, at the last
    rank its own second; after the second comes rank r - 1's second, at rank 0 nothing.
    """
    mine = firsts.unflatten(-1, (-1, 2)).contiguous()
    gathered = mine.new_empty(group.size() * len(mine), *mine.shape[1:])
    dist.all_gather_into_tensor(gathered, mine, group=group)
    of_ranks = gathered.unflatten(0, (group.size(), -1))
    rank = group.rank()
    after_first = mine[..., 1] if rank == group.size() - 1 else of_ranks[rank + 1][..., 0]
    after_second = of_ranks[rank - 1][..., 1] if rank else torch.zeros_like(after_first)
    return torch.stack((after_first, after_second), dim=-1).flatten(-2)
