"""pure. Every node of a stream is a function of the position: positions are planned, then made.

`plan` computes, in arrays, the positions of its children that a node's own positions are made of.
Records are read when the plan is asked for values. Position `k` of a node with `size` positions is
position `k % size` of pass `k // size`; a node whose size is None has no end. Nothing here depends
on ranks or workers, or on earlier calls.

Most nodes hold one output at each position. Packs and groups are made of a block (consecutive
positions) of their child, so that one of their own positions holds many outputs (`is_block`).
items.py lists what a position may hold.
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
    """Plan of some positions of a node. An index of the plan counts these positions from 0.

    A plan of the positions 7 3 has index 0 for position 7 and index 1 for position 3.
    """

    length: int

    def values(self, start: int, end: int) -> list[Any]:
        """Returns what stands at the positions with the indices start to end - 1."""

    def entries(self, start: int, end: int) -> list[tuple[Any, int]]:
        """Returns the sources that these are made of, each with the position that is read."""


class SourceOrder(Protocol):
    """Plan of a source that waits for the records which stand at its positions."""

    order: ReadingOrder
    positions: Ints

    def set_records(self, records: Ints) -> None:
        """Receives the number of the record at each of the positions."""


class PlanBatch:
    """Plans of sources whose records are computed together, in one call, when the first is read.

    It is made for each call of `plan` on a root, and passed down to the sources. It has nothing to
    do with batches of samples.
    """

    def __init__(self) -> None:
        self._pending: list[SourceOrder] = []

    def add(self, source: SourceOrder) -> None:
        self._pending.append(source)

    def resolve_records(self) -> None:
        # Emptied, so that no plan is resolved twice if more are added later.
        pending, self._pending = self._pending, []
        found = records_at(
            [source.order for source in pending], [source.positions for source in pending]
        )
        for source, records in zip(pending, found):
            source.set_records(records)


@dataclass
class Binding:
    """Facts that turn a tree into a stream."""

    seed: int
    world_size: int = 1
    nodes: list["SavableDataset[Any]"] = field(default_factory=list)
    seed_paths: dict[str, str] = field(default_factory=dict)
    """Tree path whose seed a source keeps, by its current tree path. It has an entry where a
    resumed blend has moved the source: {"1": "0"} reads source 1 in the order that it had as
    source 0.
    """
    start_positions: dict[str, int] = field(default_factory=dict)
    """First position of a source, by tree path; 0 for sources without an entry."""
    size_is_per_rank: bool = False
    """True if the user gave the size of a pass per rank; set by the nodes when they are bound."""

    def clone(self) -> "Binding":
        """Returns a binding with the same facts, for another copy of the tree."""
        return replace(self, nodes=[])

    def user_function(
        self, function: Callable[..., Any], node: "SavableDataset[Any]", role: str
    ) -> UserFunction:
        """Returns `function` as the node calls it; `role` distinguishes its functions."""
        return UserFunction(function, self.seed, f"{node.node_id} {role}")

    def seed_at(self, tree_path: str) -> int:
        """Returns the seed of the order at a tree path."""
        return salted_seed(self.seed, self.seed_paths.get(tree_path, tree_path))


class SavableDataset(Generic[T_co]):
    """A node of a stream. It may stand in several trees: a loader works on a bound copy of it.

    Iterating over a node iterates over a loader of its own.
    """

    make_loader: ClassVar[Callable[[Any], Any]]
    """Set by the module of loaders, which imports this one; the other way would be a cycle."""
    changes_outputs: ClassVar[bool] = False
    """True if a user's function makes the outputs: it maps, batches or packs those of the child.
    A filter leaves some out, and changes none.
    """
    children: "tuple[SavableDataset[Any], ...]" = ()
    worker_config: WorkerConfig | None = None
    size: int | None = None
    """Positions of one pass; None: endless."""
    is_block: bool = False
    """True if a position holds many outputs: packs or groups of a block of samples."""
    continues_across_epochs: bool = False
    """True if the next pass continues the children's streams, instead of beginning them again."""
    preserves_outputs: bool = False
    """True if each output is one of the only child's, or made of a single one of them. The child is
    then outermost if the node is.
    """
    shares_tree_path: bool = True
    """True if the node passes its own tree path on to an only child."""

    # Set in the copies that `bind` makes. A blend of two maps of sources has, as (node_id,
    # end_node_id, tree_path): blend (0, 5, ""), maps (1, 3, "0") and (3, 5, "1"), sources
    # (2, 3, "0") and (4, 5, "1").
    node_id: int = -1
    """Number of the node in the bound tree, counted in preorder from the root, 0."""
    end_node_id: int = -1
    """End of the ids of the node and its descendants, which are node_id to end_node_id - 1."""
    tree_path: str = ""
    """Numbers of the children on the way from the root, at the nodes that have several: "0.2"."""

    def __len__(self) -> int:
        """Returns the number of outputs of one pass over the data, also of endless data."""
        return len(self.children[0])

    def __iter__(self) -> Iterator[T_co]:
        return iter(type(self).make_loader(self))

    @property
    def is_limit(self) -> bool:
        """Returns whether a pass gives at most `size` outputs although more could be made."""
        return False

    @property
    def num_positions(self) -> int | None:
        """Positions of one pass. They are more than `size` if some may replace skipped samples."""
        return self.size

    @cached_property
    def samples_per_output(self) -> int:
        """Approximate number of records that a position is made of."""
        return max((child.samples_per_output for child in self.children), default=1)

    def bind(
        self, binding: Binding, tree_path: str = "", is_outermost: bool = True
    ) -> "SavableDataset[T_co]":
        """Returns a copy of the tree whose nodes know their ids and tree paths.

        `is_outermost`: the outputs of this node are the loader's.
        """
        twin = copy.copy(self)
        twin.node_id = len(binding.nodes)
        twin.tree_path = tree_path
        binding.nodes.append(twin)
        # A tree path names the choices on the way from the root, and seeds the order of the nodes
        # below. Nodes with one child add nothing to it, unless they choose: a map that is added or
        # removed keeps the order.
        is_only_child = len(self.children) == 1
        twin.children = tuple(
            child.bind(
                binding,
                tree_path
                if is_only_child and self.shares_tree_path
                else f"{tree_path}.{number}".lstrip("."),
                is_outermost and self.preserves_outputs,
            )
            for number, child in enumerate(self.children)
        )
        # Children come before `on_bound`, which reads their sizes and the range of their ids.
        twin.end_node_id = len(binding.nodes)
        twin.on_bound(binding, is_outermost)
        return twin

    def found_config(self) -> WorkerConfig | None:
        """Returns the first worker_config in the tree, from this node down; None without one."""
        if self.worker_config is not None:
            return self.worker_config
        return next(
            (found for child in self.children if (found := child.found_config()) is not None), None
        )

    def __getstate__(self) -> dict[str, Any]:
        # Workers do not use the config, and process groups in it cannot be pickled.
        return {**self.__dict__, "worker_config": None}

    def on_bound(self, binding: Binding, is_outermost: bool) -> None:
        """Sets what a bound node needs. Its children are bound already."""

    def plan(self, positions: Ints, plan_batch: PlanBatch) -> Plan:
        """Returns the plan of any positions, in any order; it reads no records."""
        raise NotImplementedError

    def used(self, position: int) -> list[int]:
        """Returns how many positions of each child the first `position` positions are made of."""
        return [position]

    def signature(self) -> list[Any]:
        """Returns what must be equal, besides the children, for a saved state to fit this node."""
        return [type(self).__name__]


def as_pairs(kind: str, given: tuple[Any, ...]) -> list[tuple[Any, Weight]]:
    """Returns pairs of (data set, weight), which are given one by one or as one tuple. ValueError
    for anything else.
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
