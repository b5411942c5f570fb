"""pure. What nodes have in common that hold samples back: an output takes as many of the child's as it turns out."""

from functools import cached_property
from typing import Any

import numpy as np

from megatron.blending.streams.arguments import check_datasets
from megatron.blending.streams.dataset import Binding, Block, Ints, NotPlain, Plan, SavableDataset
from megatron.blending.streams.lane import LaneNode, Place

_MOST_CONSECUTIVE = 128


class HoldingDataset(SavableDataset[Any]):
    """A node whose outputs take as many of the child's as it turns out. Each lane holds samples of its own."""

    def __init__(self, dataset: Any, num_held: int, worker_config: Any) -> None:
        check_datasets(type(self).__name__, [dataset])
        self.children = (dataset,)
        self.num_held = num_held
        self.worker_config = worker_config
        self.size = dataset.size
        """An upper bound."""

    @property
    def num_under_way(self) -> int:
        """About how many samples a lane holds back."""
        return self.num_held

    @property
    def num_consecutive(self) -> int:
        """How many consecutive outputs of the child belong to one lane: neighbours, for the sake of reading, where
        there is no end; of finite data each lane must get its share.
        """
        return min(self.num_held, _MOST_CONSECUTIVE) if self.children[0].size is None else 1

    @cached_property
    def samples_per_output(self) -> int:
        return self.num_consecutive * self.children[0].samples_per_output

    def on_bound(self, binding: Binding, is_outermost: bool) -> None:
        self.size = self.children[0].size

    def plan(self, positions: Ints, block: Block) -> "HoldingPlan":
        return HoldingPlan(self, positions, block)

    def used(self, position: int, drawn: dict[int, int]) -> list[int]:
        return [drawn.get(self.number, 0)]

    def signature(self) -> list[Any]:
        return [type(self).__name__, self.num_held]


class HoldingPlan:
    def __init__(self, node: HoldingDataset, positions: Ints, block: Block) -> None:
        self.length = len(positions)
        several = node.num_consecutive
        within = (positions[:, None] * several + np.arange(several)).ravel()
        self._child = node.children[0].plan(within, block)

    def take(self, count: int) -> list[Any]:
        raise NotPlain

    def seek(self, offset: int) -> None:
        pass

    def child(self, number: int) -> Plan:
        return self._child

    def sources(self, start: int, end: int) -> set[int]:
        return self._child.sources(0, self._child.length)


class HoldingLane(LaneNode):
    """Its state begins with how many it drew."""

    node: Any
    is_started = False
    num_drawn = 0

    def draw(self, place: Place | None) -> tuple[Any, Any]:
        """Take the child's next output. The first is where this node stands, the others follow it."""
        child = self.child(0)
        if self.is_started:
            found = child.pull(None)
        else:
            found = child.pull(None if place is None else (place[0], place[1] * self.node.num_consecutive))
            self.is_started = True
            child.detach()
        self.num_drawn += 1
        return found

    def rebuild(self, origin: Any) -> list[Any]:
        """Make a sample that was held back again: a list of it, or of none if it fails this time."""
        try:
            return [self.node.children[0].rebuild(origin)]
        except Exception as error:
            self.fail(error, self.node.children[0], origin, None)
            return []

    def is_detached(self) -> bool:
        return self.is_started

    def detach(self) -> None:
        pass
