"""pure. Every node of a stream is an endless sequence of outputs by position, of which parts are
planned.

A node says which positions of its children its own positions are made of, in arrays (`plan`); items
are read when the plan is asked for values. Position `k` of a node with `size` outputs is output `k
% size` of pass `k // size`; a size of None has no end. Nothing here depends on ranks or workers, or
on what was asked before.

A sample that makes no output leaves a `SkipMarker` at its position; one that makes several has them
together (`MultiOutput`). Only where several outputs become one, or some are held back, is a
sequence needed in which holes are filled by what
follows: see holding.py.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import GeneratorType
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from megatron.blending.order.reading import ReadingOrder, records_at, salted_seed
from megatron.blending.order.weights import Weight
from megatron.blending.streams.seeding import At, UserFunction
from megatron.blending.streams.worker_config import WorkerConfig

Ints = npt.NDArray[np.int64]
T_co = TypeVar("T_co", covariant=True)


class SkipMarker(NamedTuple):
    """It stands in the place of a sample that makes no output."""

    node: int
    function: Any
    """What did not take it."""
    error: Exception | None
    """None, or SkipSample, if it said so."""
    value: Any = None


END_OF_DATA = SkipMarker(-1, None, None)
"""Stands where an output was planned, but more was left out than there was."""


class MultiOutput(list[Any]):
    """A generator gave these for one sample: outputs, and a SkipMarker in the end if it failed."""


Origin = int | list[Any]
"""Where an output came from, so that it can be made again: a position, or a list with what is held
back: holding.py.
"""


class NeedsSequential(Exception):
    """This output is not made of as many others as planned: it must be made in sequence."""


def applied(user: UserFunction, value: object, node: int, at: At) -> object:
    """Return what a function makes of a value, or of each of several; a hole where it fails."""
    if type(value) is SkipMarker:
        return value
    if type(value) is MultiOutput:
        made = MultiOutput()
        for part, one in enumerate(value):
            found = applied(user, one, node, (at, part))
            made.extend(found if type(found) is MultiOutput else [found])
        return made
    try:
        found = user(value, at)
    except Exception as error:
        return SkipMarker(node, user.function, error, value)
    return _values_of(found, user.function, value, node) if type(found) is GeneratorType else found


def _values_of(
    generator: Iterator[object], function: object, value: object, node: int
) -> MultiOutput:
    made = MultiOutput()
    try:
        made.extend(generator)
    except Exception as error:
        made.append(SkipMarker(node, function, error, value))
    return made


class Holders(Protocol):
    """They make the outputs of nodes that hold samples back, wherever these stand in a tree."""

    asked_position: int
    """The place in the tree of the output that was asked for last."""

    def output_of(self, node: Any, plan: Any, place: int) -> object:
        """Return the next output of such a node; a SkipMarker if it has no more."""


class _NoHolders:
    asked_position = 0

    def output_of(self, node: Any, plan: Any, place: int) -> object:
        raise NeedsSequential


FAST_PATH_ONLY: Holders = _NoHolders()
"""Given for what makes the outputs of nodes that hold samples back: NeedsSequential at the first
hole, before more is made.
"""


class Plan(Protocol):
    """A Plan tells how a part of a node's outputs is made."""

    length: int

    def values(self, start: int, end: int, holders: Holders | None) -> list[Any]:
        """Return outputs, or what else stands in their places.

        Of nodes that make one output of several: by `holders`; if that is None, as planned, or
        NeedsSequential.
        """

    def child(self, number: int) -> "Plan | None":
        """Return what this plan asks of a child, in this order; None if nothing."""

    def entries(self, start: int, end: int, inner: object = None) -> list[tuple[Any, int]]:
        """Return the sources that some outputs are made of, each with the (first) position that is
        read.

        `inner`: of an output of a node that holds samples back, where they came from.
        """


class SourceOrder(Protocol):
    order: ReadingOrder
    positions: Ints

    def settle(self, records: Ints) -> None: ...


class Block:
    """Plans of a block are made together: all their sources are put in order at once, when the
    first is read.
    """

    def __init__(self) -> None:
        self._pending: list[SourceOrder] = []

    def add(self, source: SourceOrder) -> None:
        self._pending.append(source)

    def settle(self) -> None:
        pending, self._pending = self._pending, []
        found = records_at(
            [source.order for source in pending], [source.positions for source in pending]
        )
        for source, records in zip(pending, found):
            source.settle(records)


@dataclass
class Binding:
    """A tree is told this when it becomes a stream."""

    seed: int
    world_size: int = 1
    nodes: list["SavableDataset[Any]"] = field(default_factory=list)
    salts: dict[str, str] = field(default_factory=dict)
    """Places of sources that keep the order of another place: where they stood when their data was
    begun.
    """
    bases: dict[str, int] = field(default_factory=dict)
    """Places of sources that do not begin at 0, and where they begin."""
    changes: list[tuple[str, int, list[float]]] = field(default_factory=list)
    """Blends whose weights changed on the way: place, from which output of the blend on, to what.
    """
    is_size_of_ranks: bool = False
    """Whether the size of a pass was given for each rank; told by the tree."""

    def again(self) -> "Binding":
        """Return the same, for another copy of the tree."""
        return replace(self, nodes=[])

    def user_function(
        self, function: Callable[..., Any], node: "SavableDataset[Any]", role: str
    ) -> UserFunction:
        """Return a function of a node as it is to be called."""
        return UserFunction(function, self.seed, f"{node.number} {role}")

    def seed_at(self, place: str) -> int:
        return salted_seed(self.seed, self.salts.get(place, place))


class SavableDataset(Generic[T_co]):
    """A node is a description, and may stand in several trees; a loader works on a copy that is
    bound to its place.

    Iterating over it iterates over a loader of its own.
    """

    make_loader: ClassVar[Callable[[Any], Any]]
    """Set by the module of loaders, which knows nodes, and not they it."""
    children: "tuple[SavableDataset[Any], ...]" = ()
    worker_config: WorkerConfig | None = None
    size: int | None = None
    """Outputs of one pass; None: endless."""
    continues_across_epochs: bool = False
    """Whether the next pass continues the children's streams, instead of beginning them again."""
    preserves_outputs: bool = False
    """Whether each output is one of the only child's."""
    preserves_position: bool = True
    """Whether an only child has the same place."""
    is_index_map: ClassVar[bool] = False
    """Whether its plans are those of its only child."""

    number: int = -1
    """Place in the bound tree, counted from the root down; its descendants are number + 1 to end -
    1.
    """
    end: int = -1
    place: str = ""
    """Numbers of the children on the way from the root, where there are several: "0.2"."""

    def __len__(self) -> int:
        """Return the outputs of one pass over the data, also where it is repeated for ever."""
        return len(self.children[0])

    def __iter__(self) -> Iterator[T_co]:
        return iter(type(self).make_loader(self))

    @property
    def is_limit(self) -> bool:
        """Whether a pass gives `size` outputs at most, also where more could be made."""
        return False

    @property
    def num_positions(self) -> int | None:
        """It counts the positions of one pass, of which the first `size` are given if no sample is
        left out.
        """
        return self.size

    @cached_property
    def samples_per_output(self) -> int:
        """It is about how many records an output is made of."""
        return max((child.samples_per_output for child in self.children), default=1)

    def bind(
        self, binding: Binding, place: str = "", is_outermost: bool = True
    ) -> "SavableDataset[T_co]":
        """Return a copy of the tree whose nodes know their places. `is_outermost`: its outputs are
        the loader's.
        """
        twin = copy.copy(self)
        twin.number = len(binding.nodes)
        twin.place = place
        binding.nodes.append(twin)
        is_only_child = len(self.children) == 1
        twin.children = tuple(
            child.bind(
                binding,
                place
                if is_only_child and self.preserves_position
                else f"{place}.{number}".lstrip("."),
                is_outermost and self.preserves_outputs,
            )
            for number, child in enumerate(self.children)
        )
        twin.end = len(binding.nodes)
        twin.on_bound(binding, is_outermost)
        return twin

    def found_config(self) -> WorkerConfig | None:
        """Return the first worker_config in the tree, from here down; None if there is none."""
        if self.worker_config is not None:
            return self.worker_config
        return next(
            (found for child in self.children if (found := child.found_config()) is not None), None
        )

    def __getstate__(self) -> dict[str, Any]:
        # Workers have no use for it, and process groups cannot be sent to them.
        return {**self.__dict__, "worker_config": None}

    def on_bound(self, binding: Binding, is_outermost: bool) -> None:
        """Take what a bound node needs; its children are bound."""

    def plan(self, positions: Ints, block: Block) -> Plan:
        raise NotImplementedError

    def extra(self, holders: Holders) -> object:
        """Return an output beyond the planned ones: what nodes that hold samples back still have;
        else None.
        """
        found = (child.extra(holders) for child in self.children)
        return next((value for value in found if value is not None), None)

    def gives_up(self, child: int) -> bool:
        """Whether from some output on a child is part of none; of a bound node."""
        return False

    def used(self, position: int, drawn: dict[int, int]) -> list[int]:
        """Return how many outputs of each child the first `position` outputs are made of.

        `drawn`: by number of node, how many it drew, where positions do not tell.
        """
        return [position]

    def signature(self) -> list[Any]:
        """Return what must be equal for a saved state to mean the same, apart from the children."""
        return [type(self).__name__]


def as_pairs(kind: str, given: tuple[Any, ...]) -> list[tuple[Any, Weight]]:
    """Return pairs of (data set, weight), given one by one or as one tuple of them; ValueError for
    anything else.
    """
    if (
        len(given) == 1
        and isinstance(given[0], (list, tuple))
        and given[0]
        and isinstance(given[0][0], (list, tuple))
    ):
        given = tuple(given[0])
    for number, pair in enumerate(given):
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise ValueError(
                f"{kind} takes pairs (data set, weight), but argument {number} is "
                f"{type(pair).__name__}"
            )
    check_datasets(kind, [pair[0] for pair in given])
    return [(pair[0], pair[1]) for pair in given]


def check_datasets(kind: str, datasets: Sequence[object]) -> None:
    if not datasets:
        raise ValueError(f"{kind} needs at least one data set")
    for number, dataset in enumerate(datasets):
        if not isinstance(dataset, SavableDataset):
            raise ValueError(
                f"{kind}: data set {number} must be a data set of megatron.blending, but is "
                f"{dataset!r}"
            )
