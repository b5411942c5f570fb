"""pure. Every node of a stream is a function of the position: parts of it are planned, then made.

A node says which positions of its children its own positions are made of, in arrays (`plan`).
Records are read when the plan is asked for values. Position `k` of a node with `size` positions is
position `k % size` of pass `k // size`; a size of None has no end. Nothing here depends on ranks or
workers, or on what was asked before.

Most nodes hold one output at each position. Packs and groups are made of a block of positions of
their child, so that one of their own positions holds many (`is_block`). What a position may hold is
in items.py.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from megatron.blending.order.reading import ReadingOrder, records_at, salted_seed
from megatron.blending.order.weights import Weight
from megatron.blending.streams.seeding import UserFunction
from megatron.blending.streams.worker_config import WorkerConfig

Ints = npt.NDArray[np.int64]
T_co = TypeVar("T_co", covariant=True)


class Plan(Protocol):
    """Says how a part of a node's positions is made."""

    length: int

    def values(self, start: int, end: int) -> list[Any]:
        """Returns what stands at some of the planned positions."""

    def entries(self, start: int, end: int) -> list[tuple[Any, int]]:
        """Returns the sources that these are made of, each with the position that is read."""


class SourceOrder(Protocol):
    order: ReadingOrder
    positions: Ints

    def settle(self, records: Ints) -> None: ...


class Block:
    """Plans that are made together: all their sources are put in order at once, when the first is
    read.
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
    """Facts that turn a tree into a stream."""

    seed: int
    world_size: int = 1
    nodes: list["SavableDataset[Any]"] = field(default_factory=list)
    salts: dict[str, str] = field(default_factory=dict)
    """Places of sources that keep the order of another place: where they stood when their data was
    begun.
    """
    bases: dict[str, int] = field(default_factory=dict)
    """Places of sources that do not begin at 0, and where they begin."""
    is_size_of_ranks: bool = False
    """True if the size of a pass was given for each rank; set by the tree."""

    def clone(self) -> "Binding":
        """Returns the same, for another copy of the tree."""
        return replace(self, nodes=[])

    def user_function(
        self, function: Callable[..., Any], node: "SavableDataset[Any]", role: str
    ) -> UserFunction:
        """Returns a function of a node as it is to be called."""
        return UserFunction(function, self.seed, f"{node.number} {role}")

    def seed_at(self, place: str) -> int:
        return salted_seed(self.seed, self.salts.get(place, place))


class SavableDataset(Generic[T_co]):
    """A node of a stream. It may stand in several trees: a loader works on a copy that is bound to
    its place.

    Iterating over it iterates over a loader of its own.
    """

    make_loader: ClassVar[Callable[[Any], Any]]
    """Set by the module of loaders, which knows nodes, and not they it."""
    children: "tuple[SavableDataset[Any], ...]" = ()
    worker_config: WorkerConfig | None = None
    size: int | None = None
    """Positions of one pass; None: endless."""
    is_block: bool = False
    """True if a position holds many outputs: packs or groups of a block of samples."""
    continues_across_epochs: bool = False
    """True if the next pass continues the children's streams, instead of beginning them again."""
    preserves_outputs: bool = False
    """True if each output is one of the only child's."""
    preserves_position: bool = True
    """True if an only child has the same place."""

    number: int = -1
    """Place in the bound tree, counted from the root down; its descendants are number + 1 to end -
    1.
    """
    end: int = -1
    place: str = ""
    """Numbers of the children on the way from the root, where there are several: "0.2"."""

    def __len__(self) -> int:
        """Returns the outputs of one pass over the data, also where it is repeated for ever."""
        return len(self.children[0])

    def __iter__(self) -> Iterator[T_co]:
        return iter(type(self).make_loader(self))

    @property
    def is_limit(self) -> bool:
        """Returns whether a pass gives `size` outputs at most, also where more could be made."""
        return False

    @property
    def num_positions(self) -> int | None:
        """Positions of one pass; more than `size` where some are there to replace skipped ones."""
        return self.size

    @cached_property
    def samples_per_output(self) -> int:
        """Records that a position is made of, roughly."""
        return max((child.samples_per_output for child in self.children), default=1)

    def bind(
        self, binding: Binding, place: str = "", is_outermost: bool = True
    ) -> "SavableDataset[T_co]":
        """Returns a copy of the tree whose nodes know their places. `is_outermost`: its outputs are
        the loader's.
        """
        twin = copy.copy(self)
        twin.number = len(binding.nodes)
        twin.place = place
        binding.nodes.append(twin)
        # A place names the choices on the way from the root, and seeds the order of what is below.
        # Nodes that leave their only child's positions as they are add nothing to it: a map that is
        # put in or taken out keeps the order.
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
        """Returns the first worker_config in the tree, from here down; None if there is none."""
        if self.worker_config is not None:
            return self.worker_config
        return next(
            (found for child in self.children if (found := child.found_config()) is not None), None
        )

    def __getstate__(self) -> dict[str, Any]:
        # Workers have no use for it, and process groups cannot be sent to them.
        return {**self.__dict__, "worker_config": None}

    def on_bound(self, binding: Binding, is_outermost: bool) -> None:
        """Takes what a bound node needs; its children are bound."""

    def plan(self, positions: Ints, block: Block) -> Plan:
        raise NotImplementedError

    def used(self, position: int) -> list[int]:
        """Returns how many positions of each child the first `position` ones are made of."""
        return [position]

    def signature(self) -> list[Any]:
        """Returns what must be equal for a saved state to mean the same, children apart."""
        return [type(self).__name__]


def as_pairs(kind: str, given: tuple[Any, ...]) -> list[tuple[Any, Weight]]:
    """Returns pairs of (data set, weight), given one by one or as one tuple of them; ValueError for
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
