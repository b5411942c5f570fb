"""pure. MapDataset changes single outputs, FilterDataset leaves some out."""

from collections.abc import Callable, Iterable
from types import GeneratorType
from typing import Any

from megatron.blending.arguments import check_function, check_no_more
from megatron.blending.streams.node import (
    FAST_PATH_ONLY,
    Binding,
    Block,
    Holders,
    Ints,
    MultiOutput,
    NeedsSequential,
    Plan,
    SavableDataset,
    SkipMarker,
    applied,
    check_datasets,
)
from megatron.blending.streams.seeding import At
from megatron.blending.streams.worker_config import WorkerConfig

# What energon's MapDataset takes besides, and nothing here needs: functions are called as if they
# were stateless.
_ENERGON_ONLY = ("error_handler", "stateless_map_fn", "map_fn_config", "failure_tolerance")


class SameOutputs(SavableDataset[Any]):
    """Output k of the node is made of output k of its child."""

    preserves_outputs = True

    def __init__(
        self, dataset: SavableDataset[Any], worker_config: WorkerConfig | None = None
    ) -> None:
        check_datasets(type(self).__name__, [dataset])
        self.children = (dataset,)
        self.worker_config = worker_config
        self.size = dataset.size
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

    def plan(self, positions: Ints, block: Block) -> "MapPlan":
        return MapPlan(self, self.children[0].plan(positions, block), positions)

    def extra(self, holders: Holders) -> object:
        found = super().extra(holders)
        return None if found is None else self.apply(found, holders.asked_position)

    @property
    def function(self) -> Callable[[Any], Any]:
        """The function that the user gave."""
        raise NotImplementedError

    def apply(self, value: object, at: At) -> object:
        """Return what becomes of an output of the child, or what else stands in its place."""
        raise NotImplementedError

    def apply_fast(self, values: list[Any], positions: Iterable[int]) -> list[Any]:
        """Return what becomes of outputs of the child; any exception if that is not one output of
        each.
        """
        raise NotImplementedError


class MapDataset(SameOutputs):
    """`map_fn` changes each output. It may raise SkipSample, and give several outputs by being a
    generator.
    """

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

    def apply(self, value: object, at: At) -> object:
        return applied(self.user, value, self.number, at)

    def apply_fast(self, values: list[Any], positions: Iterable[int]) -> list[Any]:
        made = self.user.each(values, positions)
        if GeneratorType in map(type, made):
            raise NeedsSequential
        return made


class FilterDataset(SameOutputs):
    """It keeps the outputs for which `filter_fn` is true; the others are left out silently, and
    counted.
    """

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

    def apply(self, value: object, at: At) -> object:
        if type(value) is SkipMarker:
            return value
        if type(value) is MultiOutput:
            return MultiOutput(self.apply(one, (at, part)) for part, one in enumerate(value))
        try:
            return (
                value
                if self.user(value, at)
                else SkipMarker(self.number, self.filter_fn, None, value)
            )
        except Exception as error:
            return SkipMarker(self.number, self.filter_fn, error, value)

    def apply_fast(self, values: list[Any], positions: Iterable[int]) -> list[Any]:
        if not all(self.user.each(values, positions)):
            raise NeedsSequential
        return values


class MapPlan:
    """It plans outputs of a node that changes single ones."""

    def __init__(self, node: SameOutputs, child: Plan, positions: Ints) -> None:
        self.length = child.length
        self._positions = positions
        self._node = node
        self._child = child

    def values(self, start: int, end: int, holders: Holders | None = None) -> list[Any]:
        values = self._child.values(start, end, holders)
        positions = map(int, self._positions[start:end])
        if holders is FAST_PATH_ONLY:
            return self._node.apply_fast(values, positions)
        return list(map(self._node.apply, values, positions))

    def child(self, number: int) -> Plan:
        return self._child

    def entries(self, start: int, end: int, inner: object = None) -> list[tuple[Any, int]]:
        return self._child.entries(start, end, inner)
