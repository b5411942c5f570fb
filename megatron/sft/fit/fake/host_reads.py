"""pure. Answers to what a step reads from tensors that have no values: how many tokens count for
the loss, and how many go to each expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
Routing = Literal["balanced", "worst"]
"""balanced: all experts get equally many tokens. worst: every token of every rank goes to experts
of this rank, as far as it may.
"""


class Experts(NamedTuple):
    """A layer's experts, and how they lie on ranks."""

    num_experts: int
    num_here: int
    topk: int
    num_ranks: int
    """Expert-parallel size."""
    rank: int


class Dispatch(NamedTuple):
    """Numbers of tokens that a dispatcher reads on the host, of one layer and microbatch."""

    tokens_per_expert: IntArray
    """[experts here]: from all ranks."""
    input_splits: IntArray
    """[ranks]: from here to each."""
    output_splits: IntArray
    """[ranks]: from each to here."""
    from_ranks: IntArray
    """[ranks, experts here]"""


def dispatch(num_tokens: int, experts: Experts, routing: Routing) -> Dispatch:
    """Returns the numbers where each rank has `num_tokens`, all of them routed alike."""
    spread = spread_evenly(num_tokens * experts.topk, experts.num_experts)
    first = experts.rank * experts.num_here
    if routing == "worst":
        spread = np.zeros(experts.num_experts, np.int64)
        num_here = num_tokens * min(experts.topk, experts.num_here)
        spread[first : first + experts.num_here] = spread_evenly(num_here, experts.num_here)
        others = np.r_[0:first, first + experts.num_here : experts.num_experts]
        if others.size:
            spread[others] = spread_evenly(num_tokens * experts.topk - num_here, others.size)
    here = spread[first : first + experts.num_here]
    return Dispatch(
        tokens_per_expert=here * experts.num_ranks,
        input_splits=spread.reshape(experts.num_ranks, experts.num_here).sum(1),
        output_splits=np.full(experts.num_ranks, here.sum()),
        from_ranks=np.tile(here, (experts.num_ranks, 1)),
    )


def spread_evenly(total: int, parts: int) -> IntArray:
    """`(7, 3) -> [3, 2, 2]`."""
    return np.full(parts, total // parts) + (np.arange(parts) < total % parts)


@dataclass(kw_only=True)
class HostReads:
    """Answers to reads by the host. Of a run on real tensors, `recorded` has its experts' numbers,
    in order.
    """

    routing: Routing = "balanced"
    recorded: Sequence[Dispatch] | None = None
    num_loss_tokens: int = 0
    """Loss tokens of the microbatch that was asked for last, in this rank's share of it."""
    num_selected: int = 0
    """Copies of tokens that the layer under way sends to experts."""
    _next: Iterator[Dispatch] | None = field(default=None, init=False)

    def dispatch(self, num_tokens: int, experts: Experts) -> Dispatch:
        """Returns the numbers of the next layer and microbatch."""
        if self.recorded is None:
            return dispatch(num_tokens, experts, self.routing)
        self._next = self._next or iter(self.recorded)
        return next(self._next)
