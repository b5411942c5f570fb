"""pure. Packings of sequences in as few packs as possible, whatever the packs cost.

They say with how few microbatches a batch can do, and serve as placements where capacity is so
tight that balancing first leaves no room. `length` is int64 [N], descending.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.packing.scheduling import compiled
from megatron.packing.scheduling.problem import ScheduleRequest

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class CompletionLimits:
    """Limits of the search of `complete_packs` and `tight_packs`."""

    max_discrepancies: int = 2
    """Packs on each way down that take a later set than the first. Each more multiplies the time.
    """
    max_steps: int = 3_000_000
    """Sets and sequences looked at: about 9 ms. 300,000 are used up by scanning 1,024 sequences."""
    max_sequences: int = 1024
    """Sequences, above which best-fit stands: scanning them would use up the steps."""


COMPLETION = CompletionLimits()


class TightPacks(NamedTuple):
    """Sequences in as few packs as are found."""

    pack: IntArray
    """Pack of each sequence, [N]."""
    num_microbatches: int
    """Microbatches per rank that hold the packs."""


def tight_packs(
    request: ScheduleRequest, multiple: int, limits: CompletionLimits = COMPLETION
) -> TightPacks:
    """Packs sequences by best-fit decreasing, or by bin completion where that takes fewer packs.

    Microbatches per rank are a multiple of `multiple`. The search ends at the bound of the request.
    """
    length = request.sorted.length
    if request.payload_costs is not None:  # packs are filled from the longest on all the same
        order = np.argsort(-length, kind="stable")
        packed = _tight_packs(request, length[order], multiple, limits)
        pack = np.empty_like(packed.pack)
        pack[order] = packed.pack
        return packed._replace(pack=pack)
    return _tight_packs(request, length, multiple, limits)


def _tight_packs(
    request: ScheduleRequest, length: IntArray, multiple: int, limits: CompletionLimits
) -> TightPacks:
    capacity = request.capacity
    at_a_time = request.num_ranks * multiple  # 2 ranks, multiple 3: packs come in sixes
    pack, num_packs = best_fit(length, capacity)
    number, fewest = (max(-(-n // at_a_time), 1) for n in (num_packs, request.fewest_packs))
    while number > fewest and length.size <= limits.max_sequences:
        found = complete_packs(length, capacity, (number - 1) * at_a_time, limits)
        if found is None:
            break
        pack, number = found, number - 1
    return TightPacks(pack, number * multiple)


def best_fit(length: IntArray, capacity: int) -> tuple[IntArray, int]:
    """Puts each sequence in the fullest pack with room for it, else in a new one.

    Returns the pack of each sequence, [N], and the number of packs.
    """
    pack = np.empty(length.size, np.int64)
    if compiled.CORE is not None:
        return pack, compiled.CORE.call("best_fit", length.size, length, capacity, pack)
    free: list[tuple[int, int]] = []  # free tokens and number of each pack, ascending
    num_packs = 0
    for i, tokens in enumerate(length.tolist()):
        at = bisect_left(free, (tokens, 0))
        if at < len(free):
            left, pack[i] = free.pop(at)
        else:
            left, pack[i], num_packs = capacity, num_packs, num_packs + 1
        insort(free, (left - tokens, int(pack[i])))
    return pack, num_packs


def complete_packs(
    length: IntArray, capacity: int, num_packs: int, limits: CompletionLimits = COMPLETION
) -> IntArray | None:
    """Searches for a packing in `num_packs` packs, [N]; None where none is found.

    Bin completion (Korf, "A new algorithm for optimal bin packing", AAAI 2002): the longest
    sequence left opens a pack, and sets of others that may share it are tried, few and full ones
    first, as long as all packs together leave no more tokens free than there are to spare. Limited
    discrepancy search (Harvey and Ginsberg, IJCAI 1995): on each way down, later sets than the
    first are taken a few times only.

        lengths 10 8 7 7 6 6 6 5 5, 3 packs of 20    ->    10 7 | 8 7 5 | 6 6 6, no token to spare
    """
    if compiled.CORE is None:
        return None
    pack = np.empty(length.size, np.int64)
    search = limits.max_discrepancies, limits.max_steps
    problem = length.size, length, capacity, num_packs
    return pack if compiled.CORE.call("complete_packs", *problem, *search, pack) else None
