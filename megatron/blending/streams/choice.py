"""pure. Nodes with several children, each of whose outputs is one of a child's: BlendDataset and ConcatDataset."""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from megatron.blending.metadatasets.yaml_place import nearest
from megatron.blending.order.proportions import Choices, Proportions, until_exhausted
from megatron.blending.order.weights import WeightSchedule, integer_weights
from megatron.blending.streams.arguments import as_pairs, check_datasets
from megatron.blending.streams.dataset import Binding, Block, Ints, Plan, SavableDataset
from megatron.blending.streams.lane import CursorNode, LaneEnd, Place

BLEND_MODES = ("exact", "random")
_ORDER_VERSION = 2
"""Of the order that weights and seed give: another one is another stream."""
_FEW_CHILDREN = 32
_AWAY_BLOCKS = 64
"""A child without weight for so long is not waited for."""


class ChoiceDataset(SavableDataset[Any]):
    """A node that says for each of its positions which child, and which of that child's."""

    keeps_place = False

    def choose(self, positions: Ints) -> Choices:
        raise NotImplementedError

    def plan(self, positions: Ints, block: Block) -> "ChoicePlan":
        return ChoicePlan(self, positions, block)

    def in_lane(self, lane: Any, parent: Any, child_number: int) -> "ChoiceLane":
        return ChoiceLane(self, lane, parent, child_number)

    def __len__(self) -> int:
        return sum(len(child) for child in self.children)

    def counts(self, position: int) -> list[int]:
        """How many of the first outputs are each child's; of a bound node."""
        raise NotImplementedError

    def is_away(self, child: int, position: int, length: int) -> bool:
        """Whether it is known that none of `length` outputs is a child's."""
        return False

    def used(self, position: int, drawn: dict[int, int]) -> list[int]:
        return self.counts(position)


class BlendDataset(ChoiceDataset):
    """Children in proportion to weights, of their outputs: of batches, if they give batches.

    Endless children keep their weights for ever. Finite ones are read through once per pass, in proportion for as long
    as they last. `BlendDataset((a, 0.6), (b, 0.4))`, also with one tuple of the pairs.
    """

    def __init__(
        self,
        *dataset_weights: Any,
        mode: str = "exact",
        schedule: WeightSchedule | None = None,
        worker_config: Any = None,
    ) -> None:
        """`mode`: "exact" is within one output of the weights at every prefix; "random" draws each output.

        Blends with finite children are exact in any mode. `schedule`: weights from each step on, in place of those of
        the pairs.
        """
        pairs = as_pairs("BlendDataset", dataset_weights)
        if mode not in BLEND_MODES:
            raise ValueError(f"mode of a blend must be one of {', '.join(BLEND_MODES)}; {nearest(mode, BLEND_MODES)}")
        self.children = tuple(dataset for dataset, _ in pairs)
        self.weights = tuple(weight for _, weight in pairs)
        self.mode = mode
        self.schedule = schedule
        self.worker_config = worker_config
        self._sizes = [child.size for child in self.children]
        self._proportions: Any = None
        self._whole = integer_weights(self.weights)
        if schedule is not None and not isinstance(schedule, WeightSchedule):
            raise ValueError(f"schedule of a blend must be a WeightSchedule, but is {schedule!r}")
        num_weights = len(self.children) if schedule is None else len(schedule.points[0][1])
        if num_weights != len(self.children):
            raise ValueError(
                f"the schedule has {num_weights} weights for {len(self.children)} data sets; give each one"
            )
        used = [size for size, weight in zip(self._sizes, self.weights) if weight]
        self._has_end = any(size is not None for size in used)
        self.size = None if None in used else sum(size or 0 for size in used)
        if schedule is not None and self._has_end:
            raise ValueError("a schedule of weights is for endless data sets; repeat them (RepeatDataset)")

    def on_bound(self, binding: Binding, is_outermost: bool) -> None:
        self._sizes = [child.size for child in self.children]
        seed = binding.seed_at(f"{self.place} blend")
        changes = [(position, weights) for place, position, weights in binding.changes if place == self.place]
        if self._has_end and changes:
            raise ValueError("the weights of finite data sets cannot be changed; repeat them (RepeatDataset)")
        self._segments: list[Any] = [(0, self._whole)] if self.schedule is None else self.schedule.segments()
        if self._has_end:
            self._segments = list(until_exhausted(self.weights, self._sizes))
        self._proportions = Proportions(self._segments, seed, "exact" if self._has_end else self.mode)
        for position, weights in changes:
            self._proportions.change(position, weights)
            self._segments = [segment for segment in self._segments if segment[0] < position] + [(position, weights)]

    def choose(self, positions: Ints) -> Choices:
        if self.size is None:
            return self._proportions.choose(positions)
        passes, places = np.divmod(positions, self.size)
        children, numbers = self._proportions.choose(places)
        sizes = np.array([size or 0 for size in self._sizes], np.int64)
        return Choices(children, numbers + passes * sizes[children])

    def counts(self, position: int) -> list[int]:
        if self.size is None:
            return self._proportions.counts(position)
        passes, place = divmod(position, self.size)
        return [passes * (size or 0) + count for size, count in zip(self._sizes, self._proportions.counts(place))]

    def is_away(self, child: int, position: int, length: int) -> bool:
        starts = [start for start, _ in self._segments]
        within = self._segments[bisect_right(starts, position) - 1 : bisect_left(starts, position + length)]
        return self.size is None and not any(weights[child] for _, weights in within)

    def signature(self) -> list[Any]:
        segments = [(0, self._whole)] if self.schedule is None else self.schedule.segments()
        written = [[start, list(integer_weights(weights))] for start, weights in segments]
        return [type(self).__name__, _ORDER_VERSION, self.mode, written]


class ConcatDataset(ChoiceDataset):
    """One data set after the other, each from its start to its end. Weights that come with them are ignored."""

    def __init__(self, *datasets: Any, worker_config: Any = None) -> None:
        if len(datasets) == 1 and isinstance(datasets[0], (list, tuple)):
            datasets = tuple(datasets[0])
        self.children = tuple(item[0] if isinstance(item, tuple) else item for item in datasets)
        self.worker_config = worker_config
        check_datasets("ConcatDataset", self.children)
        for number, child in enumerate(self.children):
            if child.size is None:
                raise ValueError(f"data set {number} of a ConcatDataset is endless; limit it (LimitDataset)")
        self.size: int = sum(child.size or 0 for child in self.children)
        self._ends = np.cumsum([child.size or 0 for child in self.children])

    def on_bound(self, binding: Binding, is_outermost: bool) -> None:
        self._ends = np.cumsum([child.size or 0 for child in self.children])
        self.size = int(self._ends[-1])

    def choose(self, positions: Ints) -> Choices:
        passes, places = np.divmod(positions, self.size)
        children = np.searchsorted(self._ends, places, side="right").astype(np.int64)
        sizes = np.diff(self._ends, prepend=0)
        return Choices(children, places - (self._ends - sizes)[children] + passes * sizes[children])

    def counts(self, position: int) -> list[int]:
        passes, place = divmod(position, self.size)
        sizes = [child.size or 0 for child in self.children]
        within = [min(max(place - (int(end) - size), 0), size) for end, size in zip(self._ends, sizes)]
        return [passes * size + count for size, count in zip(sizes, within)]


class ChoicePlan:
    def __init__(self, node: ChoiceDataset, positions: Ints, block: Block) -> None:
        chosen = node.choose(positions)
        self._positions = positions
        self.length = len(chosen.children)
        self._children = chosen.children
        self._list: list[int] | None = None
        self._at = 0
        self._plans: dict[int, Plan] = {}
        self._parts = list(_by_child(chosen.children))
        for child, places in self._parts:
            self._plans[child] = node.children[child].plan(chosen.numbers[places], block)
        self._ranks: Any = None

    def seek(self, offset: int) -> None:
        self._at = offset
        counts = np.bincount(self._children[:offset], minlength=max(self._plans, default=0) + 1).tolist()
        for child, plan in self._plans.items():
            plan.seek(counts[child])

    def take(self, count: int) -> list[Any]:
        if self._list is None:
            self._list = self._children.tolist()
        chosen = self._list[self._at : self._at + count]
        self._at += count
        if count == 1:
            return self._plans[chosen[0]].take(1)
        taken = {child: iter(self._plans[child].take(number)) for child, number in Counter(chosen).items()}
        return list(map(next, map(taken.__getitem__, chosen)))

    def child(self, number: int) -> Plan | None:
        return self._plans.get(number)

    def sources(self, start: int, end: int) -> set[int]:
        places = map(self.at, range(start, end))
        return set().union(*(self._plans[child].sources(rank, rank + 1) for child, rank in places))

    @property
    def span(self) -> tuple[int, int]:
        """The first and the last of the positions."""
        return int(self._positions.min()), int(self._positions.max())

    def at(self, place: int) -> tuple[int, int]:
        """Return (child, place in the child's plan)."""
        if self._ranks is None:
            self._ranks = np.zeros(self.length, np.int64)
            for _, places in self._parts:
                self._ranks[places] = np.arange(len(places))
        return int(self._children[place]), int(self._ranks[place])


class ChoiceLane(CursorNode):
    """In step with its parent also where a child is not: which child comes next is not touched by what it left out."""

    node: ChoiceDataset
    _last: tuple[int, Any] | None = None
    """Number and child of the last output."""

    def pull_same(self) -> tuple[Any, Any]:
        if self._last is not None:
            number, child = self._last
            self._children[number] = child
            try:
                # A rare one, or one whose weight is 0 by now, may have its next output far away.
                with self.lane.only_near():
                    return child.pull_same()
            except LaneEnd:
                pass
        return super().pull_same()

    def pull(self, place: Place | None) -> tuple[Any, Any]:
        while True:
            try:
                plan, block, within = self.locate(place)
            except LaneEnd:
                return self._rest()
            number, rank = plan.at(within)
            child = self.child(number)
            try:
                found = child.pull((block, rank))
            except LaneEnd:
                # It left out more than there was: the others go on without it.
                self.passed_over(block, within)
                continue
            self.passed(block, within)
            self._last = number, child
            if len(self._children) > _FEW_CHILDREN and not child.collect():
                del self._children[number]
            return found

    def is_away(self, child_number: int, block: int) -> bool:
        plan: Any = self.plan(block)
        if plan is not None and plan.length:
            first, last = plan.span
            return self.node.is_away(child_number, first, _AWAY_BLOCKS * (last + 1 - first)) or self._is_away(block)
        return self._is_away(block)

    def _rest(self) -> tuple[Any, Any]:
        """What children still have that gave more than planned."""
        for number in sorted(self._children):
            if self._children[number].is_detached():
                try:
                    return self._children[number].pull(None)
                except LaneEnd:
                    continue
        raise LaneEnd


def _by_child(children: Ints) -> Iterator[tuple[int, Ints]]:
    """(child, places where it stands), for each child that is there."""
    if not len(children):
        return
    order = np.argsort(children, kind="stable")
    ordered = children[order]
    starts = np.concatenate([[0], np.flatnonzero(np.diff(ordered)) + 1])
    for start, places in zip(starts, np.split(order, starts[1:])):
        yield int(ordered[start]), places
