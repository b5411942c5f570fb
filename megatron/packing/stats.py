"""pure. What a global batch held and how well it was packed: exact counts, padding, fill, balance against the lower
bound.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from megatron.packing.bounds import rank_cost_lower_bound
from megatron.packing.cost import SequenceCost
from megatron.packing.layout import Alignment
from megatron.packing.schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class PackingStats:
    """One global batch over all data-parallel ranks. Counts of tokens and squares are of real, unpadded lengths;
    exact integers.
    """

    num_sequences: int
    num_tokens: int
    square_sum: int
    num_padded_tokens: int
    """Tokens computed: sequences, their padding, tails and dummy packs."""
    num_microbatches: int
    """Of each rank."""
    num_ranks: int
    capacity: int
    """Tokens that a pack may hold."""
    num_dropped: int
    num_cut: int
    max_rank_cost: float
    """FLOPs of the most loaded data-parallel rank, by the schedulers' cost model."""
    cost_lower_bound: float
    """No schedule's most loaded rank has less."""

    @property
    def balance(self) -> float:
        """Most loaded rank over the lower bound; 1 cannot be beaten."""
        return self.max_rank_cost / self.cost_lower_bound if self.cost_lower_bound else 1.0

    @property
    def fill(self) -> float:
        """Share of the packs' capacity that holds real tokens."""
        return self.num_tokens / (self.num_ranks * self.num_microbatches * self.capacity)

    @property
    def padding(self) -> float:
        """Share of the computed tokens that are padding."""
        return 1 - self.num_tokens / self.num_padded_tokens

    def to_numbers(self) -> np.ndarray:
        """int64 [fields]; floats keep their bits."""
        values = [getattr(self, field.name) for field in fields(self)]
        return np.array([_bits(value) for value in values], dtype=np.int64)

    @classmethod
    def from_numbers(cls, numbers: np.ndarray) -> PackingStats:
        """The inverse of `to_numbers`."""
        return cls(
            **{
                field.name: number.view(np.float64).item() if field.type == "float" else int(number)
                for field, number in zip(fields(cls), numbers)
            }
        )


def _bits(value: int | float) -> int:
    return int(np.float64(value).view(np.int64)) if isinstance(value, float) else value


def packing_stats(
    *,
    length: np.ndarray,
    schedule: Schedule,
    alignment: Alignment,
    cost: SequenceCost,
    capacity: int,
    num_dropped: int,
    num_cut: int,
) -> PackingStats:
    """Account for a scheduled global batch; `length` int64 [N] are the real lengths."""
    num_packs = schedule.num_ranks * schedule.num_microbatches
    pack_of = schedule.rank * schedule.num_microbatches + schedule.microbatch
    occupied = np.zeros(num_packs, dtype=np.int64)
    np.add.at(occupied, pack_of, alignment.padded_length(length))
    computed = np.maximum(-(-occupied // alignment.pack), 1) * alignment.pack
    costs = cost(length)
    rank_costs = np.bincount(schedule.rank, weights=costs, minlength=schedule.num_ranks)
    return PackingStats(
        num_sequences=len(length),
        num_tokens=int(length.sum()),
        square_sum=sum(value * value for value in length.tolist()),
        num_padded_tokens=int(computed.sum()),
        num_microbatches=schedule.num_microbatches,
        num_ranks=schedule.num_ranks,
        capacity=capacity,
        num_dropped=num_dropped,
        num_cut=num_cut,
        max_rank_cost=float(rank_costs.max()),
        cost_lower_bound=float(rank_cost_lower_bound(costs, schedule.num_ranks)),
    )
