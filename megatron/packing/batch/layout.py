"""pure. Where each sequence of a pack starts and ends, and the padding that layouts ask for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
OverLengthPolicy = Literal["error", "truncate", "drop"]
"""What happens to a sequence that is longer than what may be trained."""


@dataclass(frozen=True, kw_only=True)
class Alignment:
    """How many tokens a sequence and a pack must be multiples of, for their shards to be equal."""

    sequence: int = 1
    pack: int = 1

    @classmethod
    def for_layout(
        cls,
        *,
        context_parallel_size: int,
        tensor_parallel_size: int,
        sequence_parallel: bool,
        rank_multiple: int = 1,
    ) -> Alignment:
        """Return what a parallel layout asks for.

        Zigzag context parallel cuts each sequence in 2 cp pieces; sequence parallel cuts a rank's
        share of the pack in tp. What a rank then holds is a multiple of `rank_multiple`.
        """
        sequence = 2 * context_parallel_size if context_parallel_size > 1 else 1
        scatter = context_parallel_size * (tensor_parallel_size if sequence_parallel else 1)
        return cls(sequence=sequence, pack=math.lcm(sequence, scatter * rank_multiple))

    def padded_length(self, length: IntArray) -> IntArray:
        """Return how many tokens sequences of these lengths occupy in a pack."""
        return -(-length // self.sequence) * self.sequence


@dataclass(frozen=True, eq=False)
class PackLayout:
    """Where each segment of a pack starts and ends. Known on every rank; all of it on the host.

    A segment is a sequence and its padding. The tail that rounds a pack up is a last segment
    without a real token, so that `cu_seqlens_padded[-1]` is the number of tokens, as
    megatron-core's RoPE requires.
    """

    lengths: IntArray
    """int64 [segments]: real tokens."""
    padded_lengths: IntArray
    """int64 [segments]: tokens that each occupies."""

    @classmethod
    def of(cls, lengths: Sequence[int] | IntArray, alignment: Alignment) -> PackLayout:
        """Return sequences one after the other; none at all makes a dummy pack of one alignment
        unit.
        """
        real = np.asarray(lengths, dtype=np.int64)
        padded = alignment.padded_length(real)
        total = int(padded.sum())
        tail = -total % alignment.pack if total else alignment.pack
        if tail:
            real, padded = np.append(real, 0), np.append(padded, tail)
        return cls(real, padded)

    @property
    def num_tokens(self) -> int:
        """Tokens of the pack, padding included."""
        return int(self.cu_seqlens_padded[-1])

    @property
    def max_seqlen(self) -> int:
        """Tokens of the longest segment, padding included."""
        return int(self.padded_lengths.max())

    @cached_property
    def cu_seqlens(self) -> npt.NDArray[np.int32]:
        """int32 [segments + 1]: running sum of the real lengths."""
        return _running_sum(self.lengths)

    @cached_property
    def cu_seqlens_padded(self) -> npt.NDArray[np.int32]:
        """int32 [segments + 1]: where each segment starts in the pack."""
        return _running_sum(self.padded_lengths)


def _running_sum(lengths: IntArray) -> npt.NDArray[np.int32]:
    sums = np.zeros(lengths.size + 1, np.int32)
    np.cumsum(lengths, out=sums[1:])
    return sums
