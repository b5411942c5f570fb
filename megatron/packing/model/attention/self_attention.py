"""mcore. Self-attention of packs: what is done to queries and keys between their projection and
their products.

In this order: their norms (megatron-core's, or `norms.WholeWidthNorm`), the rotary embedding of the
model or of the layer, a scale of queries by position. A gate multiplies the output.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
    _yarn_get_concentration_factor_from_config,
)
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor

from megatron.packing.model.attention.rotary import (
    LayerRotary,
    Places,
    Turns,
    frequencies_of_tokens,
    places_of,
    turn,
    turns_of,
)
from megatron.packing.model.layers.norms import plain_rms_norm


class PackedSelfAttention(SelfAttention):
    """megatron-core's self-attention, whose queries and keys of a pack are turned as they leave
    their projection.

    rotary: the rotary embedding of this layer, in place of the model's one, for rows of a batch as
    for packs. query_scale: what queries are multiplied by after that. has_proj_bias: the output
    projection has a bias, whatever the config says of all layers. has_value_norm: values have a
    norm without weights.
    """

    _turned_by: tuple[Tensor | None, Any] | None = None
    """During a forward pass: frequencies (None: of `rotary`), and the `packed_seq_params`."""

    def __init__(
        self,
        *arguments: Any,
        rotary: LayerRotary | None = None,
        query_scale: QueryScale | None = None,
        has_proj_bias: bool = False,
        has_value_norm: bool = False,
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
        self.has_value_norm = has_value_norm
        if getattr(config, "query_groups_per_gather", None):
            # What norms keep is else a view of all that was projected, of which nothing else is
            # needed: keys and values are copied for core attention.
            for norm in (self.q_layernorm, self.k_layernorm):
                if norm is not None:
                    norm.register_forward_pre_hook(_dense)

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
        if self.has_value_norm:
            value = plain_rms_norm(parts[2], self.config.layernorm_epsilon)
            parts = (*parts[:2], value, *parts[3:])
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
            query, key = turn(query, key, turns)
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
        return places_of(pack, len(query), self.pg_collection.cp)

    def _turns(self, frequencies: Tensor, packed_seq_params: Any, query: Tensor) -> Turns:
        """Returns the angles of the microbatch, which all layers share: they are kept with what
        describes it.
        """
        cached = getattr(packed_seq_params, "turns", None)
        if cached is None or cached[0] is not frequencies or cached[1].cos.dtype != query.dtype:
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
            cached = (
                frequencies,
                turns_of(of_tokens, query.shape[-1], is_interleaved, scale, query.dtype),
            )
            packed_seq_params.turns = cached
        return cached[1]


def _dense(norm: object, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Returns inputs whose memory holds nothing else."""
    x = inputs[0]
    is_whole = x.is_contiguous() and x.untyped_storage().nbytes() == x.nbytes
    return x if is_whole else x.clone(memory_format=torch.contiguous_format), *inputs[1:]


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
