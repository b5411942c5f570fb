"""mcore. Global attention of packs whose keys are the values, too, with head widths of its own.

    hidden -> linear_qk -> queries, keys                 rows of a group: its queries, its key
    queries -> q_layernorm -> rotation
    keys -> k_layernorm -> rotation
    keys -> a norm without weights -> values
    queries, keys, values -> core attention -> linear_proj

Tensor parallel: heads. Where there are more ranks than groups, ranks gather all queries and keys,
and each takes its own queries and their key, as megatron-core does. Context parallel: keys and
values are gathered, as in all layers.

Heads of more than 256 channels have no variable-length kernel: on CUDA torch's
`scaled_dot_product_attention` computes them sequence by sequence, see `attention.kernels`.
"""

from __future__ import annotations

from typing import Any

from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    all_gather_last_dim_from_tensor_parallel_region,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron.packing.model.attention.core_attention import PackedDotProductAttention
from megatron.packing.model.attention.rotary import LayerRotary, places_of, turn
from megatron.packing.model.layers.norms import TorchNorm, plain_rms_norm
from megatron.packing.model.parts.global_attention import GlobalAttention
from megatron.packing.model.parts.projections import (
    column_linear,
    output_linear,
    recomputes_core_attention,
)


class GlobalSelfAttention(MegatronModule):
    """Takes the place of self-attention in a layer: hidden states [t, 1, h] of a pack with
    `packed_seq_params`, or rows [s, b, h] without.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        part: GlobalAttention,
        rotary: LayerRotary,
        has_value_norm: bool = False,
        pg_collection: ProcessGroupCollection | None = None,
        cp_comm_type: str | None = None,
        name: str | None = None,  # megatron-core 0.19 tells each module its own
        **others: Any,
    ) -> None:
        """part: widths. rotary: of queries and keys. has_value_norm: values have a norm without
        weights.
        """
        super().__init__(config=config)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
        self.layer_number, self.part, self.rotary = layer_number, part, rotary
        self.has_value_norm = has_value_norm
        self.tp_group, self.cp_group = groups.tp, groups.cp
        sizes, width = part.sizes(), part.global_kv_channels
        self.linear_qk = column_linear(
            config, config.hidden_size, sizes["query"] + sizes["key"], self.tp_group
        )
        self.q_layernorm: Any = TorchNorm(config, width, config.layernorm_epsilon)
        self.k_layernorm: Any = TorchNorm(config, width, config.layernorm_epsilon)
        self.core_attention = PackedDotProductAttention(
            config,
            layer_number,
            AttnMaskType.causal,
            "self",
            softmax_scale=config.softmax_scale or width**-0.5,
            pg_collection=groups,
        )
        self.linear_proj = output_linear(config, sizes["query"], self.tp_group)
        self._recomputes = recomputes_core_attention(config)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: Any = None,
        **others: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns output and bias, as megatron-core's attention, which `others` are for."""
        query, key, value = self._queries_keys_values(hidden_states)
        places = places_of(packed_seq_params, len(query), self.cp_group)
        query, key = turn(query, key, self.rotary.turns(places, query))
        is_pack = packed_seq_params is not None
        if is_pack:
            query, key, value = (x.squeeze(1) for x in (query, key, value))

        def attended(query: Tensor, key: Tensor, value: Tensor) -> Any:
            return self.core_attention(
                query, key, value, attention_mask, packed_seq_params=packed_seq_params
            )

        if self._recomputes and self.training:
            out = tensor_parallel.checkpoint(attended, False, query, key, value)
        else:
            out = attended(query, key, value)
        return self.linear_proj(out.unsqueeze(1) if is_pack else out)  # type: ignore[no-any-return]

    def _queries_keys_values(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns [s, b, heads, d] and twice [s, b, groups, d], of this rank's heads."""
        part, size = self.part, self.tp_group.size()
        per_group = part.num_attention_heads // part.num_groups
        projected, _ = self.linear_qk(hidden_states)
        is_shared = size > part.num_groups
        if is_shared:  # backward, ranks' gradients of a key are summed
            projected = all_gather_last_dim_from_tensor_parallel_region(
                projected, group=self.tp_group
            )
        # 4 heads in 2 groups    ->    q0 q1 k0 | q2 q3 k1
        projected = projected.unflatten(-1, (-1, per_group + 1, part.global_kv_channels))
        query, key = projected.tensor_split((per_group,), dim=-2)
        query, key = query.flatten(-3, -2), key.flatten(-3, -2)
        if is_shared:
            num_heads = part.num_attention_heads // size
            first = self.tp_group.rank() * num_heads
            query, key = query.narrow(-2, first, num_heads), key.narrow(-2, first // per_group, 1)
        value = key
        if self.has_value_norm:
            value = plain_rms_norm(value, self.config.layernorm_epsilon)
        return self.q_layernorm(query), self.k_layernorm(key), value
