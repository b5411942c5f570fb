"""pure. Some nodes make each of their positions of a range of their child's."""

from typing import Any

import numpy as np

from megatron.blending.streams.node import Block, Ints


class RangesPlan:
    """Positions of a node that are made of consecutive positions of its only child.

    Worked example: `starts` 0 and 10 with `sizes` 2 and 3 ask the child for the positions 0, 1, 10,
    11 and 12; position 1 of the plan is made of places 2 to 4 of the child's.
    """

    def __init__(self, node: Any, starts: Ints, sizes: Ints, block: Block) -> None:
        self.length = len(starts)
        self.node = node
        self._ends = np.cumsum(sizes)
        first = np.repeat(starts - (self._ends - sizes), sizes)
        self.positions: Ints = first + np.arange(len(first), dtype=np.int64)
        """Positions of the child, those of each range one after the other."""
        self.child = node.children[0].plan(self.positions, block)

    def child_range(self, place: int) -> tuple[int, int]:
        """Returns where in the child's plan a position starts and ends."""
        return int(self._ends[place - 1]) if place else 0, int(self._ends[place])

    def entries(self, start: int, end: int) -> list[tuple[Any, int]]:
        return self.child.entries(self.child_range(start)[0], self.child_range(end - 1)[1])
