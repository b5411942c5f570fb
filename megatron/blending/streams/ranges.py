"""pure. Plan of a node that makes each of its positions of a range of positions of its child."""

from typing import Any

import numpy as np

from megatron.blending.streams.node import Ints, PlanBatch


class RangesPlan:
    """Plan of positions that are made of consecutive positions of the node's only child.

    `starts` 0 and 10 with `sizes` 2 and 3 -> the child plans the positions 0 1 10 11 12. Index 1 of
    this plan is made of the indices 2 to 4 of the child's plan: `child_range(1)` is (2, 5).
    """

    def __init__(self, node: Any, starts: Ints, sizes: Ints, plan_batch: PlanBatch) -> None:
        self.length = len(starts)
        self.node = node
        self._ends = np.cumsum(sizes)
        # starts 0 10, sizes 2 3, ends 2 5 -> 0 0 8 8 8, plus 0 1 2 3 4 -> 0 1 10 11 12.
        first = np.repeat(starts - (self._ends - sizes), sizes)
        self.positions: Ints = first + np.arange(len(first), dtype=np.int64)
        """Positions of the child, those of each range one after the other."""
        self.child = node.children[0].plan(self.positions, plan_batch)

    def child_range(self, index: int) -> tuple[int, int]:
        """Returns the start and end, in the child's plan, of what index `index` is made of."""
        return int(self._ends[index - 1]) if index else 0, int(self._ends[index])

    def entries(self, start: int, end: int) -> list[tuple[Any, int]]:
        return self.child.entries(self.child_range(start)[0], self.child_range(end - 1)[1])
