"""pure. What a global batch held and how well it was packed: exact counts, padding, fill, balance against the lower
bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron.packing.batch.layout import Alignment
from megatron.packing.scheduling.moved_tokens import tokens_moved
from megatron.packing.scheduling.problem import Schedule, ScheduleRequest


@dataclass(frozen=True, kw_only=True)
class PackingStats:
    """One global batch over all data-parallel ranks. Counts of tokens and squares are of real, unpadded lengths;
    exact integers.
    """

    num_sequences: int
    num_tokens: int
    square_sum: int
    num_loss_tokens: int
    """Of the sequences, those that count for the loss; all of them where that is not known."""
    num_padded_tokens: int
    """Tokens computed: sequences, their padding, tails and dummy packs."""
    num_row_tokens: int
    """That would be computed without packing; see `padded_rows`."""
    num_microbatches: int
    """Of each rank."""
    num_ranks: int
    capacity: int
    """Tokens that a pack may hold."""
    num_dropped: int
    num_cut: int
    num_moved_tokens: int
    """Of sequences that another rank computes than the one that drew them; without padding, which doesn't travel."""
    step_cost: float
    """Modelled time of the step (see `step_time`), in the cost model's unit: pipelines simulated."""
    step_cost_bound: float
    """No schedule takes less; in pipelines, no schedule of even packs."""
    bubble: float
    """Share of the modelled time, over all data-parallel ranks and stages, in which nothing is computed."""

    @property
    def balance(self) -> float:
        """Modelled time over the bound: 1 cannot be beaten, but by pipelines whose first and last packs are small."""
        return self.step_cost / self.step_cost_bound if self.step_cost_bound else 1.0

    @property
    def moved(self) -> float:
        """Share of the tokens that change ranks."""
        return self.num_moved_tokens / self.num_tokens if self.num_tokens else 0.0

    @property
    def fill(self) -> float:
        """Share of the packs' capacity that holds real tokens."""
        return self.num_tokens / (self.num_ranks * self.num_microbatches * self.capacity)

    @property
    def padding(self) -> float:
        """Share of the computed tokens that are padding."""
        return 1 - self.num_tokens / self.num_padded_tokens


def padded_rows(lengths: Sequence[int], capacity: int) -> list[tuple[int, int]]:
    """The microbatches of a rank without packing, (longest, number of rows): sequences in the order drawn, each padded
    to the longest of its microbatch, as many as fit into `capacity` tokens. (3, 5, 9, 2) in 12: (5, 2), (9, 1), (2, 1).
    """
    rows: list[tuple[int, int]] = []
    longest, count = 0, 0
    for length in lengths:
        if count and max(longest, length) * (count + 1) > capacity:
            rows.append((longest, count))
            longest, count = 0, 0
        longest, count = max(longest, length), count + 1
    return [*rows, (longest, count)]


def packing_stats(
    *,
    request: ScheduleRequest,
    schedule: Schedule,
    length: np.ndarray,
    alignment: Alignment,
    num_dropped: int,
    num_cut: int,
) -> PackingStats:
    """Account for a scheduled global batch; `length` int64 [N] are the real lengths of the request's sequences."""
    num_ranks, num_microbatches = schedule.num_ranks, schedule.num_microbatches
    occupied = np.zeros(num_ranks * num_microbatches, dtype=np.int64)
    np.add.at(occupied, schedule.pack, request.lengths)
    computed = np.maximum(-(-occupied // alignment.pack), 1) * alignment.pack
    costs = request.pack_costs(schedule)
    time = request.model.time_of(costs)
    return PackingStats(
        num_sequences=len(length),
        num_tokens=int(length.sum()),
        num_loss_tokens=int((length if request.loss_tokens is None else request.loss_tokens).sum()),
        square_sum=sum(value * value for value in length.tolist()),
        num_padded_tokens=int(computed.sum()),
        num_row_tokens=sum(
            longest * count
            for rank in range(num_ranks)
            for longest, count in padded_rows(length[request.source_rank == rank].tolist(), request.capacity)
        ),
        num_microbatches=num_microbatches,
        num_ranks=num_ranks,
        capacity=request.capacity,
        num_dropped=num_dropped,
        num_cut=num_cut,
        num_moved_tokens=tokens_moved(length, request.source_rank, schedule.rank),
        step_cost=time,
        step_cost_bound=request.bound,
        bubble=max(1 - float(costs.sum()) / (time * num_ranks * request.model.num_stages), 0.0) if time else 0.0,
    )
