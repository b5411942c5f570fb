"""pure. What every node of a stream is: an endless sequence of outputs by position, and how a part of it is planned.

A node says which positions of its children its own positions are made of, in arrays (`plan`); items are read when they
are taken from the plan. Position `k` of a node with `size` outputs is output `k % size` of pass `k // size`; a size of
None has no end. Nothing here depends on ranks or workers.

What no arithmetic can know (a sample is left out, a function gives several, packs fill up) raises `NotPlain` on the
way: then the outputs in question are made by a lane, in sequence (lane.py).
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from megatron.blending.order.reading import ReadingOrder, records_at, salted_seed
from megatron.blending.streams.origins import first_leaf

Ints = npt.NDArray[np.int64]
T_co = TypeVar("T_co", covariant=True)


class NotPlain(Exception):
    """This output is not what arithmetic says."""


class Plan(Protocol):
    """A part of a node's outputs, in the order in which they will be taken."""

    length: int

    def take(self, count: int) -> list[Any]:
        """Make the next outputs; any exception says that they must be made by a lane, and leaves the plan anywhere."""

    def seek(self, offset: int) -> None:
        """Continue at output `offset` of this plan."""

    def child(self, number: int) -> "Plan | None":
        """What this plan asks of a child, in this order; None if nothing."""

    def sources(self, start: int, end: int) -> set[int]:
        """Numbers of the leaves that some of its outputs are made of."""


class LeafOrder(Protocol):
    order: ReadingOrder
    positions: Ints

    def settle(self, records: Ints) -> None: ...


class Block:
    """Plans made together: the leaves of all of them are put in order at once, when the first is read."""

    def __init__(self) -> None:
        self._pending: list[LeafOrder] = []

    def add(self, leaf: LeafOrder) -> None:
        self._pending.append(leaf)

    def settle(self) -> None:
        pending, self._pending = self._pending, []
        found = records_at([leaf.order for leaf in pending], [leaf.positions for leaf in pending])
        for leaf, records in zip(pending, found):
            leaf.settle(records)


@dataclass
class Binding:
    """What a tree is told when it becomes a stream."""

    seed: int
    world_size: int = 1
    nodes: list["SavableDataset[Any]"] = field(default_factory=list)
    salts: dict[str, str] = field(default_factory=dict)
    """Places of leaves that keep the order of another place: where they stood when their data was begun."""
    bases: dict[str, int] = field(default_factory=dict)
    """Places of leaves that do not begin at 0, and where they begin."""
    changes: list[tuple[str, int, list[float]]] = field(default_factory=list)
    """Blends whose weights changed on the way: place, from which output of the blend on, to what."""
    is_size_of_ranks: bool = False
    """Whether the size of a pass was given for each rank; told by the tree."""

    def again(self) -> "Binding":
        """The same, for another copy of the tree."""
        return replace(self, nodes=[])

    def seed_at(self, place: str) -> int:
        return salted_seed(self.seed, self.salts.get(place, place))


class SavableDataset(Generic[T_co]):
    """A node. It is a description, and may stand in several trees; a loader works on a copy that is bound to its place.

    Iterating over it iterates over a loader of its own.
    """

    children: "tuple[SavableDataset[Any], ...]" = ()
    worker_config: Any = None
    size: int | None = None
    """Outputs of one pass; None: endless."""
    goes_on: bool = False
    """Whether the next pass continues the children's streams, instead of beginning them again."""
    keeps_outputs: bool = False
    """Whether each output is one of the only child's."""

    number: int = -1
    """Place in the bound tree, counted from the root down; its descendants are number + 1 to end - 1."""
    end: int = -1
    place: str = ""
    """Numbers of the children on the way from the root, where there are several: "0.2"."""

    def __len__(self) -> int:
        """Outputs of one pass over the data, also where it is repeated for ever."""
        return len(self.children[0])

    def __iter__(self) -> Iterator[T_co]:
        from megatron.blending.loading.loader import get_loader

        return iter(get_loader(self))

    @cached_property
    def samples_per_output(self) -> int:
        """About how many records an output is made of."""
        return max((child.samples_per_output for child in self.children), default=1)

    def bind(self, binding: Binding, place: str = "", is_outermost: bool = True) -> "SavableDataset[T_co]":
        """Return a copy of the tree whose nodes know their places. `is_outermost`: its outputs are the loader's."""
        twin = copy.copy(self)
        twin.number = len(binding.nodes)
        twin.place = place
        binding.nodes.append(twin)
        is_only_child = len(self.children) == 1
        twin.children = tuple(
            child.bind(
                binding,
                place if is_only_child and self.keeps_place else f"{place}.{number}".lstrip("."),
                is_outermost and self.keeps_outputs,
            )
            for number, child in enumerate(self.children)
        )
        twin.end = len(binding.nodes)
        twin.on_bound(binding, is_outermost)
        return twin

    keeps_place: bool = True

    def found_config(self) -> Any:
        """The first worker_config in the tree, from here down; None if there is none."""
        if self.worker_config is not None:
            return self.worker_config
        return next((found for child in self.children if (found := child.found_config()) is not None), None)

    def __getstate__(self) -> dict[str, Any]:
        # Workers have no use for it, and process groups cannot be sent to them.
        return {**self.__dict__, "worker_config": None}

    def on_bound(self, binding: Binding, is_outermost: bool) -> None:
        """Take what a bound node needs; its children are bound."""

    def plan(self, positions: Ints, block: Block) -> Plan:
        raise NotImplementedError

    def in_lane(self, lane: Any, parent: Any, child_number: int) -> Any:
        """Return what makes this node's outputs in a lane: a LaneNode."""
        raise NotImplementedError

    def rebuild(self, origin: Any) -> Any:
        """Make a sample again, from where a lane said it came from. Raises what reading or functions raise."""
        return self.child_of(origin).rebuild(origin)

    def child_of(self, origin: Any) -> "SavableDataset[Any]":
        leaf = first_leaf(origin)
        return next(child for child in self.children if child.number <= leaf < child.end)

    def used(self, position: int, drawn: dict[int, int]) -> list[int]:
        """Return how many outputs of each child the first `position` outputs are made of.

        `drawn`: by number of node, how many it drew, where positions do not tell.
        """
        return [position]

    def signature(self) -> list[Any]:
        """What must be equal for a saved state to mean the same, apart from the children."""
        return [type(self).__name__]
