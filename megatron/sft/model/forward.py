"""mcore. One microbatch through the model: packed or padded batch, loss as sum and count."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_attr_wrapped_model, get_model_config, unwrap_model
from torch import Tensor

from megatron.packing.batch.columns import NUM_PATHS, PARENTS, expand_ranges
from megatron.packing.batch.reading import read_samples
from megatron.packing.model.attention.zigzag import shard_index
from megatron.packing.model.get_batch import (
    Batch,
    get_batch_on_this_rank_for_sequence_packing,
    sources_of_tokens,
)
from megatron.packing.step.global_batch import GROUPS

Loss = tuple[Tensor, Tensor, dict[str, Any]]


def forward_step(
    data_iterator: Iterator[Any], model: torch.nn.Module, num_sources: int = 1
) -> tuple[Tensor, Callable[[Tensor], Loss]]:
    """Runs megatron-core's forward step for packed microbatches and for `PaddedBatch`es.

    num_sources: where there are several, the loss of each is kept apart; one addition per token on
    the last stage.
    """
    config = get_model_config(model)
    vp_stage = get_attr_wrapped_model(model, "vp_stage")
    is_first, is_last = (
        get_attr_wrapped_model(model, name) for name in ("pre_process", "post_process")
    )
    has_embedding = is_first or (is_last and config.mtp_num_layers is not None)
    batch: Batch | PaddedBatch
    sources: Tensor | None = None
    tells_sources = is_last and num_sources > 1
    if getattr(config, "sequence_packing_scheduler", None) is not None:
        microbatch = next(data_iterator)
        if tells_sources:
            sources = sources_of_tokens(
                microbatch, ProcessGroupCollection.use_mpu_process_groups(GROUPS)
            )
        batch = get_batch_on_this_rank_for_sequence_packing(
            iter((microbatch,)),
            vpp_size=config.virtual_pipeline_model_parallel_size,
            vp_stage=vp_stage,
            mtp_on_this_rank=is_last and config.mtp_num_layers is not None,
        )
    else:
        batch = padded = next(data_iterator)
        if tells_sources:
            sources = padded.sources.to(padded.tokens.device, non_blocking=True)
    output = model(
        batch.tokens if has_embedding else None,
        batch.position_ids if has_embedding else None,
        None,
        labels=batch.labels if is_last else None,
        packed_seq_params=batch.packed_seq_params,
        loss_mask=batch.loss_mask if is_last else None,
        padding_mask=None
        if config.num_moe_experts is None
        else routers_mask(batch.padding_mask, config, is_first),
    )
    head = getattr(unwrap_model(model), "masked_tokens_head", None) if is_last else None
    return output, partial(
        loss_sum,
        batch.loss_mask,
        sources=sources,
        num_sources=num_sources,
        num_right=None if head is None else head.num_right,
        num_paths=getattr(batch, "num_paths", None),
    )


def routers_mask(padding_mask: Tensor, config: TransformerConfig, is_first: bool) -> Tensor:
    """Returns what experts must not count, as this stage takes it: megatron-core scatters it on the
    first one only.
    """
    if is_first or not config.sequence_parallel:
        return padding_mask
    shards = padding_mask.chunk(config.tensor_model_parallel_size, dim=1)
    return shards[parallel_state.get_tensor_model_parallel_rank()]


def loss_sum(
    loss_mask: Tensor | None,
    output: Tensor,
    sources: Tensor | None = None,
    num_sources: int = 1,
    num_right: Tensor | None = None,
    num_paths: Tensor | None = None,
) -> Loss:
    """Returns (sum of weight * cross entropy, number of unmasked tokens, both for the log) of this
    rank's shard.

    Nothing is divided here. With `sources`, of each token, the log has the sum of cross entropy
    without weights, and the number of tokens, by source: float64 [2, num_sources]. With `num_right`
    it has the unmasked tokens whose label is the likeliest word. num_paths: how often each token
    counts, where paths of trees share it; None where it is once.
    """
    assert loss_mask is not None  # the last stage has it, and only there megatron-core asks
    losses = output.to(torch.promote_types(output.dtype, torch.float32))
    total = (losses * loss_mask).sum()
    counts = (loss_mask != 0) if num_paths is None else num_paths
    num_tokens = counts.sum().to(torch.int32)
    log: dict[str, Any] = {"lm loss": (total.detach(), num_tokens.detach())}
    if num_right is not None:
        log["right tokens"] = num_right
    if sources is not None:
        # A masked token has no loss from `head`, but one from megatron-core's own output layer.
        counted = losses.detach().double().flatten().where((counts != 0).flatten(), 0.0)
        both = torch.stack((counted * counts.flatten(), counts.double().flatten()))
        log["source losses"] = both.new_zeros(2, num_sources).index_add_(1, sources.flatten(), both)
    return total, num_tokens, log


class PaddedBatch(NamedTuple):
    """A microbatch of rows padded to the longest of them, S tokens; each tensor [b, S /
    context-parallel size]. The baseline to compare with.
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    position_ids: Tensor
    padding_mask: Tensor
    sources: Tensor
    """Source of each token, on the host."""
    packed_seq_params: None = None
    lengths: tuple[int, ...] = ()
    """Real tokens of each row."""

    def on(self, device: torch.device) -> PaddedBatch:
        """Returns the same on `device`, but for `sources`."""
        fields = ("tokens", "labels", "loss_mask", "position_ids", "padding_mask")
        return self._replace(
            **{name: getattr(self, name).to(device, non_blocking=True) for name in fields}
        )


def padded_batches(
    fetches: Iterator[Sequence[Mapping[str, Any]]], num_rows: int, multiple: int
) -> Iterator[PaddedBatch]:
    """Pads each fetch to its longest sample, up to a multiple of `multiple`; this context-parallel
    rank's zigzag shard of it. Missing rows are all masked. On the host, pinned where there is CUDA.
    """
    size = parallel_state.get_context_parallel_world_size()
    rank = parallel_state.get_context_parallel_rank()

    def shard(rows: Tensor) -> Tensor:
        index = shard_index((rows.shape[1],), size, rank)
        rows = rows if index is None else rows[:, index]
        return rows.pin_memory() if torch.cuda.is_available() else rows

    # Pad the rows of a microbatch to the longest, then to the alignment of the parallel layout.
    for fetch in fetches:
        samples = read_samples(fetch)
        if {PARENTS, NUM_PATHS} & set(samples.schema):
            raise ValueError(
                "trees of sequences need --sequence-packing: rows know no nodes; give each path as "
                "a sequence, or pass --sequence-packing"
            )
        seq_length = -(-max((1, *samples.lengths.tolist())) // multiple) * multiple
        tokens, labels, position_ids, sources = torch.zeros(
            4, num_rows, seq_length, dtype=torch.int64
        )
        loss_mask = torch.zeros(num_rows, seq_length)
        padding_mask = torch.ones(num_rows, seq_length, dtype=torch.bool)
        real = expand_ranges(np.arange(samples.lengths.size) * seq_length, samples.lengths)
        whole = (tokens, labels, loss_mask, position_ids)
        for padded, values in zip(whole, samples.fields()):
            padded.view(-1).numpy()[real] = values
        padding_mask.view(-1).numpy()[real] = False
        sources[: samples.sources.size] = torch.from_numpy(
            samples.sources.astype(np.int64)
        ).unsqueeze(1)
        yield PaddedBatch(
            tokens=shard(tokens),
            labels=shard(labels),
            loss_mask=shard(loss_mask),
            position_ids=shard(position_ids),
            padding_mask=shard(padding_mask),
            sources=shard(sources),
            lengths=tuple(samples.lengths.tolist()),
        )
