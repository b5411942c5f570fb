"""pure. Lanes: the parts of a stream that workers make position by position.

Nearly every stream is one lane, its root. Where a blend is of packs or groups, whose number is
known only when they are made, its outputs are counted as they come: then each of its children is a
lane, and the rank takes from one or the other (sequence.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from megatron.blending.energon._streams.collecting import CollectingDataset
from megatron.blending.energon._streams.packing_buffer import PackingDataset
from megatron.blending.streams.choice import BlendDataset
from megatron.blending.streams.mapping import SameOutputs
from megatron.blending.streams.node import SavableDataset
from megatron.blending.streams.positions import RepeatDataset


@dataclass(frozen=True)
class Lane:
    index: int
    node: SavableDataset[Any]
    size: int | None
    """Cells of a pass."""
    above: Sequence[SameOutputs] = ()
    """Maps and filters above a blend of lanes, whose functions workers call, too."""

    @property
    def is_dealt_by_output(self) -> bool:
        """Returns whether workers share the outputs of each cell, instead of the cells."""
        node = self.node
        while isinstance(node, SameOutputs):
            node = node.children[0]
        return isinstance(node, PackingDataset) and node.length_of is not None

    @property
    def top(self) -> SavableDataset[Any]:
        return self.above[-1] if self.above else self.node


def is_counted(node: SavableDataset[Any]) -> bool:
    """Returns whether outputs of children are counted as they come, to be chosen by weights."""
    return isinstance(node, BlendDataset) and node.is_block


def has_counted(node: SavableDataset[Any]) -> bool:
    """Returns whether that is so of a node or of one below it."""
    return is_counted(node) or any(map(has_counted, node.children))


def lanes_of(root: SavableDataset[Any]) -> list[Lane]:
    """Returns the lanes of a bound tree, numbered in its order."""
    found: list[Lane] = []
    _find(root, None if root.continues_across_epochs else Fraction(1), (), found)
    return found


def _find(
    node: SavableDataset[Any],
    times: Fraction | None,
    above: tuple[SameOutputs, ...],
    found: list[Lane],
) -> None:
    """`times`: how often a pass reads the node; None: for ever."""
    if not has_counted(node):
        size = node.num_positions
        size = None if times is None or size is None else int(size * times)
        found.append(Lane(len(found), node, size, above))
        return
    if isinstance(node, SameOutputs):
        above = (node, *above)
    elif isinstance(node, CollectingDataset):
        above = ()
    elif isinstance(node, RepeatDataset):
        times = None if node.repeats is None or times is None else times * Fraction(node.repeats)
    for child in node.children:
        _find(child, times, above, found)
