"""pure. Start and end of each sequence in a pack, and the padding that parallel layouts need."""

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
"""Treatment of a sequence that is longer than a pack."""


@dataclass(frozen=True, kw_only=True)
class Alignment:
    """Tokens that sequences and packs must be multiples of, so that their shards are equal."""

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
        """Returns the alignment of a parallel layout.

        Zigzag context parallel cuts each sequence in 2 cp pieces. Sequence parallel cuts a rank's
        share of the pack in tp, and that part is a multiple of `rank_multiple`.

            context parallel 2, tensor parallel 2 with sequence parallel    ->    sequence 4, pack 4
        """
        sequence = 2 * context_parallel_size if context_parallel_size > 1 else 1
        scatter = context_parallel_size * (tensor_parallel_size if sequence_parallel else 1)
        return cls(sequence=sequence, pack=math.lcm(sequence, scatter * rank_multiple))

    def padded_length(self, length: IntArray) -> IntArray:
        """Returns the tokens that sequences of these lengths occupy in a pack."""
        return length if self.sequence == 1 else -(-length // self.sequence) * self.sequence


@dataclass(frozen=True, eq=False)
class PackLayout:
    """Segments of a pack, known on every rank and on the host.

    A segment is a sequence and its padding. The tail that rounds a pack up is a last segment
    without a real token, so that `cu_seqlens_padded[-1]` is the number of tokens, as
    megatron-core's RoPE requires.
    """

    lengths: IntArray
    """int64 [segments]: real tokens."""
    padded_lengths: IntArray
    """int64 [segments]: tokens that each occupies, padding included."""
    parents: IntArray | None = None
    """int64 [segments]: number of the segment that each continues (the nodes of trees, see `tree`),
    -1 for none; None where all are sequences.
    """
    depths: IntArray | None = None
    """int64 [segments]: real tokens of the segments that each continues, where there are parents.
    """

    @classmethod
    def of(
        cls,
        lengths: Sequence[int] | IntArray,
        alignment: Alignment,
        parents: IntArray | None = None,
        depths: IntArray | None = None,
    ) -> PackLayout:
        """Returns the layout of sequences, or of trees' nodes, one after the other.

        Without sequences it is a dummy pack of one alignment unit.

            lengths 3 5, alignment 4 and 16    ->    lengths 3 5 0, padded_lengths 4 8 4
        """
        real = np.asarray(lengths, dtype=np.int64)
        padded = alignment.padded_length(real)
        total = int(padded.sum())
        tail = -total % alignment.pack if total else alignment.pack
        if tail:
            real, padded = np.concatenate((real, (0,))), np.concatenate((padded, (tail,)))
        if parents is None or depths is None or (parents < 0).all():
            return cls(real, padded)
        if tail:
            parents, depths = np.append(parents, -1), np.append(depths, 0)
        return cls(real, padded, parents, depths)

    @cached_property
    def num_tokens(self) -> int:
        """Tokens of the pack, padding included."""
        return int(self.cu_seqlens_padded[-1])

    @property
    def max_seqlen(self) -> int:
        """Tokens of the longest segment and of those that it continues, its padding included."""
        lengths = self.padded_lengths
        return int((lengths if self.depths is None else lengths + self.depths).max())

    @cached_property
    def cu_seqlens(self) -> npt.NDArray[np.int32]:
        """int32 [segments + 1]: running sum of the real lengths."""
        if self.lengths is self.padded_lengths:
            return self.cu_seqlens_padded
        return _running_sum(self.lengths)

    @cached_property
    def cu_seqlens_padded(self) -> npt.NDArray[np.int32]:
        """int32 [segments + 1]: where each segment starts in the pack."""
        return _running_sum(self.padded_lengths)


def _running_sum(lengths: IntArray) -> npt.NDArray[np.int32]:
    sums = np.zeros(lengths.size + 1, np.int32)
    lengths.cumsum(out=sums[1:])
    return sums
