"""mcore. Rotary embeddings of a pack, applied to all its tokens at once.

megatron-core cuts the frequencies sequence by sequence, for queries, for keys and in each layer,
and takes their cosines and sines again each time. Here that is done once per microbatch; a layer
(see `self_attention`) turns queries and keys by the result, in three operations each, or on CUDA in
one (`fused_rotary`). Where Transformer Engine's fused kernel is on (`apply_rope_fusion`), that is
left to it.

Multimodal rotary embeddings are of positions along axes, which are given for the whole pack and
restart in each sequence. A layer takes those of its tokens (see `give_whole_packs`).

Layers with a rotary embedding of their own (Gemma 3's windowed ones have another base) are given a
`LayerRotary`, which layers of a kind share. Layers without one are megatron-core's `no_rope_freq`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import (
    MultimodalRotaryEmbedding,
)
from torch import Tensor
from torch import distributed as dist

from megatron.packing.device import takes_triton, to_device
from megatron.packing.model.attention.tree_keys import depths_of
from megatron.packing.model.attention.zigzag import (
    Lengths,
    padded_lengths,
    positions_of_tokens,
    shard_index,
)


class Places(NamedTuple):
    """Positions of the tokens of a context-parallel rank in their sequences."""

    lengths: Lengths
    size: int
    rank: int
    depths: Lengths = ()
    """Tokens of the path before each segment, where segments are the nodes of trees."""

    def positions(self, device: torch.device) -> Tensor:
        """Returns float32 [t]: positions, which are exact up to 2^24."""
        return to_device(positions_of_tokens(*self).to(torch.float32), device)


def places_of(pack: Any, num_tokens: int, group: dist.ProcessGroup) -> Places:
    """Returns the places of a context-parallel rank's tokens.

    Args:
        pack: PackedSeqParams; None where each row of a batch is a sequence of its own.
        num_tokens: of this rank, in a row.
        group: context-parallel ranks.
    """
    size, rank = group.size(), group.rank()
    if pack is None:
        return Places((num_tokens * size,), size, rank)
    return Places(padded_lengths(pack), size, rank, depths_of(pack))


def give_whole_packs(model: torch.nn.Module) -> None:
    """Has the multimodal rotary embeddings of a model give the frequencies of all tokens.

    megatron-core's would cut them over context-parallel ranks as if the pack were one sequence.
    """
    for module in model.modules():
        if isinstance(module, MultimodalRotaryEmbedding):
            module.cp_group = None


class LayerRotary:
    """The rotary embedding of a kind of layers. What one microbatch needs is kept for the next
    layer; the layers of a kind share it.
    """

    def __init__(
        self, inv_freq: Tensor, *, is_interleaved: bool = False, scale: float = 1.0
    ) -> None:
        """inv_freq: radians per position of each pair of channels that is turned, float32. scale:
        of cosines and sines, YaRN's.
        """
        self.inv_freq, self.is_interleaved, self.scale = inv_freq, is_interleaved, scale
        self._kept: tuple[object, Turns] | None = None

    def turns(self, places: Places, query: Tensor) -> Turns:
        """Returns those of the tokens at `places`, of the type and width of `query`."""
        key = (places, query.dtype, query.device, query.shape[-1], self.inv_freq)
        if self._kept is None or not _is_same(self._kept[0], key):
            self.inv_freq = self.inv_freq.to(query.device)
            positions = places.positions(query.device).to(self.inv_freq.dtype)
            angles = torch.outer(positions, self.inv_freq)
            twice = (
                angles.repeat_interleave(2, -1)
                if self.is_interleaved
                else torch.cat((angles, angles), -1)
            )
            turns = turns_of(
                twice[:, None, None], query.shape[-1], self.is_interleaved, self.scale, query.dtype
            )
            self._kept = (*key[:-1], self.inv_freq), turns
        return self._kept[1]


def _is_same(kept: Any, key: Any) -> bool:
    return kept[:-1] == key[:-1] and kept[-1] is key[-1]


class Turns(NamedTuple):
    """Angles by which each token is turned."""

    cos: Tensor
    """[t, 1, 1, d]: for each channel; one for those that stay."""
    sin: Tensor
    """[t, 1, 1, pairs]: for each pair of channels."""
    is_interleaved: bool
    """True if pairs are neighbours, instead of one channel of each half."""


def frequencies_of_tokens(
    frequencies: Tensor,
    lengths: Lengths,
    size: int,
    rank: int,
    depths: Lengths = (),
    *,
    is_of_pack: bool = False,
) -> Tensor:
    """Returns the rows of the tokens that context-parallel `rank` of `size` holds.

    frequencies: [positions, 1, 1, d] by position in the sequence; or by position in the pack, if
    there are as many, and all segments are sequences. is_of_pack: they are by position in the pack.
    """
    if not is_of_pack and (len(frequencies) != sum(lengths) or depths):
        index = positions_of_tokens(lengths, size, rank, depths)
    else:
        shard = shard_index(lengths, size, rank)
        index = torch.arange(sum(lengths)) if shard is None else shard
    return frequencies.index_select(0, to_device(index, frequencies.device))


def turns_of(
    frequencies: Tensor, width: int, is_interleaved: bool, scale: float, dtype: torch.dtype
) -> Turns:
    """frequencies: [t, 1, 1, 2 * pairs], each twice; width: channels of a head; scale: YaRN's, of
    attention scores.
    """
    cos = (frequencies.cos() * scale).to(dtype)
    pairs = frequencies[..., _pairs(frequencies.shape[-1] // 2, is_interleaved)[0]]
    cos = torch.nn.functional.pad(cos, (0, width - cos.shape[-1]), value=1.0)
    return Turns(cos, (pairs.sin() * scale).to(dtype), is_interleaved)


def _pairs(num_pairs: int, is_interleaved: bool) -> tuple[slice, slice]:
    """Returns the channels that are first of a pair, and second."""
    if is_interleaved:
        return slice(0, 2 * num_pairs, 2), slice(1, 2 * num_pairs, 2)
    return slice(num_pairs), slice(num_pairs, 2 * num_pairs)


def turn(query: Tensor, key: Tensor, turns: Turns) -> tuple[Tensor, Tensor]:
    """Returns queries and keys [t, 1, heads, d] turned."""
    return _Turn.apply(query, key, *turns)  # type: ignore[no-any-return, no-untyped-call]


class _Turn(torch.autograd.Function):
    """Turns queries and keys [t, 1, heads, d], and their gradients back; nothing of them is kept
    for that.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, is_interleaved: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.is_interleaved = is_interleaved
        query, key = (_turned(x, cos, sin, is_interleaved) for x in (query, key))
        return query, key

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        back = (_turned(each, cos, sin, ctx.is_interleaved, sign=-1) for each in gradients)
        return *back, None, None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor, is_interleaved: bool, sign: int = 1) -> Tensor:
    if _is_fused(x):
        kernel = import_module("megatron.packing.model.attention.fused_rotary")
        out: Tensor = kernel.turned(x, cos, sin, is_interleaved, sign)
        return out
    first, second = _pairs(sin.shape[-1], is_interleaved)
    out = x * cos
    out[..., first].addcmul_(x[..., second], sin, value=-sign)
    out[..., second].addcmul_(x[..., first], sin, value=sign)
    return out


def _is_fused(x: Tensor) -> bool:
    return x.dtype in (torch.bfloat16, torch.float16) and takes_triton(x)
