"""pure. MapDataset changes single outputs, FilterDataset leaves some out."""

from collections.abc import Callable
from functools import partial
from types import GeneratorType
from typing import Any

from megatron.blending.arguments import check_function, check_no_more
from megatron.blending.streams.items import (
    SPECIAL,
    Entries,
    MultiOutput,
    SkipMarker,
    applied,
    called,
    failed,
    generated,
)
from megatron.blending.streams.node import (
    Binding,
    Ints,
    Plan,
    PlanBatch,
    SavableDataset,
    check_datasets,
)
from megatron.blending.streams.seeding import At
from megatron.blending.streams.worker_config import WorkerConfig

# Arguments of energon's MapDataset that are ignored: every function is called as if it were
# stateless.
_ENERGON_ONLY = ("error_handler", "stateless_map_fn", "map_fn_config", "failure_tolerance")


class SameOutputs(SavableDataset[Any]):
    """Position k of the node is made of position k of its child."""

    preserves_outputs = True

    def __init__(
        self, dataset: SavableDataset[Any], worker_config: WorkerConfig | None = None
    ) -> None:
        check_datasets(type(self).__name__, [dataset])
        self.children = (dataset,)
        self.worker_config = worker_config
        self.size = dataset.size
        self.is_block = dataset.is_block
        self.continues_across_epochs = dataset.continues_across_epochs

    def on_bound(self, binding: Binding, is_outermost: bool) -> None:
        self.size = self.children[0].size
        self.user = binding.user_function(self.function, self, "function")

    @property
    def is_limit(self) -> bool:
        return self.children[0].is_limit

    @property
    def num_positions(self) -> int | None:
        return self.children[0].num_positions

    def plan(self, positions: Ints, plan_batch: PlanBatch) -> "MapPlan":
        return MapPlan(self, self.children[0].plan(positions, plan_batch), positions)

    @property
    def function(self) -> Callable[[Any], Any]:
        """The function that the user gave."""
        raise NotImplementedError

    def apply(self, value: Any, at: At, entries: Entries) -> Any:
        """Returns what becomes of one output; a SkipMarker where the function fails."""
        raise NotImplementedError

    def apply_each(self, values: list[Any], child: Plan, start: int) -> list[Any]:
        """Returns what becomes of outputs that stand from index `start` of the child's plan on, by
        a function that is not seeded.
        """
        raise NotImplementedError


class MapDataset(SameOutputs):
    """Changes each output by `map_fn`.

    The function may raise SkipSample, and give several outputs by being a generator.
    """

    changes_outputs = True

    def __init__(
        self,
        dataset: SavableDataset[Any],
        map_fn: Callable[[Any], Any] | None = None,
        *,
        worker_config: WorkerConfig | None = None,
        **ignored: object,
    ) -> None:
        super().__init__(dataset, worker_config)
        check_function("MapDataset: map_fn", map_fn)
        check_no_more("MapDataset", ignored, _ENERGON_ONLY)
        self.map_fn: Any = map_fn

    @property
    def function(self) -> Callable[[Any], Any]:
        function: Callable[[Any], Any] = self.map_fn
        return function

    def apply(self, value: Any, at: At, entries: Entries) -> Any:
        return called(self.user, value, self.node_id, at, entries)

    def apply_each(self, values: list[Any], child: Plan, start: int) -> list[Any]:
        # The same as `apply` in one loop: a call per sample would cost text a tenth more time.
        function, made = self.map_fn, []
        for index, value in enumerate(values, start):
            try:
                found = function(value)
            except Exception as error:
                entries = partial(child.entries, index, index + 1)
                found = failed(self.node_id, function, error, value, entries)
            if type(found) is GeneratorType:
                entries = partial(child.entries, index, index + 1)
                found = MultiOutput(generated(found, function, value, self.node_id, entries))
            made.append(found)
        return made


class FilterDataset(SameOutputs):
    """Keeps the outputs for which `filter_fn` is true. The others are counted, and not logged."""

    def __init__(
        self,
        dataset: SavableDataset[Any],
        filter_fn: Callable[[Any], bool],
        *,
        worker_config: WorkerConfig | None = None,
        **ignored: object,
    ) -> None:
        super().__init__(dataset, worker_config)
        check_no_more("FilterDataset", ignored, ("filter_fn_config",))
        check_function("FilterDataset: filter_fn", filter_fn)
        self.filter_fn: Any = filter_fn

    @property
    def function(self) -> Callable[[Any], Any]:
        function: Callable[[Any], Any] = self.filter_fn
        return function

    def apply(self, value: Any, at: At, entries: Entries) -> Any:
        try:
            if self.user(value, at):
                return value
        except Exception as error:
            return failed(self.node_id, self.filter_fn, error, value, entries)
        return SkipMarker(self.node_id, self.filter_fn, None, value, entries)

    def apply_each(self, values: list[Any], child: Plan, start: int) -> list[Any]:
        return [
            self.apply(value, 0, partial(child.entries, index, index + 1))
            for index, value in enumerate(values, start)
        ]


class MapPlan:
    """Positions of a node that changes single outputs."""

    def __init__(self, node: SameOutputs, child: Plan, positions: Ints) -> None:
        self.length = child.length
        self._positions = positions
        self._node = node
        self._child = child
        self.entries = child.entries

    def values(self, start: int, end: int) -> list[Any]:
        values, node, child = self._child.values(start, end), self._node, self._child
        # The fast path: single outputs only, and no generator to seed for each of them.
        if SPECIAL.isdisjoint(map(type, values)) and not node.user.is_seeded:
            return node.apply_each(values, child, start)
        positions = self._positions[start:end].tolist()
        return [
            applied(node, value, position, partial(child.entries, index, index + 1))
            for index, (value, position) in enumerate(zip(values, positions), start)
        ]
