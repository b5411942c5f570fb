"""tensor. Which tokens of a pack a context-parallel rank holds, and how to see a whole pack again.

Each sequence is cut in 2 cp equal pieces; rank r holds pieces r and 2 cp - 1 - r, so that causal attention costs
every rank the same. All results are pure functions of (lengths, size, rank) and cached, since every layer asks for
the same ones.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


@lru_cache(maxsize=32)
def shard_index(padded_lengths: tuple[int, ...], size: int, rank: int) -> Tensor | None:
    """int64 [T / size]: positions in the pack of the tokens that `rank` holds, sequence by sequence; None for all of
    them.
    """
    if size == 1:
        return None
    starts = np.cumsum((0, *padded_lengths[:-1]))
    return torch.from_numpy(np.concatenate([_pieces(start, n, size, rank) for start, n in zip(starts, padded_lengths)]))


def _pieces(start: int, length: int, size: int, rank: int) -> np.ndarray:
    piece = length // (2 * size)
    return start + np.concatenate(
        (np.arange(rank * piece, (rank + 1) * piece), np.arange(length - (rank + 1) * piece, length - rank * piece))
    )


class Half(NamedTuple):
    """One of the two pieces of every sequence that a rank holds, as causal attention sees it."""

    query_index: Tensor
    """int64: where the piece's tokens stand in the rank's own shard."""
    key_index: Tensor
    """int64: where all tokens up to the piece's last stand in the shards of all ranks, one after the other."""
    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]


class Zigzag(NamedTuple):
    """A rank's two halves, and how to put their outputs back in the order of its shard."""

    halves: tuple[Half, Half]
    output_index: Tensor


@lru_cache(maxsize=32)
def zigzag(padded_lengths: tuple[int, ...], size: int, rank: int, device: torch.device) -> Zigzag:
    """What rank `rank` of `size` (at least 2) attends to, for packs whose keys were gathered from all ranks in rank
    order.
    """
    gathered = np.empty(sum(padded_lengths), dtype=np.int64)
    shards = [shard_index(padded_lengths, size, r) for r in range(size)]
    gathered[torch.cat([shard for shard in shards if shard is not None]).numpy()] = np.arange(len(gathered))
    starts = np.cumsum((0, *padded_lengths[:-1]))
    pieces = [length // (2 * size) for length in padded_lengths]
    local_starts = np.cumsum([0] + [2 * piece for piece in pieces[:-1]])
    halves = []
    for which, number in enumerate((rank, 2 * size - 1 - rank)):
        query = [np.arange(local + which * p, local + (which + 1) * p) for local, p in zip(local_starts, pieces)]
        key = [gathered[start : start + (number + 1) * p] for start, p in zip(starts, pieces)]
        halves.append(
            Half(
                query_index=torch.from_numpy(np.concatenate(query)).to(device, non_blocking=True),
                key_index=torch.from_numpy(np.concatenate(key)).to(device, non_blocking=True),
                query_lengths=tuple(pieces),
                key_lengths=tuple((number + 1) * p for p in pieces),
            )
        )
    output_index = torch.cat([half.query_index for half in halves]).argsort()
    return Zigzag((halves[0], halves[1]), output_index)
