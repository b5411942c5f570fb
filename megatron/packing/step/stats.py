"""pure. Account of a packed global batch: exact counts, padding, fill, balance against the lower
bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a report of a run needs no arrays
    from megatron.packing.batch.layout import Alignment
    from megatron.packing.batch.nodes import SampleSizes
    from megatron.packing.scheduling.problem import IntArray, Schedule, ScheduleRequest


@dataclass(frozen=True, kw_only=True)
class PackingStats:
    """One global batch over all data-parallel ranks, in columns of `metrics.jsonl`. Counts of
    tokens and squares are of real, unpadded lengths; exact integers.
    """

    sequences: int
    """Sequences trained on."""
    tokens: int
    """Real tokens: sum of the sequences' lengths."""
    square_sum: int
    """Sum of the squared lengths, which attention's cost follows. A tree has for each node of l
    tokens below d others l^2 + 2 l d.
    """
    window_square_sums: list[int] = field(default_factory=list)
    """The same within each attention window of the model (`cost.window_squares`), narrow ones
    first; empty without windows. Of a tree, at most.
    """
    num_loss_tokens: int
    """Tokens that count for the loss; all tokens where that is not known."""
    path_tokens: int = 0
    """Tokens of all paths, which separate sequences would compute; 0 if no sequence is a tree.
    """
    padded_tokens: int
    """Tokens computed: sequences, their padding, tails and dummy packs."""
    row_tokens: int = 0
    """Tokens that would be computed without packing (`padded_rows`); 0 in files of older versions.
    """
    capacity_tokens: int
    """Tokens that the packs could hold: microbatches * capacity * data-parallel size."""
    microbatches: int
    """Microbatches of each data-parallel rank."""
    num_ranks: int
    """Data-parallel size."""
    step_cost: float
    """Modelled time of the step (see `step_time`): in seconds with a fitted cost, else in FLOPs."""
    step_cost_bound: float
    """The least that any schedule takes; in pipelines, the least that packs of even size take."""
    bubble: float
    """Share of the modelled time, over all ranks and stages, in which nothing is computed."""
    moved_tokens: int
    """Tokens of sequences that are trained on another data-parallel rank than loaded, without
    padding, which does not travel.
    """
    payload_cost: float = 0.0
    """Part of all packs' cost that payloads have, in the unit of `step_cost`; 0 without payloads.
    """
    payloads: int = 0
    """Sequences with a payload."""
    payload_bytes: int = 0
    """Bytes of decoded payloads on the data rank that holds most."""
    moved_payload_bytes: int = 0
    """Bytes that payloads take between data ranks, whether as keys or as tensors."""
    dropped_samples: int = 0
    """Samples, or pairs in one, that were skipped: too long, broken, or without trained tokens."""
    truncated_samples: int = 0
    """Samples that were truncated."""
    delays: list[int] = field(default_factory=list)
    """Sequences of this step that were delayed by 0, 1, 2 ... steps; empty if none may be."""
    waiting: int = 0
    """Sequences of any rank that are delayed to a later step."""

    @property
    def fill(self) -> float:
        """Share of the packs' capacity that real tokens take."""
        return self.tokens / self.capacity_tokens if self.capacity_tokens else 0.0

    @property
    def padding(self) -> float:
        """Share of the computed tokens that is padding."""
        return 1 - self.tokens / self.padded_tokens if self.padded_tokens else 0.0

    @property
    def balance(self) -> float:
        """Modelled time over its bound. Only uneven packs of pipelines can be below 1."""
        return self.step_cost / self.step_cost_bound if self.step_cost_bound else 1.0

    @property
    def moved(self) -> float:
        """Share of the tokens that change data-parallel ranks."""
        return self.moved_tokens / self.tokens if self.tokens else 0.0


def padded_rows(lengths: Sequence[int], capacity: int) -> list[tuple[int, int]]:
    """Returns the microbatches of a rank without packing, as (longest, number of rows).

    Sequences come in the order loaded, each padded to the longest of its microbatch, as many as fit
    into `capacity` tokens.

        lengths 3 5 9 2, capacity 12    ->    (5, 2), (9, 1), (2, 1)
    """
    rows: list[tuple[int, int]] = []
    longest, count = 0, 0
    for length in lengths:
        longer = length if length > longest else longest  # without a call: one rank does it for all
        if count and longer * (count + 1) > capacity:
            rows.append((longest, count))
            longer, count = length, 0
        longest, count = longer, count + 1
    return [*rows, (longest, count)]


def packing_stats(
    *,
    request: ScheduleRequest,
    schedule: Schedule,
    length: IntArray,
    alignment: Alignment,
    trees: SampleSizes | None = None,
) -> PackingStats:
    """Returns the account of a scheduled global batch, without samples that are not in it.

    Args:
        length: int64 [N], real lengths of the request's sequences.
        trees: sizes of the request's sequences, if any is a tree.
    """
    from megatron.packing.scheduling.cost import window_squares

    # Exact for any lengths, as integers of Python do not overflow.
    of_length = [value * value for value in length.tolist()]
    squares = of_length if trees is None else trees.squares.tolist()
    num_ranks, num_microbatches = schedule.num_ranks, schedule.num_microbatches
    # A pack is padded to whole alignment units, and an empty one is a dummy pack of one unit.
    computed = (-(-request.pack_lengths(schedule) // alignment.pack)).clip(min=1) * alignment.pack
    costs = request.pack_costs(schedule)
    time = request.model.time_of(costs)
    return PackingStats(
        sequences=len(length),
        tokens=int(length.sum()),
        num_loss_tokens=int((length if request.loss_tokens is None else request.loss_tokens).sum()),
        square_sum=sum(squares),
        window_square_sums=[
            sum(map(min, window_squares(length, window).tolist(), squares))
            for window, _ in request.cost.windows
        ],
        path_tokens=0 if trees is None else int(trees.path_tokens.sum()),
        padded_tokens=int(computed.sum()),
        row_tokens=sum(
            longest * count
            for rank in range(num_ranks)
            for longest, count in padded_rows(
                length[request.source_rank == rank].tolist(), request.capacity
            )
        ),
        capacity_tokens=num_ranks * num_microbatches * request.capacity,
        microbatches=num_microbatches,
        num_ranks=num_ranks,
        moved_tokens=int(length[request.source_rank != schedule.rank].sum()),
        payload_cost=0.0 if request.payload_costs is None else float(request.payload_costs.sum()),
        step_cost=time,
        step_cost_bound=request.bound,
        bubble=max(1 - float(costs.sum()) / (time * num_ranks * request.model.num_stages), 0.0)
        if time
        else 0.0,
    )
