"""pure. BlendDataset and ConcatDataset choose for each of their outputs one of a child's."""

from collections import Counter
from collections.abc import Iterator
from itertools import chain
from typing import Any, get_args

import numpy as np

from megatron.blending.arguments import check_one_of
from megatron.blending.order.proportions import BlendMode, Choices, Proportions, until_exhausted
from megatron.blending.order.weights import WeightSchedule, integer_weights
from megatron.blending.streams.node import (
    Binding,
    Block,
    Ints,
    Plan,
    SavableDataset,
    as_pairs,
    check_datasets,
)
from megatron.blending.streams.worker_config import WorkerConfig

BLEND_MODES = get_args(BlendMode)
_ORDER_VERSION = 2
"""Version of the order that weights and seed give: another one is another stream."""


class ChoiceDataset(SavableDataset[Any]):
    """The node says for each of its positions which child, and which of that child's."""

    preserves_position = False

    def choose(self, positions: Ints) -> Choices:
        raise NotImplementedError

    def plan(self, positions: Ints, block: Block) -> "ChoicePlan":
        return ChoicePlan(self, positions, block)

    def __len__(self) -> int:
        return sum(len(child) for child in self.children)

    def counts(self, position: int) -> list[int]:
        """Returns how many of the first outputs are each child's; of a bound node."""
        raise NotImplementedError

    def used(self, position: int) -> list[int]:
        return self.counts(position)


class BlendDataset(ChoiceDataset):
    """Gives outputs of its children in proportion to weights: batches, if they give batches.

    Endless children keep their weights for ever. Finite ones are read through once per pass, in
    proportion for as long as they last. `BlendDataset((a, 0.6), (b, 0.4))`, also with one tuple of
    the pairs.
    """

    def __init__(
        self,
        *dataset_weights: object,
        mode: BlendMode = "exact",
        schedule: WeightSchedule | None = None,
        worker_config: WorkerConfig | None = None,
    ) -> None:
        """`mode`: "exact" is within one output of the weights at every prefix; "random" draws each
        output.

        Blends with finite children are exact in any mode. `schedule`: weights from each step on, in
        place of those of the pairs.
        """
        pairs = as_pairs("BlendDataset", dataset_weights)
        check_one_of("mode of a blend", mode, BLEND_MODES)
        self.children = tuple(dataset for dataset, _ in pairs)
        self.weights = tuple(weight for _, weight in pairs)
        self.mode = mode
        self.schedule = schedule
        self.worker_config = worker_config
        self._sizes = [child.size for child in self.children]
        self._proportions: Any = None
        self._by_weights: Any = None
        self._whole = integer_weights(self.weights)
        if schedule is not None and not isinstance(schedule, WeightSchedule):
            raise ValueError(f"schedule of a blend must be a WeightSchedule, but is {schedule!r}")
        num_weights = len(self.children) if schedule is None else len(schedule.points[0][1])
        if num_weights != len(self.children):
            raise ValueError(
                f"the schedule has {num_weights} weights for {len(self.children)} data sets; give "
                "each one"
            )
        used = [size for size, weight in zip(self._sizes, self.weights) if weight]
        self._has_end = any(size is not None for size in used)
        self.is_block = any(child.is_block for child in self.children)
        self.size = None if None in used else sum(size or 0 for size in used)
        if schedule is not None and self._has_end:
            raise ValueError(
                "a schedule of weights is for endless data sets; repeat them (RepeatDataset)"
            )

    def on_bound(self, binding: Binding, is_outermost: bool) -> None:
        self._sizes = [child.size for child in self.children]
        seed = binding.seed_at(f"{self.place} blend")
        segments = [(0, self._whole)] if self.schedule is None else self.schedule.segments()
        self._by_weights = Proportions(segments, seed, self.mode)
        self._proportions = self._by_weights
        if self._has_end:
            self._proportions = Proportions(until_exhausted(self.weights, self._sizes), seed)

    def choose(self, positions: Ints) -> Choices:
        if self.size is None:
            return self._proportions.choose(positions)
        passes, places = np.divmod(positions, self.size)
        children, numbers = self._proportions.choose(places)
        # A further pass chooses the same children; each goes on where it ended in the pass before.
        sizes = np.array([size or 0 for size in self._sizes], np.int64)
        return Choices(children, numbers + passes * sizes[children])

    def counts(self, position: int) -> list[int]:
        if self.size is None:
            return self._proportions.counts(position)
        passes, place = divmod(position, self.size)
        return [
            passes * (size or 0) + count
            for size, count in zip(self._sizes, self._proportions.counts(place))
        ]

    @property
    def chosen(self) -> list[tuple[int, int]]:
        """(child, weight) of those that have any."""
        return [(child, weight) for child, weight in enumerate(self._whole) if weight]

    def children_of(self, output: int, count: int) -> list[int]:
        """Returns the children of consecutive outputs, by the weights alone: where children are
        packs or groups, nobody knows beforehand when one runs out.
        """
        positions = np.arange(output, output + count, dtype=np.int64)
        return self._by_weights.choose(positions).children.tolist()

    def signature(self) -> list[Any]:
        segments = [(0, self._whole)] if self.schedule is None else self.schedule.segments()
        written = [[start, list(integer_weights(weights))] for start, weights in segments]
        return [type(self).__name__, _ORDER_VERSION, self.mode, written]


class ConcatDataset(ChoiceDataset):
    """Gives one data set after the other, each from its start to its end, whatever weights come
    with them.
    """

    def __init__(self, *datasets: Any, worker_config: WorkerConfig | None = None) -> None:
        if len(datasets) == 1 and isinstance(datasets[0], (list, tuple)):
            datasets = tuple(datasets[0])
        self.children = tuple(item[0] if isinstance(item, tuple) else item for item in datasets)
        self.worker_config = worker_config
        check_datasets("ConcatDataset", self.children)
        for number, child in enumerate(self.children):
            if child.size is None:
                raise ValueError(
                    f"data set {number} of a ConcatDataset is endless; limit it (LimitDataset)"
                )
        self.size: int = sum(child.size or 0 for child in self.children)
        self._ends = np.cumsum([child.size or 0 for child in self.children])
        self.is_block = any(child.is_block for child in self.children)

    def on_bound(self, binding: Binding, is_outermost: bool) -> None:
        self._ends = np.cumsum([child.size or 0 for child in self.children])
        self.size = int(self._ends[-1])

    def choose(self, positions: Ints) -> Choices:
        passes, places = np.divmod(positions, self.size)
        children = np.searchsorted(self._ends, places, side="right").astype(np.int64)
        # Children of 3 and 2: place 4 is the second one's number 1, and 1 + 2 in the next pass.
        sizes = np.diff(self._ends, prepend=0)
        starts = self._ends - sizes
        return Choices(children, places - starts[children] + passes * sizes[children])

    def counts(self, position: int) -> list[int]:
        passes, place = divmod(position, self.size)
        sizes = [child.size or 0 for child in self.children]
        within = [
            min(max(place - (int(end) - size), 0), size) for end, size in zip(self._ends, sizes)
        ]
        return [passes * size + count for size, count in zip(sizes, within)]


class ChoicePlan:
    """Tells which child gives each output, and the place in that child's plan."""

    def __init__(self, node: ChoiceDataset, positions: Ints, block: Block) -> None:
        # Each child plans what it gives at all of these positions in one call. Outputs of children
        # 0 1 0    ->    child 0 plans two, child 1 one; places 0 0 1 in their plans.
        chosen = node.choose(positions)
        self.length = len(chosen.children)
        self._plans: dict[int, Plan] = {}
        places_of = np.zeros(self.length, np.int64)
        for child, places in _by_child(chosen.children):
            places_of[places] = np.arange(len(places))
            self._plans[child] = node.children[child].plan(chosen.numbers[places], block)
        self._children: list[int] = chosen.children.tolist()
        self._places: list[int] = places_of.tolist()

    def values(self, start: int, end: int) -> list[Any]:
        if end == start + 1:
            place = self._places[start]
            return self._plans[self._children[start]].values(place, place + 1)
        # One call per child again; a child's outputs stand together in its plan. They are then
        # dealt out in the order of the choices.
        chosen = self._children[start:end]
        first: dict[int, int] = {}
        for child, place in zip(chosen, self._places[start:end]):
            first.setdefault(child, place)
        counts = Counter(chosen)
        taken = {
            child: iter(self._plans[child].values(at, at + counts[child]))
            for child, at in first.items()
        }
        return list(map(next, map(taken.__getitem__, chosen)))

    def entries(self, start: int, end: int) -> list[tuple[Any, int]]:
        found = (
            self._plans[child].entries(at, at + 1)
            for child, at in zip(self._children[start:end], self._places[start:end])
        )
        return list(chain.from_iterable(found))


def _by_child(children: Ints) -> Iterator[tuple[int, Ints]]:
    """Yields (child, places where it stands), for each child that is there."""
    if not len(children):
        return
    order = np.argsort(children, kind="stable")
    ordered = children[order]
    starts = np.concatenate([[0], np.flatnonzero(np.diff(ordered)) + 1])
    for start, places in zip(starts, np.split(order, starts[1:])):
        yield int(ordered[start]), places
