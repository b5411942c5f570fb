"""mcore. Packed (THD) core attention without Transformer Engine, on CUDA and on CPU, with context parallel.

megatron-core's own DotProductAttention refuses packs and context parallel. This one takes its place as
`core_attention` of `SelfAttentionSubmodules`. Kernels: torch's variable-length flash attention on CUDA in bf16 and
fp16, else `scaled_dot_product_attention` sequence by sequence, which costs the sum of squared lengths, never a mask
of T x T.

Context parallel: keys and values are all-gathered (backward is the reduce-scatter), and each of a rank's two zigzag
pieces of a sequence attends to all tokens up to its own last one, as if it were a sequence of its own. Memory: the keys
and values of the whole pack, per layer, until the backward pass; `recompute_granularity="selective"` gathers them again
instead.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megatron.packing.model.zigzag import Lengths, padded_lengths, zigzag


class PackedDotProductAttention(MegatronModule):
    """Causal self-attention within each sequence of a pack, or within each row of a batch.

    Takes query [t, heads, d] and key, value [t, groups, d] with `packed_seq_params` (padded `cu_seqlens`, of the
    whole pack), or [s, b, heads, d] and [s, b, groups, d] without; returns [t, heads * d] or [s, b, heads * d]. With
    context parallel t and s are this rank's shards, in zigzag order, of sequences that are multiples of twice its
    size.

    Raises ValueError for what it doesn't do: attention dropout, windows, masks other than causal, softmax offsets.
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
            f"softmax_type {config.softmax_type!r}: only 'vanilla'": config.softmax_type != "vanilla",
        }
        for reason in (reason for reason, holds in refused.items() if holds):
            raise ValueError(f"packed attention without Transformer Engine does not support {reason}")
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
        packed_seq_params: Any = None,
    ) -> Tensor:
        """See the class. `attention_mask` is not looked at: rows are padded at their end, where no real token looks."""
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
        return causal_attention(query, keys, values, seen.query_lengths, seen.key_lengths, self.softmax_scale)


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, query_lengths: Lengths, key_lengths: Lengths, scale: float
) -> Tensor:
    """Attention of packed segments: the last query of each segment sees all its keys, the one before all but one, and
    so on.

    query: [sum(query_lengths), heads, d]; key, value: [sum(key_lengths), groups, d] -> [sum(query_lengths), heads, d].
    """
    kernel = _flash_kernel() if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) else _by_sequence
    return kernel(query, key, value, query_lengths, key_lengths, scale)


def _by_sequence(q: Tensor, k: Tensor, v: Tensor, query_lengths: Lengths, key_lengths: Lengths, scale: float) -> Tensor:
    out = []
    segments = zip(q.split(query_lengths), k.split(key_lengths), v.split(key_lengths))
    for queries, keys, values in segments:
        is_square = len(queries) == len(keys)
        q1, k1, v1 = (x.transpose(0, 1).unsqueeze(0) for x in (queries, keys, values))
        attended = scaled_dot_product_attention(
            q1,
            k1,
            v1,
            attn_mask=None if is_square else _bottom_right_causal(len(queries), len(keys), q.device),
            is_causal=is_square,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        out.append(attended.squeeze(0).transpose(0, 1))
    return torch.cat(out)


def _bottom_right_causal(num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    return torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(num_keys - num_queries)


@cache
def _flash_kernel() -> Callable[[Tensor, Tensor, Tensor, Lengths, Lengths, float], Tensor]:
    """torch's varlen kernel behind one signature; its own differs by release."""
    from torch.nn.attention.varlen import varlen_attn

    accepted = inspect.signature(varlen_attn).parameters
    causal = {"window_size": (-1, 0)} if "window_size" in accepted else {"is_causal": True}
    takes_groups = "enable_gqa" in accepted
    takes_scale = "scale" in accepted

    def attend(q: Tensor, k: Tensor, v: Tensor, query_lengths: Lengths, key_lengths: Lengths, scale: float) -> Tensor:
        options: dict[str, Any] = dict(causal)
        repeat = q.shape[1] // k.shape[1]
        if repeat > 1 and takes_groups:
            options["enable_gqa"] = True
        elif repeat > 1:
            k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
        if takes_scale:
            options["scale"] = scale
        else:
            q = q * (scale * q.shape[-1] ** 0.5)
        attended = varlen_attn(
            q,
            k.contiguous(),
            v.contiguous(),
            _on_device(query_lengths, q.device),
            _on_device(key_lengths, q.device),
            max(query_lengths),
            max(key_lengths),
            **options,
        )
        assert isinstance(attended, Tensor)  # a tuple only with return_aux
        return attended

    return attend


@lru_cache(maxsize=64)
def _on_device(lengths: Lengths, device: torch.device) -> Tensor:
    """int32 running sum; cached, so that the copy is made once per microbatch and not once per layer."""
    return torch.tensor((0, *lengths), dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device, non_blocking=True)
