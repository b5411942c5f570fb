"""pure. BlendDataset and ConcatDataset choose for each of their outputs one of a child's."""

from collections import Counter
from collections.abc import Iterator
from itertools import chain
from typing import Any, get_args

import numpy as np

from megatron.blending.arguments import check_one_of
from megatron.blending.order.proportions import (
    BlendMode,
    Choices,
    Proportions,
    Segments,
    until_exhausted,
)
from megatron.blending.order.weights import WeightSchedule, integer_weights
from megatron.blending.streams.node import (
    Binding,
    Ints,
    Plan,
    PlanBatch,
    SavableDataset,
    as_pairs,
    check_datasets,
)
from megatron.blending.streams.worker_config import WorkerConfig

BLEND_MODES = get_args(BlendMode)
_ORDER_VERSION = 2
"""Version of the order that weights and seed give. Another version is another stream, so that
states saved with it are refused.
"""


class ChoiceDataset(SavableDataset[Any]):
    """Makes each of its positions of one position of one of its children.

    Children 0 1 0 with the numbers 0 0 1: positions 0 and 1 of child 0, with position 0 of child 1
    between them.
    """

    shares_tree_path = False

    def choose(self, positions: Ints) -> Choices:
        raise NotImplementedError

    def plan(self, positions: Ints, plan_batch: PlanBatch) -> "ChoicePlan":
        return ChoicePlan(self, positions, plan_batch)

    def __len__(self) -> int:
        return sum(len(child) for child in self.children)

    def counts(self, position: int) -> list[int]:
        """Returns how many of the first `position` outputs are each child's. The node is bound."""
        raise NotImplementedError

    def used(self, position: int) -> list[int]:
        return self.counts(position)


class BlendDataset(ChoiceDataset):
    """Gives outputs of its children in proportion to weights: batches, if they give batches.

    - Endless children keep their weights for ever.
    - Finite children are read once per pass, in proportion for as long as they last.
    - Of finite and endless children together, the finite ones are read once. Then the endless ones
      continue alone, for ever.

    `BlendDataset((a, 0.6), (b, 0.4))`, also with one tuple of the pairs.
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
        self._choices_in_pass: Any = None
        self._choices_by_weight: Any = None
        self._integer_weights = integer_weights(self.weights)
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
        seed = binding.seed_at(f"{self.tree_path} blend")
        # By the weights alone, as if no child ended. It differs from the order within a pass only
        # where some child is finite.
        self._choices_by_weight = Proportions(self._segments(), seed, self.mode)
        self._choices_in_pass = self._choices_by_weight
        if self._has_end:
            self._choices_in_pass = Proportions(until_exhausted(self.weights, self._sizes), seed)

    def _segments(self) -> Segments:
        return [(0, self._integer_weights)] if self.schedule is None else self.schedule.segments()

    def choose(self, positions: Ints) -> Choices:
        if self.size is None:
            return self._choices_in_pass.choose(positions)
        passes, positions_in_pass = np.divmod(positions, self.size)
        children, numbers = self._choices_in_pass.choose(positions_in_pass)
        # Every pass chooses the same children, and each continues where it ended in the pass
        # before: children of 3 and 2 outputs begin pass 1 with their numbers 3 and 2.
        sizes = np.array([size or 0 for size in self._sizes], np.int64)
        return Choices(children, numbers + passes * sizes[children])

    def counts(self, position: int) -> list[int]:
        if self.size is None:
            return self._choices_in_pass.counts(position)
        passes, position_in_pass = divmod(position, self.size)
        return [
            passes * (size or 0) + count
            for size, count in zip(self._sizes, self._choices_in_pass.counts(position_in_pass))
        ]

    @property
    def weighted_children(self) -> list[tuple[int, int]]:
        """(child, integer weight) of the children with a weight above 0."""
        return [(child, weight) for child, weight in enumerate(self._integer_weights) if weight]

    def children_of(self, output: int, count: int) -> list[int]:
        """Returns the children of `count` consecutive outputs by the weights alone.

        It is for children of packs or groups, whose number is known only when they are made.
        """
        positions = np.arange(output, output + count, dtype=np.int64)
        return self._choices_by_weight.choose(positions).children.tolist()

    def signature(self) -> list[Any]:
        written = [[start, list(integer_weights(weights))] for start, weights in self._segments()]
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
        passes, positions_in_pass = np.divmod(positions, self.size)
        children = np.searchsorted(self._ends, positions_in_pass, side="right").astype(np.int64)
        # Children of 3 and 2 outputs: position 4 is output 1 of child 1; position 9, which is 4 of
        # pass 1, is its output 1 + 2.
        sizes = np.diff(self._ends, prepend=0)
        starts = self._ends - sizes
        return Choices(children, positions_in_pass - starts[children] + passes * sizes[children])

    def counts(self, position: int) -> list[int]:
        passes, position_in_pass = divmod(position, self.size)
        sizes = [child.size or 0 for child in self.children]
        within = [
            min(max(position_in_pass - (int(end) - size), 0), size)
            for end, size in zip(self._ends, sizes)
        ]
        return [passes * size + count for size, count in zip(sizes, within)]


class ChoicePlan:
    """Plan of a node that chooses: the child of each output, and the index in that child's plan."""

    def __init__(self, node: ChoiceDataset, positions: Ints, plan_batch: PlanBatch) -> None:
        # Each child plans all of its outputs in one call. Outputs of the children 0 1 0 -> child 0
        # plans two outputs and child 1 one; their indices in these plans are 0 0 1.
        choices = node.choose(positions)
        self.length = len(choices.children)
        self._plans: dict[int, Plan] = {}
        index_in_plan = np.zeros(self.length, np.int64)
        for child, indices in _by_child(choices.children):
            index_in_plan[indices] = np.arange(len(indices))
            self._plans[child] = node.children[child].plan(choices.numbers[indices], plan_batch)
        self._children: list[int] = choices.children.tolist()
        self._index_in_plan: list[int] = index_in_plan.tolist()

    def values(self, start: int, end: int) -> list[Any]:
        if end == start + 1:
            index = self._index_in_plan[start]
            return self._plans[self._children[start]].values(index, index + 1)
        # One call per child again: consecutive outputs of a child are consecutive in its plan.
        # Children 1 0 1 with the indices 0 0 1 -> child 1 makes its indices 0 to 1, child 0 its 0.
        children = self._children[start:end]
        first_index: dict[int, int] = {}
        for child, index in zip(children, self._index_in_plan[start:end]):
            first_index.setdefault(child, index)
        counts = Counter(children)
        values_of = {
            child: iter(self._plans[child].values(first, first + counts[child]))
            for child, first in first_index.items()
        }
        return [next(values_of[child]) for child in children]

    def entries(self, start: int, end: int) -> list[tuple[Any, int]]:
        found = (
            self._plans[child].entries(index, index + 1)
            for child, index in zip(self._children[start:end], self._index_in_plan[start:end])
        )
        return list(chain.from_iterable(found))


def _by_child(children: Ints) -> Iterator[tuple[int, Ints]]:
    """Yields (child, indices at which it stands): `1 0 1 -> (0, [1]), (1, [0, 2])`."""
    if not len(children):
        return
    order = np.argsort(children, kind="stable")
    ordered = children[order]
    starts = np.concatenate([[0], np.flatnonzero(np.diff(ordered)) + 1])
    for start, indices in zip(starts, np.split(order, starts[1:])):
        yield int(ordered[start]), indices
