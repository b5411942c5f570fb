"""mcore. Rotary embeddings of a pack, applied to all its tokens at once.

megatron-core cuts the frequencies sequence by sequence, for queries, for keys and in each layer,
and takes their cosines and sines again each time. Here that is done once per microbatch; a layer
turns queries and keys by the result, in three operations each, or on CUDA in one (`fused_rotary`).
Where Transformer Engine's fused kernel is on (`apply_rope_fusion`), that is left to it.

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
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
    _yarn_get_concentration_factor_from_config,
)
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor

from megatron.packing.device import takes_triton, to_device
from megatron.packing.model.attention.tree_keys import depths_of
from megatron.packing.model.attention.zigzag import (
    Lengths,
    padded_lengths,
    positions_of_tokens,
    shard_index,
)


class PackedSelfAttention(SelfAttention):
    """megatron-core's self-attention, whose queries and keys of a pack are turned as they leave
    their projection.

    rotary: the rotary embedding of this layer, in place of the model's one, for rows of a batch as
    for packs. query_scale: what queries are multiplied by after that. has_proj_bias: the output
    projection has a bias, whatever the config says of all layers.
    """

    _turned_by: tuple[Tensor | None, Any] | None = None
    """During a forward pass: frequencies (None: of `rotary`), and the `packed_seq_params`."""

    def __init__(
        self,
        *arguments: Any,
        rotary: LayerRotary | None = None,
        query_scale: QueryScale | None = None,
        has_proj_bias: bool = False,
        **options: Any,
    ) -> None:
        config = options["config"]
        has_biases = config.add_bias_linear
        try:
            # megatron-core's only switch, which its constructor reads; also for queries, keys and
            # values, which have biases wherever the output has one.
            config.add_bias_linear = has_biases or has_proj_bias
            super().__init__(*arguments, **options)
        finally:
            config.add_bias_linear = has_biases
        self.rotary, self.query_scale = rotary, query_scale

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
        frequencies = None
        if self.rotary is not None:
            rotary_pos_emb = None
        elif (
            is_pack
            and isinstance(rotary_pos_emb, Tensor)
            and not (is_skipped or self.config.apply_rope_fusion)
        ):
            frequencies, rotary_pos_emb = rotary_pos_emb, None
        # Not by torch's `__setattr__`, which looks for parameters and modules in each layer.
        self.__dict__["_turned_by"] = frequencies, packed_seq_params if is_pack else None
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
            self.__dict__["_turned_by"] = None

    def get_query_key_value_tensors(self, *arguments: object, **options: object) -> Any:
        """See megatron-core; query and key [t, 1, heads, d] are turned here, after their norms."""
        parts = super().get_query_key_value_tensors(*arguments, **options)
        if len(parts) == 4:
            parts = (*parts[:3], self._cut_gates(parts[0], parts[3]))
        if self._turned_by is None:
            return parts  # called by others than `forward`
        query, key, *others = parts
        frequencies, pack = self._turned_by
        if self.rotary is not None:
            turns = self.rotary.turns(self._places(pack, query), query)
        elif frequencies is not None:
            turns = self._turns(frequencies, pack, query)
        else:
            turns = None
        if turns is not None:
            query, key = _Turn.apply(query, key, *turns)
        if self.query_scale is not None:  # also before a kernel turns: a factor commutes with that
            query = query * self.query_scale.factors(self._places(pack, query), query)
        return (query, key, *others)

    def _cut_gates(self, query: Tensor, gate: Tensor) -> Tensor:
        """Returns the gates [t, 1, heads, d] of this rank's heads.

        With fewer groups of queries than tensor-parallel ranks 0.16.1 has those of the whole group.

        2 heads of 4 in a group, rank 1 of 2    ->    gate[:, :, 2:]
        """
        num_heads = query.shape[2]
        place = self.pg_collection.tp.rank() % (gate.shape[2] // num_heads)
        return gate.narrow(2, place * num_heads, num_heads)

    def _apply_output_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """See megatron-core, which compiles this; at least in float32, and rounded once."""
        wide = torch.promote_types(x.dtype, torch.float32)
        return (x * torch.sigmoid(gate.reshape(x.shape).to(wide))).to(x.dtype)

    def _places(self, pack: Any, query: Tensor) -> Places:
        cp = self.pg_collection.cp
        rows = (len(query) * cp.size(),)  # each row of a batch is a sequence of its own
        if pack is None:
            return Places(rows, cp.size(), cp.rank())
        return Places(padded_lengths(pack), cp.size(), cp.rank(), depths_of(pack))

    def _turns(self, frequencies: Tensor, packed_seq_params: Any, query: Tensor) -> Turns:
        """Returns the angles of the microbatch, which all layers share: they are kept with what
        describes it.
        """
        kept = getattr(packed_seq_params, "turns", None)
        if kept is None or kept[0] is not frequencies or kept[1].cos.dtype != query.dtype:
            places = self._places(packed_seq_params, query)
            is_of_pack = self.config.mrope_section is not None and getattr(
                packed_seq_params, "has_axes", False
            )
            if is_of_pack and len(frequencies) != sum(places.lengths):
                raise ValueError(
                    f"a pack of {sum(places.lengths)} tokens must have as many positions along "
                    f"axes, but the model's rotary embedding has {len(frequencies)}; call "
                    "plugin.install(config, arguments), so that context parallel cuts sequences "
                    "and not the pack"
                )
            of_tokens = frequencies_of_tokens(frequencies, *places, is_of_pack=is_of_pack)
            scale = _yarn_get_concentration_factor_from_config(self.config)
            is_interleaved = self.config.rotary_interleaved
            kept = (
                frequencies,
                turns_of(of_tokens, query.shape[-1], is_interleaved, scale, query.dtype),
            )
            packed_seq_params.turns = kept
        return kept[1]


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


class QueryScale:
    """Factors of queries that grow with the position: 1 + beta * log(1 + floor(position / length)),
    computed in float32 (Ministral 3, Mistral 4).
    """

    def __init__(self, beta: float, original_length: int) -> None:
        """original_length: positions that the model was trained for before it was extended."""
        self.beta, self.original_length = beta, original_length
        self._kept: tuple[object, Tensor] | None = None

    def factors(self, places: Places, query: Tensor) -> Tensor:
        """Returns [t, 1, 1, 1], of the type of `query`."""
        key = (places, query.dtype, query.device)
        if self._kept is None or self._kept[0] != key:
            blocks = torch.floor(places.positions(query.device) / self.original_length)
            factors = 1 + self.beta * torch.log(1 + blocks)
            self._kept = key, factors.to(query.dtype)[:, None, None, None]
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
