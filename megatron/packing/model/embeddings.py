"""mcore. Embeddings of payloads among those of words: images where a pack has placeholders.

    batch = get_batch_on_this_rank_for_sequence_packing(iterator)
    images = batch.payloads.tensors.get("pixels", [])      # on first stages, in order
    hidden = merged_embeddings(gpt, batch, tower(images), IMAGE_TOKEN)
    gpt(batch.tokens, ..., decoder_input=hidden)

Placeholders are counted in the whole pack, before context parallel cuts it: a rank's first
placeholder is seldom the pack's first. Then each rank takes the rows of its own, so it computes no
more than its words, and its gradient is that of its tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region
from torch import Tensor

from megatron.packing.device import to_device


class Placeholders(NamedTuple):
    """Rows of the embeddings of payloads, as the tokens of this rank take them."""

    rows: Tensor
    """int64 [t]: row that each token takes; -1 for words."""
    number: int
    """Placeholders of the whole pack, so rows that the embeddings must have."""


class BatchPayloads(NamedTuple):
    """The payloads of one microbatch, in the order of its sequences."""

    tensors: Mapping[str, Sequence[Tensor]]
    """Tensors of all payloads by name, on this rank's device. Names that no sequence of the
    microbatch has are absent.
    """
    segments: Mapping[str, Tensor]
    """int64 [n]: number of the segment in the pack that each is of."""
    tokens: Tensor
    """int64 [T], of the whole pack, on the host."""
    shard: Tensor | None = None
    """int64 [t]: this rank's tokens in the pack; None for all of them."""

    @classmethod
    def of(
        cls, microbatch: Mapping[str, Any], index: Tensor | None, device: torch.device
    ) -> BatchPayloads:
        """Returns those of a microbatch, sent to a device."""
        tensors, segments = microbatch["payloads"]
        return cls(
            {name: [to_device(one, device) for one in values] for name, values in tensors.items()},
            {name: torch.from_numpy(values) for name, values in segments.items()},
            microbatch.get("host_tokens", microbatch["tokens"]),
            index,
        )

    def placeholders(self, token_id: int) -> Placeholders:
        """Returns the places of the tokens `token_id`, on the host.

        tokens 5 9 9 7 9 with token 9    ->    rows -1 0 1 -1 2
        """
        is_one = self.tokens == token_id
        rows = is_one.cumsum(0).sub_(1).masked_fill_(~is_one, -1)
        return Placeholders(rows if self.shard is None else rows[self.shard], int(is_one.sum()))


def merged_embeddings(gpt: Any, batch: Any, embeddings: Tensor | None, token_id: int) -> Tensor:
    """Returns the input of the decoder: words, and `embeddings` in place of `token_id`.

    The gradient of `embeddings` is that of this rank's tokens. Where a pack has no placeholder it
    is zero, so that all parameters have one: embed something at hand then.

    Args:
        gpt: a GPTModel of a first stage, built with scatter_embedding_sequence_parallel=False where
            sequence parallel is on.
        batch: from `get_batch_on_this_rank_for_sequence_packing`.
        embeddings: [n, h], one row per placeholder of the pack, in order; [any, h] where it has
            none, or None where no gradient is wanted.

    Returns:
        [t, 1, h], with sequence parallel this rank's part of it.

    Raises:
        ValueError: for another number of rows than placeholders.
    """
    if gpt.config.sequence_parallel and gpt.embedding.scatter_to_sequence_parallel:
        raise ValueError(
            "embeddings can be merged only before sequence parallel cuts them; build the model "
            "with GPTModel(scatter_embedding_sequence_parallel=False)"
        )
    places = _places(batch, embeddings, token_id)
    rows = to_device(places.rows, batch.tokens.device)
    is_word = (rows < 0)[:, None, None]
    # Placeholders may be no words of the vocabulary, as -200 is.
    words = gpt.embedding(
        input_ids=batch.tokens.masked_fill(~is_word.view(1, -1), 0), position_ids=batch.position_ids
    )
    if embeddings is not None and places.number:
        taken = embeddings.to(words.dtype).index_select(0, rows.clamp(min=0))
        words = torch.where(is_word, words, taken[:, None])
    elif embeddings is not None:
        words = words + (0 * embeddings.to(words.dtype)).sum()
    return _part_of_rank(gpt, words)


def rows_at_placeholders(gpt: Any, batch: Any, rows: Tensor, token_id: int) -> Tensor:
    """Returns `rows` at the tokens `token_id`, and zero at words; see `merged_embeddings`.

    Args:
        rows: [n, h], one row per placeholder of the pack, in order.

    Returns:
        [t, 1, h], with sequence parallel this rank's part of it.
    """
    places = to_device(_places(batch, rows, token_id).rows, batch.tokens.device)
    taken = rows.index_select(0, places.clamp(min=0))
    return _part_of_rank(gpt, taken.masked_fill((places < 0)[:, None], 0)[:, None])


def _places(batch: Any, embeddings: Tensor | None, token_id: int) -> Placeholders:
    places = Placeholders(torch.full((batch.tokens.numel(),), -1), 0)
    if batch.payloads is not None:
        places = batch.payloads.placeholders(token_id)
    num_rows = 0 if embeddings is None else len(embeddings)
    if places.number and places.number != num_rows:
        raise ValueError(
            f"a pack has {places.number} tokens {token_id}, but there are {num_rows} "
            "embeddings; give each image as many placeholders as its tower makes of it"
        )
    return places


def _part_of_rank(gpt: Any, rows: Tensor) -> Tensor:
    if not gpt.config.sequence_parallel:
        return rows
    part: Tensor = scatter_to_sequence_parallel_region(rows, group=gpt.pg_collection.tp)
    return part
