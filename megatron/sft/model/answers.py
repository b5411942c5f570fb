"""mcore. Answers the prompts of --sample-prompts with the model in training: by greedy decoding, in
the parallel layout of the run, with the forward pass of the training.

There is no cache of keys and values: each new token is a forward pass of all unfinished prompts,
packed. This works in every parallel layout, and is fast enough for a few short prompts. All
replicas compute the same. The tokens of the first replica are used on all ranks, so that they never
diverge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import unwrap_model
from torch import Tensor

from megatron.packing.batch.columns import IntArray
from megatron.packing.batch.microbatches import Microbatch, layouts_of, pack
from megatron.packing.batch.samples import Samples
from megatron.packing.device import Device
from megatron.packing.model.attention.zigzag import shard_index
from megatron.packing.step.global_batch import PackedIterator
from megatron.sft.data.chat_encoder import Tokenizer
from megatron.sft.data.prompts import Prompt
from megatron.sft.model.forward import PaddedBatch, padded_batches
from megatron.sft.model.huggingface.companions import ends_of_turns
from megatron.sft.options.config import SFTConfig

_NONE = -1


class PromptBatch(NamedTuple):
    """Prompts as the microbatches of a forward pass."""

    microbatches: list[Microbatch] | list[PaddedBatch]
    asked: list[int]
    """Numbers of the sequences whose last token is on this context-parallel rank, in its order."""

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches of every replica."""
        return len(self.microbatches)

    def iterators(self, num_virtual_stages: int | None, device: Device) -> Any:
        """Returns the data iterator for megatron-core's schedules, or one per virtual stage."""

        def one() -> Iterator[Any]:
            if isinstance(self.microbatches[0], PaddedBatch):
                return (batch.on(device) for batch in self.microbatches)  # type: ignore[union-attr]
            return PackedIterator(self.microbatches, device)  # type: ignore[arg-type]

        return one() if num_virtual_stages is None else [one() for _ in range(num_virtual_stages)]


class Answers:
    """Answers `prompts`, with at most --sample-tokens tokens each."""

    def __init__(self, config: SFTConfig, tokenizer: Tokenizer, prompts: Sequence[Prompt]) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._ends = {tokenizer.eod, *ends_of_turns(tokenizer)}

    def answers(
        self,
        model: Sequence[torch.nn.Module],
        run: Callable[[PromptBatch], object],
        device: Device,
    ) -> list[tuple[str, str]]:
        """Returns (prompt, answer) for each prompt, the same on every rank; collective.

        Args:
            model: this rank's chunks, in evaluation mode.
            run: function that runs the forward passes of a batch.
        """
        made: list[list[int]] = [[] for _ in self._prompts]
        limit = self._config.model.seq_length
        for _ in range(self._config.training.sample_tokens):
            going = [
                number
                for number, (prompt, tokens) in enumerate(zip(self._prompts, made))
                if self._ends.isdisjoint(tokens) and len(prompt.ids) + len(tokens) < limit
            ]
            if not going:
                break
            asked = [[*self._prompts[number].ids, *made[number]] for number in going]
            for number, token in zip(going, self._next_tokens(asked, model, run, device)):
                made[number].append(token)
        return [
            (prompt.text, self._tokenizer.decode([one for one in tokens if one not in self._ends]))
            for prompt, tokens in zip(self._prompts, made)
        ]

    def _next_tokens(
        self,
        asked: Sequence[Sequence[int]],
        model: Sequence[torch.nn.Module],
        run: Callable[[PromptBatch], object],
        device: Device,
    ) -> list[int]:
        batch = prompt_batch(self._config, asked)
        head = getattr(unwrap_model(model[-1]), "masked_tokens_head", None)
        likeliest: list[Tensor] = []
        if head is not None:
            head.likeliest = likeliest
        run(batch)
        if head is not None:
            head.likeliest = None
        tokens = torch.zeros(len(asked), dtype=torch.int64, device=device.place)
        is_first = parallel_state.get_data_parallel_rank() == 0
        if likeliest and is_first and parallel_state.get_tensor_model_parallel_rank() == 0:
            tokens[torch.tensor(batch.asked, dtype=torch.int64, device=device.place)] = torch.cat(
                likeliest
            )
        dist.all_reduce(tokens)
        return tokens.tolist()


def prompt_batch(config: SFTConfig, sequences: Sequence[Sequence[int]]) -> PromptBatch:
    """Returns sequences as microbatches in which only their last tokens are unmasked: the output
    layer computes logits of unmasked tokens alone.
    """
    lengths = np.array([len(one) for one in sequences])
    ids = np.concatenate([np.array(one, np.int32) for one in sequences])
    mask = np.zeros(ids.size, np.float32)
    mask[lengths.cumsum() - 1] = 1.0
    # An interleaved pipeline needs a multiple of its stages as its number of microbatches.
    multiple = config.parallel.pipeline_model_parallel_size if config.num_virtual_stages else 1
    if config.packing.sequence_packing:
        return _packs(config, lengths, ids, mask, multiple)
    parts = [np.split(values, lengths.cumsum()[:-1]) for values in (ids, mask)]
    fetches = [
        [{"tokens": tokens, "labels": tokens, "loss_mask": weights}]
        for tokens, weights in zip(*parts)
    ]
    fetches += [[]] * (-len(fetches) % multiple)
    rows = list(padded_batches(iter(fetches), 1, config.alignment.pack))
    return PromptBatch(rows, [number for number, row in enumerate(rows) if row.loss_mask.any()])


def _packs(config: SFTConfig, lengths: IntArray, ids: Any, mask: Any, multiple: int) -> PromptBatch:
    capacity = config.capacity_per_rank * config.parallel.context_parallel_size
    num_sequences = packs_in_order(config.alignment.padded_length(lengths), capacity)
    num_sequences += [0] * (-len(num_sequences) % multiple)
    layouts = layouts_of(lengths, np.array(num_sequences), config.alignment)
    samples = Samples.of(lengths, np.zeros(lengths.size, np.int32), ids, ids, mask)
    asked, number = [], 0
    microbatches = pack(samples, np.array(num_sequences), layouts)
    for batch, count in zip(microbatches, num_sequences):
        # For each token the number of the sequence that ends with it, or _NONE.
        ends = np.full(batch["loss_mask"].numel(), _NONE)
        ends[batch["loss_mask"].numpy() != 0] = range(number, number + count)
        asked += _here(ends, tuple(batch["cu_seqlens_padded"].diff().tolist()))
        number += count
    return PromptBatch(microbatches, asked)


def packs_in_order(lengths: IntArray, capacity: int) -> list[int]:
    """Returns the number of sequences in each pack, filled in order: `[3, 4, 2, 6], 7 -> [2, 1,
    1]`.
    """
    found: list[int] = []
    used = capacity + 1
    for length in lengths.tolist():
        if used + length > capacity:
            found.append(0)
            used = 0
        found[-1] += 1
        used += length
    return found


def _here(numbers: IntArray, lengths: tuple[int, ...]) -> list[int]:
    """Returns the numbers, without _NONE, in this context-parallel rank's shard of a microbatch."""
    index = shard_index(
        lengths,
        parallel_state.get_context_parallel_world_size(),
        parallel_state.get_context_parallel_rank(),
    )
    own = numbers if index is None else numbers[index.numpy()]
    return own[own != _NONE].tolist()
