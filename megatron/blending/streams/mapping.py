"""pure. Nodes that change or leave out single outputs: MapDataset, FilterDataset."""

from collections.abc import Callable
from types import GeneratorType
from typing import Any

from megatron.blending.encoding.samples import SkipSample
from megatron.blending.streams.arguments import check_datasets
from megatron.blending.streams.dataset import Binding, Block, Ints, NotPlain, Plan, SavableDataset
from megatron.blending.streams.lane import LaneNode, Place
from megatron.blending.streams.origins import origin_tag

_MOST_OF_SAME = 100
"""So many samples of a source are tried in place of one that failed; then it is whichever sample comes next."""


class SameOutputs(SavableDataset[Any]):
    """A node whose output k is made of output k of its child."""

    keeps_outputs = True
    function: Any

    def __init__(self, dataset: Any, worker_config: Any = None) -> None:
        check_datasets(type(self).__name__, [dataset])
        self.children = (dataset,)
        self.worker_config = worker_config
        self.size = dataset.size
        self.goes_on = dataset.goes_on

    def on_bound(self, binding: Binding, is_outermost: bool) -> None:
        self.size = self.children[0].size


class MapDataset(SameOutputs):
    """`map_fn` of each output. It may raise SkipSample, and give several outputs by being a generator.

    In place of a sample that fails comes the next of its source, so that shares of a blend below stay; in place of one
    that is skipped, the next of all.
    """

    def __init__(
        self, dataset: Any, map_fn: Callable[[Any], Any] | None = None, *, worker_config: Any = None, **ignored: Any
    ) -> None:
        super().__init__(dataset, worker_config)
        check_function("MapDataset", "map_fn", map_fn)
        check_no_more("MapDataset", ignored, _ENERGON_ONLY)
        self.map_fn: Any = map_fn

    def plan(self, positions: Ints, block: Block) -> "MapPlan":
        return MapPlan(self.map_fn, self.children[0].plan(positions, block))

    def in_lane(self, lane: Any, parent: Any, child_number: int) -> "MapLane":
        return MapLane(self, lane, parent, child_number)

    def rebuild(self, origin: Any) -> Any:
        if origin[0] != origin_tag(self):
            return self.map_fn(self.children[0].rebuild(origin))
        found = self.map_fn(self.children[0].rebuild(origin[1]))
        return nth(found, origin[2])


class MapPlan:
    def __init__(self, function: Any, child: Plan) -> None:
        self.length = child.length
        self.seek = child.seek
        self._function = function
        self._child = child

    def take(self, count: int) -> list[Any]:
        function = self._function
        values = [function(value) for value in self._child.take(count)]
        if GeneratorType in map(type, values):
            raise NotPlain
        return values

    def child(self, number: int) -> Plan:
        return self._child

    def sources(self, start: int, end: int) -> set[int]:
        return self._child.sources(start, end)


class MapLane(LaneNode):
    node: MapDataset
    _origin: Any = None
    _values: Any = None
    _given = 0
    """Of what a generator gives, while it does: what it was made from, the rest of it, how many were given."""

    def pull(self, place: Place | None) -> tuple[Any, Any]:
        return self._pull(place, 0)

    def pull_same(self) -> tuple[Any, Any]:
        return self._pull(None, 1)

    def _pull(self, place: Place | None, num_failed: int) -> tuple[Any, Any]:
        function, child = self.node.map_fn, self.child(0)
        while True:
            if self._origin is not None:
                if (found := self._next_of_several()) is not None:
                    return found
                place = None
            is_same = 0 < num_failed <= _MOST_OF_SAME
            origin, value = child.pull_same() if is_same else child.pull(place)
            try:
                made = function(value)
            except Exception as error:
                self.fail(error, function, origin, value)
                num_failed = 0 if isinstance(error, SkipSample) else num_failed + 1
                if not 0 < num_failed <= _MOST_OF_SAME:
                    self.detach()
                place = None
                continue
            if type(made) is not GeneratorType:
                return origin, made
            self.detach()
            self._origin, self._values, self._given = origin, made, 0

    def _next_of_several(self) -> tuple[Any, Any] | None:
        origin = self._origin
        try:
            if self._values is None:
                self._values = iter(self.node.map_fn(self.node.children[0].rebuild(origin)))
                for _ in range(self._given):
                    next(self._values, None)
            value = next(self._values)
        except StopIteration:
            self._origin = self._values = None
            return None
        except Exception as error:
            self._origin = self._values = None
            self.fail(error, self.node.map_fn, origin, None)
            return None
        self._given += 1
        return [origin_tag(self.node), origin, self._given - 1], value

    def held(self) -> Any:
        return None if self._origin is None else [self._origin, self._given]

    def restore(self, held: Any) -> None:
        self._origin, self._given = held


class FilterDataset(SameOutputs):
    """The outputs for which `filter_fn` is true; the others are left out silently, and counted."""

    def __init__(self, dataset: Any, filter_fn: Callable[[Any], bool], *, worker_config: Any = None) -> None:
        super().__init__(dataset, worker_config)
        check_function("FilterDataset", "filter_fn", filter_fn)
        self.filter_fn: Any = filter_fn

    def plan(self, positions: Ints, block: Block) -> "FilterPlan":
        return FilterPlan(self.filter_fn, self.children[0].plan(positions, block))

    def in_lane(self, lane: Any, parent: Any, child_number: int) -> "FilterLane":
        return FilterLane(self, lane, parent, child_number)


class FilterPlan(MapPlan):
    def take(self, count: int) -> list[Any]:
        values = self._child.take(count)
        if not all(map(self._function, values)):
            raise NotPlain
        return values


class FilterLane(LaneNode):
    node: FilterDataset

    def pull(self, place: Place | None) -> tuple[Any, Any]:
        return self._first_passed(self.child(0).pull(place))

    def pull_same(self) -> tuple[Any, Any]:
        return self._first_passed(self.child(0).pull_same())

    def _first_passed(self, found: tuple[Any, Any]) -> tuple[Any, Any]:
        function = self.node.filter_fn
        while True:
            origin, value = found
            fault = None
            try:
                if function(value):
                    return found
            except Exception as error:
                fault = error
            self.fail(fault, function, origin, value)
            self.detach()
            found = self.child(0).pull(None)


# What energon's MapDataset takes besides, and nothing here needs: functions are called as if they were stateless.
_ENERGON_ONLY = ("error_handler", "stateless_map_fn", "map_fn_config", "failure_tolerance")


def check_function(kind: str, name: str, function: Any) -> None:
    if not callable(function):
        raise ValueError(f"{kind}: {name} must be a function, but is {function!r}")


def check_no_more(kind: str, given: dict[str, Any], known: tuple[str, ...]) -> None:
    for name in given:
        if name not in known:
            raise TypeError(f"{kind} has no argument {name!r}")


def nth(values: Any, number: int) -> Any:
    """Item `number` of what a function gave: a generator, or one value."""
    if type(values) is not GeneratorType:
        return values
    for at, value in enumerate(values):
        if at == number:
            return value
    raise ValueError(f"a generator gave {number} values or less, but more before; it must give the same each time")
