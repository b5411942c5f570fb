"""mcore. Rotary embeddings of a pack, applied to all its tokens at once.

megatron-core cuts the frequencies sequence by sequence, for queries, for keys and in each layer,
and takes their cosines and sines again each time. Here that is done once per microbatch; a layer
turns queries and keys by the result, in three operations each. Where Transformer Engine's fused
kernel is on (`apply_rope_fusion`), that is left to it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
    _yarn_get_concentration_factor_from_config,
)
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor

from megatron.packing.model.zigzag import padded_lengths, sent, shard_index, starts_of_tokens


class PackedSelfAttention(SelfAttention):
    """megatron-core's self-attention, whose queries and keys of a pack are turned as they leave
    their projection.
    """

    _turned_by: tuple[Tensor, Any] | None = None
    """During a pack: frequencies, and the `packed_seq_params`."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *arguments: Any,
        rotary_pos_emb: Any = None,
        packed_seq_params: Any = None,
        **options: Any,
    ) -> Any:
        """See megatron-core; what is no pack, or is turned by a fused kernel, goes there as it
        is."""
        is_skipped = self.config.no_rope_freq and self.config.no_rope_freq[self.layer_number - 1]
        is_pack = packed_seq_params is not None and packed_seq_params.qkv_format == "thd"
        if (
            is_pack
            and isinstance(rotary_pos_emb, Tensor)
            and not (is_skipped or self.config.apply_rope_fusion)
        ):
            self._turned_by, rotary_pos_emb = (rotary_pos_emb, packed_seq_params), None
        try:
            return super().forward(
                hidden_states,
                attention_mask,
                *arguments,
                rotary_pos_emb=rotary_pos_emb,
                packed_seq_params=packed_seq_params,
                **options,
            )
        finally:
            self._turned_by = None

    def get_query_key_value_tensors(self, *arguments: object, **options: object) -> Any:
        """See megatron-core; query and key [t, 1, heads, d] are turned here, after their norms."""
        parts = super().get_query_key_value_tensors(*arguments, **options)
        if self._turned_by is None:
            return parts
        query, key, *others = parts
        turns = self._turns(*self._turned_by, query)
        return (_Turn.apply(query, *turns), _Turn.apply(key, *turns), *others)

    def _turns(self, frequencies: Tensor, packed_seq_params: Any, query: Tensor) -> Turns:
        """Those of the microbatch, which all layers share: they are kept with what describes it."""
        kept = getattr(packed_seq_params, "turns", None)
        if kept is None or kept[0] is not frequencies or kept[1].cos.dtype != query.dtype:
            cp = self.pg_collection.cp
            of_tokens = frequencies_of_tokens(
                frequencies, padded_lengths(packed_seq_params), cp.size(), cp.rank()
            )
            scale = _yarn_get_concentration_factor_from_config(self.config)
            is_interleaved = self.config.rotary_interleaved
            kept = (
                frequencies,
                turns_of(of_tokens, query.shape[-1], is_interleaved, scale, query.dtype),
            )
            packed_seq_params.turns = kept
        return kept[1]


class Turns(NamedTuple):
    """By how much each token is turned."""

    cos: Tensor
    """[t, 1, 1, d]: for each channel; one for those that stay."""
    sin: Tensor
    """[t, 1, 1, pairs]: for each pair of channels."""
    is_interleaved: bool
    """Whether pairs are neighbours, instead of one channel of each half."""


def frequencies_of_tokens(
    frequencies: Tensor, lengths: tuple[int, ...], size: int, rank: int
) -> Tensor:
    """Returns the rows of the tokens that context-parallel `rank` of `size` holds.

    frequencies: [positions, 1, 1, d] by position in the sequence; or by position in the pack, if
    there are as many.
    """
    index = shard_index(lengths, size, rank)
    if index is None:
        index = torch.arange(sum(lengths))
    if len(frequencies) != sum(lengths):
        index = index - starts_of_tokens(lengths)[index]
    return frequencies.index_select(0, sent(index, frequencies.device))


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
    """The channels that are first of a pair, and second."""
    if is_interleaved:
        return slice(0, 2 * num_pairs, 2), slice(1, 2 * num_pairs, 2)
    return slice(num_pairs), slice(num_pairs, 2 * num_pairs)


class _Turn(torch.autograd.Function):
    """Turns [t, 1, heads, d], and its gradient back; nothing of `x` is kept for that."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, is_interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.is_interleaved = is_interleaved
        return _turned(x, cos, sin, is_interleaved)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _turned(gradient, cos, sin, ctx.is_interleaved, sign=-1), None, None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor, is_interleaved: bool, sign: int = 1) -> Tensor:
    first, second = _pairs(sin.shape[-1], is_interleaved)
    out = x * cos
    out[..., first].addcmul_(x[..., second], sin, value=-sign)
    out[..., second].addcmul_(x[..., first], sin, value=sign)
    return out
