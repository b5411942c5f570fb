"""mcore. Packed (THD) core attention without Transformer Engine, on CUDA and on CPU, with context
parallel.

megatron-core's own DotProductAttention refuses packs and context parallel. This one takes its place
as `core_attention` of `SelfAttentionSubmodules`. See `attention_kernels` for what computes it.

Context parallel: keys and values are all-gathered (backward is the reduce-scatter), and each of a
rank's two zigzag pieces of a sequence attends to all tokens up to its own last one, as if it were a
sequence of its own. Memory: the keys and values of the whole pack, per layer, until the backward
pass; `recompute_granularity="selective"` gathers them again instead.
"""

from __future__ import annotations

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron.packing.model.attention_kernels import causal_attention
from megatron.packing.model.zigzag import Lengths, padded_lengths, zigzag


class PackedDotProductAttention(MegatronModule):
    """Causal self-attention within each sequence of a pack, or within each row of a batch.

    Takes query [t, heads, d] and key, value [t, groups, d] with `packed_seq_params` (padded
    `cu_seqlens`, of the whole pack), or [s, b, heads, d] and [s, b, groups, d] without; returns [t,
    heads * d] or [s, b, heads * d]. With context parallel t and s are this rank's shards, in zigzag
    order, of sequences that are multiples of twice its size.

    Raises ValueError for what it doesn't do: attention dropout, windows, masks other than causal,
    softmax offsets.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        refused = {
            f"--attention-dropout {dropout}: set it to 0": dropout != 0,
            f"attention_type {attention_type!r}: only self-attention": attention_type != "self",
            f"{attn_mask_type}: only causal masks": attn_mask_type
            not in (AttnMaskType.causal, AttnMaskType.padding_causal),
            f"window_size {config.window_size}: no window": config.window_size is not None,
            f"softmax_type {config.softmax_type!r}: only 'vanilla'": config.softmax_type
            != "vanilla",
        }
        for reason in (reason for reason, holds in refused.items() if holds):
            raise ValueError(
                f"packed attention without Transformer Engine does not support {reason}"
            )
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(["cp"])
        self.cp_group = groups.cp
        self.softmax_scale = softmax_scale or config.kv_channels**-0.5

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: object = None,
    ) -> Tensor:
        """See the class. `attention_mask` is not looked at: rows are padded at their end, where no
        real token looks.
        """
        if packed_seq_params is not None:
            return self._attend(query, key, value, padded_lengths(packed_seq_params)).flatten(1)
        rows, batch = query.shape[:2]
        flat = [x.transpose(0, 1).reshape(rows * batch, *x.shape[2:]) for x in (query, key, value)]
        out = self._attend(flat[0], flat[1], flat[2], (rows * self.cp_group.size(),) * batch)
        return out.view(batch, rows, -1).transpose(0, 1).contiguous()

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, lengths: Lengths) -> Tensor:
        if self.cp_group.size() == 1:
            return causal_attention(query, key, value, lengths, lengths, self.softmax_scale)
        seen = zigzag(lengths, self.cp_group.size(), self.cp_group.rank(), query.device)
        gathered = gather_from_sequence_parallel_region(
            torch.cat((key, value), dim=-1), tensor_parallel_output_grad=True, group=self.cp_group
        )
        keys, values = gathered.index_select(0, seen.key_index).chunk(2, dim=-1)
        return causal_attention(
            query, keys, values, seen.query_lengths, seen.key_lengths, self.softmax_scale
        )
