"""mcore. Latent attention of packs: keys and values are made from one narrow vector per token.

    hidden -> linear_q_down_proj -> norm -> linear_q_up_proj -> queries    (or linear_q_proj)
    hidden -> linear_kv_down_proj -> latent | rotated part of keys         one for all heads
    latent -> norm -> linear_kv_up_proj -> keys | values                   of each head
    queries, keys, values -> core attention -> linear_proj

Parameters have the names of megatron-core's MLASelfAttention. Its own layers cannot be built
without Transformer Engine in 0.16.1, and have one epsilon for all norms; this module needs neither
patches nor that, and computes the same on each release.

Tensor parallel: heads. Ranks share the rows of the down projections and gather their narrow
outputs; between the projections each rank has all tokens, also under sequence parallel.

Context parallel: ranks exchange latents and rotated parts instead of keys and values, and each
makes the keys and values of the whole pack. DeepSeek-V3 sends 576 numbers per token instead of
40,960, and each rank's up projection of keys and values takes all tokens of the pack.

`recompute_granularity="selective"` with core_attn exchanges latents and makes keys and values again
in the backward pass, and keeps latents alone. With `query_groups_per_gather` they are made for that
many heads at a time, in both passes (see `attention.by_heads`).
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.models.common.embeddings import yarn_rotary_pos_embedding as yarn
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import linear

from megatron.packing.model.attention.core_attention import PackedDotProductAttention
from megatron.packing.model.attention.rotary import LayerRotary, Places, Turns, turn
from megatron.packing.model.attention.self_attention import QueryScale
from megatron.packing.model.attention.tree_keys import PackTree, depths_of, tree_of
from megatron.packing.model.attention.zigzag import Lengths, padded_lengths
from megatron.packing.model.layers.norms import TorchNorm
from megatron.packing.model.layers.shared_inputs import shared_by_ranks, with_dense_gradient
from megatron.packing.model.parts.latent_attention import LatentAttention
from megatron.packing.model.parts.projections import (
    column_linear,
    output_linear,
    recomputes_core_attention,
)


class LatentSelfAttention(MegatronModule):
    """Takes the place of self-attention in a layer: hidden states [t, 1, h] of a pack with
    `packed_seq_params`, or rows [s, b, h] without.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        part: LatentAttention,
        norm_epsilon: float | None,
        rotary: LayerRotary | None = None,
        query_scale: QueryScale | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        cp_comm_type: str | None = None,
        name: str | None = None,  # megatron-core 0.19 tells each module its own
    ) -> None:
        """part: widths. norm_epsilon: of latents' norms; None for no norms. rotary: of the rotated
        channels; None for that of a MLATransformerConfig. query_scale: of queries, after that.
        """
        super().__init__(config=config)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
        self.layer_number, self.part = layer_number, part
        self.tp_group, self.cp_group = groups.tp, groups.cp
        self.rotary, score_factor = (rotary, 1.0) if rotary is not None else rotary_of_core(config)
        self.query_scale = query_scale
        sizes = part.sizes()
        # Between projections each rank has all tokens.
        self._inner = copy.copy(config)
        self._inner.sequence_parallel = False
        if part.q_lora_rank is None:
            self.linear_q_proj = self._linear(config, config.hidden_size, sizes["queries"])
        else:
            self.linear_q_down_proj = self._linear(config, config.hidden_size, sizes["q_rank"])
            self.q_layernorm = self._norm(sizes["q_rank"], norm_epsilon)
            self.linear_q_up_proj = self._linear(self._inner, sizes["q_rank"], sizes["queries"])
        self.linear_kv_down_proj = self._linear(config, config.hidden_size, sizes["shared"])
        self.kv_layernorm = self._norm(sizes["kv_rank"], norm_epsilon)
        self.linear_kv_up_proj = self._linear(self._inner, sizes["kv_rank"], sizes["keys_values"])
        self.core_attention = PackedDotProductAttention(
            config,
            layer_number,
            AttnMaskType.causal,
            "self",
            softmax_scale=config.softmax_scale or score_factor * part.query_width**-0.5,
            pg_collection=groups,
        )
        self.linear_proj = output_linear(config, sizes["query"], self.tp_group)
        self._recomputes = recomputes_core_attention(config)

    def _linear(self, config: TransformerConfig, width: int, rows: int) -> ColumnParallelLinear:
        return column_linear(config, width, rows, self.tp_group)

    def _norm(self, width: int, epsilon: float | None) -> torch.nn.Module:
        if epsilon is None:
            return torch.nn.Identity()
        return TorchNorm(self._inner, width, epsilon)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: Any = None,
        **others: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns output and bias, as megatron-core's attention, which `others` are for."""
        query, batch = self._queries(hidden_states)
        latent, rotated = self._latents(hidden_states)
        rows = len(query) // batch
        lengths = (
            (rows * self.cp_group.size(),) * batch
            if packed_seq_params is None
            else padded_lengths(packed_seq_params)
        )
        tree = None if packed_seq_params is None else tree_of(packed_seq_params)
        depths = () if packed_seq_params is None else depths_of(packed_seq_params)
        places = Places(lengths, self.cp_group.size(), self.cp_group.rank(), depths)
        query, rotated = self._turned(query, rotated, places)

        def attended(query: Tensor, latent: Tensor, rotated: Tensor) -> Tensor:
            return self._attended(query, latent, rotated, lengths, tree)

        if self.core_attention.is_in_steps:  # which makes them again in the backward pass as well
            found = self._attended_in_steps(query, latent, rotated, lengths, tree)
        elif self._recomputes and self.training:
            found = tensor_parallel.checkpoint(attended, False, query, latent, rotated)
        else:
            found = attended(query, latent, rotated)
        return self.linear_proj(found.view(batch, rows, -1).transpose(0, 1))  # type: ignore[no-any-return]

    def _queries(self, hidden_states: Tensor) -> tuple[Tensor, int]:
        """Returns [t, heads, d] of all tokens that tensor-parallel ranks share, row by row, and the
        number of rows.
        """
        if self.part.q_lora_rank is None:
            found, _ = self.linear_q_proj(hidden_states)
        else:
            latent, _ = self.linear_q_down_proj(hidden_states)
            latent = gather_from_tensor_model_parallel_region(latent, group=self.tp_group)
            found, _ = self.linear_q_up_proj(self.q_layernorm(latent))
        return _by_row(found).unflatten(-1, (-1, self.part.query_width)), found.shape[1]

    def _latents(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Returns [t, width] and the part of keys that is rotated, [t, 1, channels]."""
        found, _ = self.linear_kv_down_proj(hidden_states)
        found = _by_row(gather_from_tensor_model_parallel_region(found, group=self.tp_group))
        latent, rotated = found.tensor_split((self.part.kv_lora_rank,), dim=-1)
        # Each rank's heads use it: backward, their gradients are summed.
        rotated = shared_by_ranks(rotated, self.tp_group)
        return self.kv_layernorm(latent), rotated.unsqueeze(1)

    def _turned(self, query: Tensor, rotated: Tensor, places: Places) -> tuple[Tensor, Tensor]:
        """Returns queries, whose last channels are turned, and the rotated part of keys."""
        stays, turns = query.tensor_split((self.part.qk_head_dim,), dim=-1)
        angles: Turns = self.rotary.turns(places, turns)
        turned, key = turn(turns.unsqueeze(1), rotated.unsqueeze(1), angles)
        query = torch.cat((stays, turned.squeeze(1)), dim=-1)
        if self.query_scale is not None:
            query = query * self.query_scale.factors(places, query).squeeze(1)
        return query, key.squeeze(1)

    def _attended(
        self,
        query: Tensor,
        latent: Tensor,
        rotated: Tensor,
        lengths: Lengths,
        tree: PackTree | None,
    ) -> Tensor:
        """Returns [t, heads * d_v]."""
        shared = self.core_attention.gather(torch.cat((latent, rotated.squeeze(1)), dim=-1))
        latent, rotated = shared.tensor_split((self.part.kv_lora_rank,), dim=-1)
        made, _ = self.linear_kv_up_proj(latent)
        keys_values = self._keys_values(made, rotated)
        return self.core_attention.attend_to_all(query, keys_values, lengths, tree).flatten(1)

    def _attended_in_steps(
        self,
        query: Tensor,
        latent: Tensor,
        rotated: Tensor,
        lengths: Lengths,
        tree: PackTree | None,
    ) -> Tensor:
        """Does as `_attended`, with keys and values of a few heads at a time."""
        up: Any = self.linear_kv_up_proj
        adapter: Any = getattr(up, "adapter", None)
        # Each rank's heads use them: backward, their gradients are summed.
        vectors = [
            shared_by_ranks(latent, self.tp_group),
            rotated.squeeze(1),
            *([] if adapter is None else [with_dense_gradient(adapter.reduced(latent))]),
        ]
        widths = [x.shape[-1] for x in vectors]
        width = self.part.qk_head_dim + self.part.v_head_dim

        def make(gathered: Tensor, heads: slice) -> Tensor:
            latent, rotated, *reduced = gathered.split(widths, dim=-1)
            rows = slice(heads.start * width, heads.stop * width)
            made = linear(latent, up.weight[rows])
            if reduced:
                made = (made + adapter.of_rows(reduced[0], rows)).to(made.dtype)
            return self._keys_values(made, rotated)

        parameters = [up.weight, *([] if adapter is None else [adapter.lora_B])]
        found = self.core_attention.attend_by_heads(
            query,
            torch.cat(vectors, dim=-1),
            make,
            parameters,
            self.part.v_head_dim,
            lengths,
            tree,
        )
        return found.flatten(1)

    def _keys_values(self, made: Tensor, rotated: Tensor) -> Tensor:
        """Returns keys and values [T, heads, d + d_v] from what `linear_kv_up_proj` makes, and the
        rotated part of keys [T, channels].
        """
        made = made.unflatten(-1, (-1, self.part.qk_head_dim + self.part.v_head_dim))
        key, value = made.tensor_split((self.part.qk_head_dim,), dim=-1)
        of_all_heads = rotated.unsqueeze(1).expand(-1, made.shape[1], -1)
        return torch.cat((key, of_all_heads, value), dim=-1)


def _by_row(x: Tensor) -> Tensor:
    """[s, b, c] -> [b * s, c]: a row of a batch is a sequence."""
    return x.transpose(0, 1).flatten(0, 1)


def rotary_of_core(config: Any) -> tuple[LayerRotary, float]:
    """Returns the rotary embedding that a MLATransformerConfig says, and its factor of scores."""
    is_yarn = config.rope_type == "yarn"
    channels = int(config.qk_pos_emb_head_dim * (1.0 if is_yarn else config.rotary_percent))
    exponents = torch.arange(0, channels, 2, dtype=torch.float32) / channels
    frequencies, scale = 1.0 / config.rotary_base**exponents, 1.0
    factor = config.rotary_scaling_factor
    if is_yarn:
        ends = yarn._yarn_find_correction_range(
            config.beta_fast,
            config.beta_slow,
            channels,
            config.rotary_base,
            config.original_max_position_embeddings,
        )
        ramp = yarn._yarn_linear_ramp_mask(*ends, channels // 2, device=torch.device("cpu"))
        frequencies = frequencies / factor * ramp + frequencies * (1.0 - ramp)
        scale = yarn._yarn_get_concentration_factor(factor, config.mscale, config.mscale_all_dim)
    of_scores = yarn._yarn_get_mscale(factor, config.mscale_all_dim) ** 2
    return LayerRotary(frequencies, is_interleaved=True, scale=scale), of_scores
