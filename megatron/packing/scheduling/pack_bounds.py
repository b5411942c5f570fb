"""pure. How many packs sequences need at the least; see `bounds`."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.packing.scheduling import native
from megatron.packing.scheduling.native import address as _at

IntArray = npt.NDArray[np.int64]


class Span(NamedTuple):
    """Numbers of microbatches from `first` to `last`; None: any from `first` on."""

    first: int
    last: int | None

    @property
    def is_single(self) -> bool:
        return self.first == self.last


def microbatch_lower_bound(length: IntArray, num_ranks: int, capacity: int, multiple: int) -> int:
    """Microbatches per rank that every schedule needs, a positive multiple of `multiple`, for packs of at most
    `capacity` tokens.

    `length` is int64 [N], descending, each in 1..capacity. Bound L2 of Martello and Toth, "Lower bounds and reduction
    procedures for the bin packing problem" (1990). O(N).
    """
    packs = int(packs_needed(length, capacity).max(initial=0))
    return max(1, math.ceil(packs / (num_ranks * multiple))) * multiple


def packs_needed(length: IntArray, capacity: int) -> IntArray:
    """Packs of at most `capacity` tokens that the i longest sequences need at the least, i = 1 ... N, int64 [N].

    `length` is int64 [N], descending, each in 1..capacity. Let t be the shortest of those i. Two sequences longer than
    capacity / 2 never share a pack; one longer than capacity - t has no room for t tokens, so that those of t to
    capacity / 2 tokens fit only beside the ones in between, or into packs of their own (Martello and Toth); and no
    pack holds more than capacity / t of them.
    """
    if native.LIBRARY is not None:
        needed = np.empty(length.size, np.int64)
        native.LIBRARY.packs_needed(length.size, _at(length), capacity, _at(needed))
        return needed
    sums = np.concatenate(([0], np.cumsum(length)))
    count = np.arange(1, length.size + 1)
    num_large = np.minimum(int(np.searchsorted(-length, -(capacity // 2))), count)
    num_alone = np.minimum(np.searchsorted(-length, -(capacity - length)), num_large)
    room_beside_large = (num_large - num_alone) * capacity - (sums[num_large] - sums[num_alone])
    overflow = np.maximum(sums[1:] - sums[num_large] - room_beside_large, 0)
    packs = np.maximum(num_large + -(-overflow // capacity), -(-count // (capacity // np.maximum(length, 1))))
    return np.maximum.accumulate(packs)
