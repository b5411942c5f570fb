"""mcore. Rotary frequencies by position, kept once for the longest sequence so far.

megatron-core keeps those of the last 32 lengths, each from the first position on. Packs have
another longest sequence in almost every microbatch: with 131,072 tokens and heads of 128 channels
that is 2 GiB of the device, and new frequencies are computed for each.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor


def keep_frequencies(model: torch.nn.Module) -> None:
    """Has the plain rotary embeddings of `model` keep one tensor for packs of any lengths. Classes
    of your own, YaRN's and those of positions along axes stay as they are. Idempotent.
    """
    for module in model.modules():
        if type(module) is RotaryEmbedding and not isinstance(module.forward, _Frequencies):
            module.forward = _Frequencies(module)  # type: ignore[method-assign]


class _Frequencies:
    """Takes the place of an embedding's `forward`."""

    def __init__(self, embedding: RotaryEmbedding) -> None:
        self._embedding, self._plain = embedding, embedding.forward
        self._all: Tensor | None = None
        self._last: Tensor | None = None
        """The tensor that was given last. `rotary` tells by identity that its angles can be used
        again, so the same length must give the same object.
        """

    def __call__(
        self, max_seq_len: int, offset: int = 0, packed_seq: bool = False, **options: Any
    ) -> Tensor:
        """Returns [max_seq_len, 1, 1, channels]; what is no pack goes to megatron-core."""
        if offset or not packed_seq:
            return self._plain(max_seq_len, offset, packed_seq, **options)
        if self._last is not None and len(self._last) == max_seq_len:
            return self._last
        if self._all is None or len(self._all) < max_seq_len:
            # Rounded up, so that lengths that grow a little make no new ones.
            self._all = self._embedding.get_emb(-(-max_seq_len // 1024) * 1024)
        self._last = self._all[:max_seq_len]
        return self._last
