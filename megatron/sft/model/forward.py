"""mcore. The forward pass of a microbatch, packed or padded, and its loss as a sum and a count."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_attr_wrapped_model, get_model_config, unwrap_model
from torch import Tensor

from megatron.packing.batch.columns import NUM_PATHS, PARENTS, expand_ranges
from megatron.packing.batch.reading import read_samples
from megatron.packing.device import Device, pinned
from megatron.packing.model.attention.zigzag import shard_index
from megatron.packing.model.get_batch import (
    Batch,
    get_batch_on_this_rank_for_sequence_packing,
    sources_of_tokens,
)
from megatron.packing.step.global_batch import GROUPS
from megatron.sft.images.model import decoder_input
from megatron.sft.images.vision import Vision

Loss = tuple[Tensor, Tensor, dict[str, Any]]


class Asked(NamedTuple):
    """What the log of a microbatch has beside its loss."""

    num_sources: int = 1
    """Number of sources of the data; if there are several, the loss of each is logged."""
    sources: Tensor | None = None
    """Source of each token; None if it is not asked for."""
    num_right: Tensor | None = None
    """Number of unmasked tokens that the model predicts best, a scalar; None if unknown."""


class Objective(Protocol):
    """The loss that a pass computes."""

    def loss(self, batch: Any, output: Tensor, asked: Asked) -> Loss:
        """Returns the loss of a microbatch on this rank, what it is divided by (summed over all
        microbatches and ranks), and a dict for the log; called on the last stage.

        The dict has "lm loss", a sum and the number of its terms, whose quotient is reported. It
        may have "tokens", if the terms are not tokens, and "sums", float64 [n].

        Args:
            batch: a `Batch` or a `PaddedBatch`.
            output: cross entropy of each token of this rank's shard.
        """


class CrossEntropy:
    """The loss of supervised fine-tuning: a mean over tokens."""

    def loss(self, batch: Any, output: Tensor, asked: Asked) -> Loss:
        num_paths = getattr(batch, "num_paths", None)
        return loss_sum(
            batch.loss_mask, output, asked.sources, asked.num_sources, asked.num_right, num_paths
        )


CROSS_ENTROPY = CrossEntropy()


def forward_step(
    data_iterator: Iterator[Any],
    model: torch.nn.Module,
    num_sources: int = 1,
    objective: Objective = CROSS_ENTROPY,
) -> tuple[Tensor, Callable[[Tensor], Loss]]:
    """Runs the forward pass of the next microbatch: the forward step that megatron-core's schedules
    call. The microbatch is packed, or a `PaddedBatch`.

    num_sources: number of sources of the data. If there are several, the loss of each is summed,
        too, which costs an addition per token on the last stage.
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
    gpt = unwrap_model(model)
    vision: Vision | None = getattr(gpt, "vision_settings", None)
    output = model(
        batch.tokens if has_embedding else None,
        # Those along axes make the rotary embedding of each stage.
        batch.position_ids if has_embedding or vision is not None else None,
        None,
        decoder_input=None if vision is None or not is_first else decoder_input(gpt, batch, vision),
        labels=batch.labels if is_last else None,
        packed_seq_params=batch.packed_seq_params,
        loss_mask=batch.loss_mask if is_last else None,
        padding_mask=routers_mask(batch.padding_mask, config, is_first)
        if isinstance(batch, PaddedBatch) and config.num_moe_experts is not None
        else None,  # packs bring their own, see `layers.routers`
    )
    head = getattr(gpt, "masked_tokens_head", None) if is_last else None
    asked = Asked(num_sources, sources, None if head is None else head.num_right)
    return output, partial(objective.loss, batch, asked=asked)


def routers_mask(padding_mask: Tensor, config: TransformerConfig, is_first: bool) -> Tensor:
    """Returns the mask of tokens that routers must not count, as this stage needs it. Under
    sequence parallel megatron-core scatters it on the first stage only, so that others get their
    shard here.
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
    """Returns the loss of this rank's shard: (sum of weight * cross entropy, number of unmasked
    tokens, dict for the log). Nothing is divided here: the sums are divided once per global batch.

    Args:
        output: cross entropy of each token.
        sources: source of each token. The log then has the sums of cross entropy, without weights,
            and the numbers of tokens by source, float64 [2, num_sources].
        num_right: number of unmasked tokens that the model predicts best, for the log.
        num_paths: number of paths that share each token of a tree, which it counts for; None for 1.
    """
    assert loss_mask is not None  # megatron-core calls this on the last stage only, which has it
    losses = output.to(torch.promote_types(output.dtype, torch.float32))
    total = (losses * loss_mask).sum()
    counts = (loss_mask != 0) if num_paths is None else num_paths
    num_tokens = counts.sum().to(torch.int32)
    log: dict[str, Any] = {"lm loss": (total.detach(), num_tokens.detach())}
    if num_right is not None:
        log["right tokens"] = num_right
    if sources is not None:
        # megatron-core's own output layer computes a loss for masked tokens, too: set it to zero.
        counted = losses.detach().double().flatten().where((counts != 0).flatten(), 0.0)
        both = torch.stack((counted * counts.flatten(), counts.double().flatten()))
        log["source losses"] = both.new_zeros(2, num_sources).index_add_(1, sources.flatten(), both)
    return total, num_tokens, log


class PaddedBatch(NamedTuple):
    """A microbatch without packing: b rows, padded to the longest of them, S tokens. Each tensor is
    [b, S / context-parallel size].
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    position_ids: Tensor
    padding_mask: Tensor
    sources: Tensor
    """Source of each token, always in host memory."""
    packed_seq_params: None = None
    lengths: tuple[int, ...] = ()
    """Tokens of each row without padding."""

    def on(self, device: Device) -> PaddedBatch:
        """Returns the batch on `device`, except for `sources`."""
        fields = ("tokens", "labels", "loss_mask", "position_ids", "padding_mask")
        return self._replace(
            **{name: getattr(self, name).to(device.place, non_blocking=True) for name in fields}
        )


def padded_batches(
    fetches: Iterator[Sequence[Mapping[str, Any]]], num_rows: int, multiple: int
) -> Iterator[PaddedBatch]:
    """Yields a batch for each fetch: its samples padded to the longest, rounded up to a multiple of
    `multiple`, of which this context-parallel rank gets its zigzag shard. Missing rows are fully
    masked. Tensors are in host memory, pinned if there is CUDA.
    """
    size = parallel_state.get_context_parallel_world_size()
    rank = parallel_state.get_context_parallel_rank()

    def shard(rows: Tensor) -> Tensor:
        index = shard_index((rows.shape[1],), size, rank)
        rows = rows if index is None else rows[:, index]
        return pinned(rows)

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
