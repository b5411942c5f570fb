"""mcore. Packed (THD) core attention without Transformer Engine, on CUDA and on CPU, with context
parallel, windows, soft caps and sinks.

megatron-core's own DotProductAttention refuses packs and context parallel. This one takes its place
as `core_attention` of `SelfAttentionSubmodules`. See `kernels` for what computes it.

Context parallel: keys and values are all-gathered (backward is the reduce-scatter), and each of a
rank's two zigzag pieces of a sequence attends to all tokens up to its own last one, as if it were a
sequence of its own. Memory: the keys and values of the whole pack, per layer, until the backward
pass, or those that a window reaches; `recompute_granularity="selective"` gathers them again
instead. With `query_groups_per_gather` that many groups' are gathered at a time, and again in the
backward pass (see `by_groups`); where a rank has one group, those of one rank (see `by_ranks`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from torch import Tensor

from megatron.packing.device import Device
from megatron.packing.model.attention.blocks import LogSumKernel, Scores, Segments
from megatron.packing.model.attention.by_groups import GroupSteps, KeptOutputs, attend_by_groups
from megatron.packing.model.attention.by_heads import HeadSteps, attend_by_heads
from megatron.packing.model.attention.by_ranks import (
    RankSteps,
    Source,
    attend_by_ranks,
    sources_of,
)
from megatron.packing.model.attention.kernels import causal_attention, log_sum_kernel
from megatron.packing.model.attention.tree_keys import PackTree, tree_keys, tree_of
from megatron.packing.model.attention.zigzag import Lengths, Zigzag, padded_lengths, zigzag


class PackedDotProductAttention(MegatronModule):
    """Causal self-attention within each sequence of a pack, or within each row of a batch.

    Takes query [t, heads, d] and key, value [t, groups, d] with `packed_seq_params` (padded
    `cu_seqlens`, of the whole pack), or [s, b, heads, d] and [s, b, groups, d] without; returns [t,
    heads * d] or [s, b, heads * d]. With context parallel t and s are this rank's shards, in zigzag
    order, of sequences that are multiples of twice its size.

    Reads of megatron-core's config `window_size` (of the layers that `window_attn_skip_freq` says)
    and `softmax_type` ("learnable": the parameter `softmax_offset`, a sink per head). `softcap`,
    which megatron-core has no field for, is an argument: give
    `ModuleSpec(PackedDotProductAttention, params={"softcap": 50.0})`. `query_groups_per_gather`,
    which it has none for either, is an attribute that the config may be given; see `by_groups`.

    Raises ValueError for what is not supported: attention dropout, masks other than causal, windows
    that look ahead, other softmax types.
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
        softcap: float | None = None,
    ) -> None:
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        window = config.window_size
        refused = {
            f"--attention-dropout {dropout}: set it to 0": dropout != 0,
            f"attention_type {attention_type!r}: only self-attention": attention_type != "self",
            f"{attn_mask_type}: only causal masks": attn_mask_type
            not in (AttnMaskType.causal, AttnMaskType.padding_causal),
            f"window_size {window}: it must be (tokens before a query's own, 0)": window is not None
            and (window[0] < 0 or window[1] != 0),
            f"softmax_type {config.softmax_type!r}: only 'vanilla' and "
            "'learnable'": config.softmax_type not in ("vanilla", "learnable"),
        }
        for reason in (reason for reason, holds in refused.items() if holds):
            raise ValueError(
                f"packed attention without Transformer Engine does not support {reason}"
            )
        has_sinks = config.softmax_type == "learnable"
        names = ["cp", "tp"] if has_sinks else ["cp"]
        self.groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(names)
        self.cp_group = self.groups.cp
        self.scores = Scores(
            scale=softmax_scale or config.kv_channels**-0.5,
            window=window[0] + 1 if is_windowed(config, layer_number) else None,
            softcap=softcap,
        )
        self.softmax_offset = self._sinks() if has_sinks else None
        self.groups_per_gather: int | None = getattr(config, "query_groups_per_gather", None)
        self.kept_outputs: KeptOutputs | None = None
        """Where outputs are kept until layers are recomputed; see `layer_inputs`."""

    def _sinks(self) -> torch.nn.Parameter:
        """Returns this rank's heads' part, initialised as Transformer Engine does: at zero."""
        heads = self.config.num_attention_heads // self.groups.tp.size()
        device = Device.of(self.config).initial_place(self.config)
        sinks = torch.nn.Parameter(
            torch.zeros(heads, dtype=self.config.params_dtype, device=device)
        )
        set_tensor_model_parallel_attributes(sinks, True, 0, 1)
        return sinks

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
            lengths, tree = padded_lengths(packed_seq_params), tree_of(packed_seq_params)
            return self._attend(query, key, value, lengths, tree).flatten(1)
        rows, batch = query.shape[:2]
        flat = [x.transpose(0, 1).reshape(rows * batch, *x.shape[2:]) for x in (query, key, value)]
        out = self._attend(flat[0], flat[1], flat[2], (rows * self.cp_group.size(),) * batch)
        return out.view(batch, rows, -1).transpose(0, 1).contiguous()

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        lengths: Lengths,
        tree: PackTree | None = None,
    ) -> Tensor:
        is_alone = self.cp_group.size() == 1 and tree is None
        if not self.is_in_steps and is_alone:
            return self._computed(query, key, value, Segments.square(lengths))
        keys_values = torch.cat((key, value), dim=-1)
        if not self.is_in_steps:
            return self.attend_to_all(query, self.gather(keys_values), lengths, tree)
        outputs = self._kept_outputs()
        # Of a window's layer a rank needs few keys beside its own.
        is_by_rank = self.cp_group.size() > 1 and key.shape[1] == 1 and self.scores.window is None
        if is_by_rank and self.groups_per_gather is not None:
            ranks = self._rank_steps(query, value.shape[-1], lengths, tree)
            steps = RankSteps(self.cp_group, *ranks, *outputs)
            return attend_by_ranks(query, keys_values, self.softmax_offset, steps)
        segments, pick = self._picks(query, lengths, tree)
        kernel = self._kernel(query, value.shape[-1], segments, self.scores)

        def collect(own: Tensor) -> Tensor:
            return pick(self.gather(own))

        num_groups = self.groups_per_gather or key.shape[1]
        return attend_by_groups(
            query,
            keys_values,
            self.softmax_offset,
            GroupSteps(num_groups, collect, kernel, *outputs),
        )

    @property
    def is_in_steps(self) -> bool:
        """True if a few groups or heads are computed at a time, or outputs are kept elsewhere."""
        return self.groups_per_gather is not None or self._kept_outputs()[0] is not None

    def _kept_outputs(self) -> tuple[KeptOutputs | None, bool]:
        """Returns where this pass keeps its outputs, and whether they are there already."""
        # Within a backward pass a layer runs forward to be recomputed.
        is_recomputed = torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1
        kept = self.kept_outputs
        return (kept if kept is not None and (kept.is_open or is_recomputed) else None), (
            is_recomputed
        )

    def _picks(
        self, query: Tensor, lengths: Lengths, tree: PackTree | None
    ) -> tuple[Segments, Callable[[Tensor], Tensor]]:
        """Returns segments, and the function from tokens of all ranks to their keys."""
        if self.cp_group.size() == 1 and tree is None:
            return Segments.square(lengths), _alias
        seen = self._keys_seen(query, lengths, tree)
        segments = Segments(seen.query_lengths, seen.key_lengths)
        # Where they are equal, nodes see their own tokens alone: nothing is picked.
        if self.cp_group.size() == 1 and segments.query_lengths == segments.key_lengths:
            return segments, _alias
        return segments, lambda gathered: gathered.index_select(0, seen.key_index)

    def attend_by_heads(
        self,
        query: Tensor,
        vectors: Tensor,
        make: Callable[[Tensor, slice], Tensor],
        parameters: Sequence[Tensor],
        value_width: int,
        lengths: Lengths,
        tree: PackTree | None,
    ) -> Tensor:
        """Returns [t, heads, d_v] for queries [t, heads, d] and own vectors [t, c], which ranks
        gather.

        make: function from vectors of all tokens and some heads to their keys and values, [T,
        heads, d + d_v]; differentiable. parameters: those that it computes with.
        """
        segments, pick = self._picks(query, lengths, tree)
        kernel = self._kernel(query, value_width, segments, self.scores)
        steps = HeadSteps(
            self.groups_per_gather or query.shape[1],
            self.gather,
            lambda gathered, heads: pick(make(gathered, heads)),
            kernel,
            *self._kept_outputs(),
        )
        return attend_by_heads(query, vectors, parameters, steps)

    def _kernel(
        self, query: Tensor, value_width: int, segments: Segments, scores: Scores
    ) -> LogSumKernel:
        return log_sum_kernel(
            query,
            value_width,
            segments,
            scores,
            has_sinks=self.softmax_offset is not None,
            by_head=self.groups_per_gather is not None,
            device=Device.of(self.config, query),
        )

    def _rank_steps(
        self, query: Tensor, value_width: int, lengths: Lengths, tree: PackTree | None
    ) -> tuple[LogSumKernel, tuple[tuple[Source, LogSumKernel | None], ...]]:
        """Returns the kernel of own pieces, and what is seen of each rank."""
        place = self.cp_group.size(), self.cp_group.rank(), query.device
        sees_all = replace(self.scores, is_causal=False)
        sources = tuple(
            (
                source,
                self._kernel(query, value_width, source.segments, sees_all)
                if source.segments.key_lengths
                else None,
            )
            for source in sources_of(lengths, tree, *place)
        )
        own = Segments.square(self._keys_seen(query, lengths, tree).query_lengths)
        return self._kernel(query, value_width, own, self.scores), sources

    def _keys_seen(self, query: Tensor, lengths: Lengths, tree: PackTree | None) -> Zigzag:
        """Returns what this rank's tokens attend to, of all ranks' keys or of a tree's."""
        place = self.cp_group.size(), self.cp_group.rank(), query.device, self.scores.window
        return zigzag(lengths, *place) if tree is None else tree_keys(tree, *place)

    def gather(self, x: Tensor) -> Tensor:
        """Returns the tokens of all context-parallel ranks, one after the other."""
        if self.cp_group.size() == 1:
            return _alias(x)
        gathered: Tensor = gather_from_sequence_parallel_region(
            x, tensor_parallel_output_grad=True, group=self.cp_group
        )
        return gathered

    def attend_to_all(
        self, query: Tensor, keys_values: Tensor, lengths: Lengths, tree: PackTree | None
    ) -> Tensor:
        """Returns [t, heads, d_v] for queries [t, heads, d].

        keys_values: [T, groups, d + d_v], keys and behind them values, as `gather` returns them.
        """
        segments = Segments.square(lengths)
        if self.cp_group.size() > 1 or tree is not None:
            seen = self._keys_seen(query, lengths, tree)
            keys_values = keys_values.index_select(0, seen.key_index)
            segments = Segments(seen.query_lengths, seen.key_lengths)
        key, value = keys_values.tensor_split((query.shape[-1],), dim=-1)
        return self._computed(query, key, value, segments)

    def _computed(self, query: Tensor, key: Tensor, value: Tensor, segments: Segments) -> Tensor:
        device = Device.of(self.config, query)
        return causal_attention(
            query, key, value, segments, self.scores, self.softmax_offset, device
        )

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Returns the sinks, cut by heads over tensor parallel, under Transformer Engine's key."""
        if self.softmax_offset is None:
            return {}
        own = self.state_dict(prefix="", keep_vars=True)
        cut = {"softmax_offset": 0}
        return make_sharded_tensors_for_checkpoint(own, prefix, cut, sharded_offsets)


def _alias(x: Tensor) -> Tensor:
    return x.view_as(x)


def is_windowed(config: TransformerConfig, layer_number: int) -> bool:
    """Returns whether the layer of that number, from 1, sees a window only."""
    return bool(
        is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
    )
