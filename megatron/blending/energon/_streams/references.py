"""pure. A reference says where a sample came from, in integers. By it a resumed run makes again
what a rank held.

[node, position, part] is output number `part` of what stands at a position of a node; [node, part,
refs] the one of that number of what a node makes of the samples that these refer to.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from megatron.blending.streams.items import (
    MultiOutput,
    Ref,
    SkipMarker,
    applied,
    no_entries,
    numbered,
)
from megatron.blending.streams.mapping import SameOutputs
from megatron.blending.streams.node import PlanBatch, SavableDataset
from megatron.blending.streams.seeding import At


def at_of(ref: Ref) -> At:
    """Returns where a sample stands among the outputs of its node, for `UserFunction`."""
    if isinstance(ref[2], int):
        return ref[1], ref[2]
    return (at_of(ref[2][0]), ref[1])


def node_at(root: SavableDataset[Any], number: int) -> Any:
    """Returns a node of a bound tree; LookupError if it has none of that number."""
    while root.node_id != number:
        root = child_towards(root, number)
    return root


def child_towards(node: SavableDataset[Any], number: int) -> SavableDataset[Any]:
    for child in node.children:
        if child.node_id <= number < child.end_node_id:
            return child
    raise LookupError(f"there is no node {number} below node {node.node_id}")


def nodes_above(root: SavableDataset[Any], number: int) -> list[SavableDataset[Any]]:
    """Returns the nodes that stand above one, from its parent up to the root."""
    found: list[SavableDataset[Any]] = []
    while root.node_id != number:
        found.insert(0, root)
        root = child_towards(root, number)
    return found


def raised(above: Sequence[SavableDataset[Any]], value: Any, at: At) -> Any:
    """Returns what the functions of nodes make of a value that comes from below them."""
    for node in above:
        if isinstance(node, SameOutputs):
            value = applied(node, value, at, no_entries)
    return value


def entries_of(root: SavableDataset[Any], refs: Sequence[Ref]) -> list[tuple[Any, int]]:
    """Returns the sources that samples of a tree are made of, with the positions that are read."""
    found: list[tuple[Any, int]] = []
    for number, position, last in refs:
        node = node_at(root, number)
        if isinstance(last, int):
            plan = node.plan(np.array([position], np.int64), PlanBatch())
            found += plan.entries(0, 1)
        else:
            found += entries_of(node.children[0], last)
    return found


def rebuilt(root: SavableDataset[Any], refs: Sequence[Ref]) -> Iterator[Any]:
    """Yields the samples of references again, or a SkipMarker in the place of one that fails.

    What stands at one position is made once, for all that refer to it one after the other.
    """
    known: tuple[Any, dict[int, Any]] = (None, {})
    for ref in refs:
        number, position, last = ref
        is_position = isinstance(last, int)
        if not is_position or known[0] != (number, position):
            known = (number, position) if is_position else None, _outputs(root, ref)
        part = last if is_position else position
        missing = ValueError("a sample that a saved state holds is left out now")
        yield known[1].get(part, SkipMarker(number, rebuilt, missing))


def _outputs(root: SavableDataset[Any], ref: Ref) -> dict[int, Any]:
    """Returns all outputs of what a reference is a part of, by number."""
    number, position, last = ref
    node = node_at(root, number)
    if isinstance(last, int):
        value = node.plan(np.array([position], np.int64), PlanBatch()).values(0, 1)[0]
        at: At = (number, position)
    else:
        made = zip(last, rebuilt(node.children[0], last))
        group = [(one, sample) for one, sample in made if type(sample) is not SkipMarker]
        value, at = MultiOutput(node.outputs_of(group) if group else ()), at_of(ref)
    return {
        part: item
        for part, item in numbered(raised(nodes_above(root, number), value, at))
        if part is not None
    }
