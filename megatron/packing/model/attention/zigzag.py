"""tensor. Tokens of a pack that a context-parallel rank holds, and what they attend to.

Each sequence is cut in 2 cp equal pieces; rank r holds pieces r and 2 cp - 1 - r, so that causal
attention costs every rank the same. All results are pure functions of (lengths, size, rank) and
cached, since every layer asks for the same ones.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron.packing.batch.columns import expand_ranges
from megatron.packing.device import to_device

Lengths = tuple[int, ...]


def padded_lengths(packed_seq_params: Any) -> Lengths:
    """Returns the length of each segment of a pack, padding included; read once per microbatch, and
    kept with it.
    """
    kept: Lengths | None = getattr(packed_seq_params, "padded_lengths", None)
    if kept is None:
        padded = packed_seq_params.cu_seqlens_q_padded
        kept = tuple((packed_seq_params.cu_seqlens_q if padded is None else padded).diff().tolist())
        packed_seq_params.padded_lengths = kept
    return kept


def starts_of_tokens(lengths: Lengths) -> Tensor:
    """Returns int64 [T]: where each token's segment starts in the pack: (2, 1) -> [0, 0, 2]."""
    segments = np.array(lengths)
    return torch.from_numpy(np.repeat(segments.cumsum() - segments, segments))


@lru_cache(maxsize=32)
def shard_index(lengths: Lengths, size: int, rank: int) -> Tensor | None:
    """Returns int64 [T / size]: positions in the pack of the tokens that `rank` holds, sequence by
    sequence; None for all of them.

    Two sequences of 4 tokens on 2 ranks: rank 0 holds [0, 3, 4, 7], rank 1 holds [1, 2, 5, 6].
    """
    return None if size == 1 else torch.from_numpy(_shard(_nonempty(lengths), size, rank))


def _nonempty(lengths: Lengths) -> npt.NDArray[np.int64]:
    return np.array([length for length in lengths if length], np.int64)


def _shard(segments: npt.NDArray[np.int64], size: int, rank: int) -> npt.NDArray[np.int64]:
    starts, pieces = segments.cumsum() - segments, segments // (2 * size)
    first, last = starts + rank * pieces, starts + segments - (rank + 1) * pieces
    return expand_ranges(np.column_stack((first, last)).ravel(), pieces.repeat(2))


def positions_of_tokens(lengths: Lengths, size: int, rank: int, depths: Lengths = ()) -> Tensor:
    """Returns int64: position in its sequence of each token that `rank` holds: (2, 1) -> [0, 1, 0].

    depths: of segments that continue others, the tokens before them; () for none: (2, 1), (0, 2)
    -> [0, 1, 2].
    """
    index = shard_index(lengths, size, rank)
    if index is None:
        index = torch.arange(sum(lengths))
    positions = index - starts_of_tokens(lengths)[index]
    if depths:
        positions += torch.from_numpy(np.repeat(np.array(depths), np.array(lengths)))[index]
    return positions


def gathered_places(lengths: Lengths, size: int) -> npt.NDArray[np.int64]:
    """Returns int64 [T]: where each token of the pack stands in the shards of all ranks, one after
    the other: (4,), 2 -> [0, 2, 3, 1].
    """
    segments = _nonempty(lengths)
    return np.concatenate([_shard(segments, size, rank) for rank in range(size)]).argsort()


@lru_cache(maxsize=32)
def sequence_order(lengths: Lengths, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns int64 [T] each: where the tokens of a pack in sequence order stand in the shards of
    all ranks, one after the other, and the way back.

    One sequence of 4 at size 2 is gathered as 0 3 1 2: (0 2 3 1, 0 3 1 2).
    """
    segments = _nonempty(lengths)
    gathered = np.concatenate([_shard(segments, size, rank) for rank in range(size)])
    order = torch.from_numpy(gathered.argsort())
    return to_device(order, device), to_device(torch.from_numpy(gathered), device)


class Zigzag(NamedTuple):
    """The keys of a rank's tokens, in their order: each of its two pieces of a sequence attends to
    all tokens up to the piece's last, as far back as a window.
    """

    query_lengths: Lengths
    """Two pieces per sequence."""
    key_lengths: Lengths
    key_index: Tensor
    """int64: where the keys stand in the shards of all ranks, one after the other."""


class PlacesSeen(NamedTuple):
    """`Zigzag` on the host."""

    query_lengths: Lengths
    key_lengths: Lengths
    key_index: npt.NDArray[np.int64]

    def on(self, device: torch.device) -> Zigzag:
        """Returns them on a device."""
        index = to_device(torch.from_numpy(self.key_index), device)
        return Zigzag(self.query_lengths, self.key_lengths, index)


@lru_cache(maxsize=32)
def zigzag(
    lengths: Lengths, size: int, rank: int, device: torch.device, window: int | None = None
) -> Zigzag:
    """Returns what rank `rank` of `size` (at least 2) attends to, where keys were gathered from all
    ranks in rank order; keys before the window of a piece's first token are left out.

    One sequence of 4 at size 2: rank 0 holds tokens 0 and 3, rank 1 holds 1 and 2, so gathered they
    are 0 3 1 2; rank 1's pieces attend to tokens 0 1 and 0 1 2, which stand at 0 2 and 0 2 3. With
    a window of 2 its second piece needs tokens 1 2 only, which stand at 2 3.
    """
    return places_seen(lengths, size, rank, window).on(device)


def places_seen(lengths: Lengths, size: int, rank: int, window: int | None = None) -> PlacesSeen:
    """Returns `zigzag` on the host."""
    segments = _nonempty(lengths)
    starts, pieces = segments.cumsum() - segments, segments // (2 * size)
    gathered = gathered_places(lengths, size)
    num_keys = np.column_stack(((rank + 1) * pieces, segments - rank * pieces)).ravel()
    ends = starts.repeat(2) + num_keys
    if window is not None:
        num_keys = np.minimum(num_keys, pieces.repeat(2) + window - 1)
    return PlacesSeen(
        query_lengths=tuple(pieces.repeat(2).tolist()),
        key_lengths=tuple(num_keys.tolist()),
        key_index=gathered[expand_ranges(ends - num_keys, num_keys)],
    )
