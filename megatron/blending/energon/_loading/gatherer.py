"""pure. Collects samples of a rank until there are enough for a batch, a pack or a group.

A worker makes outputs of one block of positions at a time, and its last batch may not be full. The
samples of it are sent to the rank (`Leftover`), which fills them up with those of other blocks.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

from megatron.blending.energon._loading.server import leave_out
from megatron.blending.energon._streams.collecting import CollectingDataset, Group
from megatron.blending.energon._streams.references import at_of, nodes_above, raised, rebuilt
from megatron.blending.streams.failures import Failures
from megatron.blending.streams.items import Leftover, MultiOutput, Ref, Sample, SkipMarker, numbered
from megatron.blending.streams.node import SavableDataset

Held = dict[str, list[Ref]]
"""Number of a collecting node -> references of the samples that wait for it. Under "" stand
references of outputs that are ready.
"""


class Gatherer:
    """Samples that wait at the collecting nodes below one node, and the outputs they make of it."""

    def __init__(
        self, top: SavableDataset[Any], collecting: Sequence[CollectingDataset], failures: Failures
    ) -> None:
        """Args:
        top: node whose outputs are made.
        collecting: nodes at or below it at which samples wait.
        """
        self.ready: deque[Sample] = deque()
        """Outputs of `top` that are ready and were not taken yet."""
        self._top = top
        self._failures = failures
        self._nodes = {node.node_id: node for node in collecting}
        self._collectors = {node.node_id: node.collector(is_of_rank=True) for node in collecting}
        self._saved: Held = {}

    def take(self, node: CollectingDataset, samples: Sequence[Sample]) -> None:
        """Adds samples that wait at a node, and makes its outputs once there are enough."""
        for sample in samples:
            for group in self._collectors[node.node_id].add(sample):
                self._make(node, group)

    def take_leftover(self, left: Leftover) -> None:
        self.take(self._nodes[left.node], left.samples)

    def finish(self) -> None:
        """Makes outputs of all waiting samples: the end of the stream, where no more come."""
        # Innermost nodes, which have the largest ids, come first: their outputs are the samples of
        # outer nodes.
        for number in sorted(self._nodes, reverse=True):
            for group in self._collectors[number].finish():
                self._make(self._nodes[number], group)

    @property
    def num_short(self) -> int:
        return sum(getattr(one, "num_short", 0) for one in self._collectors.values())

    def state(self) -> Held:
        if self._saved:
            return self._saved
        held = {str(n): [ref for ref, _ in one.held()] for n, one in self._collectors.items()}
        held[""] = [ref for ref, _ in self.ready]
        return {number: refs for number, refs in held.items() if refs}

    def restore(self, held: Held) -> None:
        """Takes references from a saved state. The samples are rebuilt with the next output."""
        self._saved = held

    def rebuild(self) -> None:
        """Rebuilds the samples of a restored state, if that was not done yet."""
        saved, self._saved = self._saved, {}
        for number, refs in saved.items():
            if not number:
                self.ready.extend(self._rebuilt(self._top, refs))
                continue
            node = self._nodes[int(number)]
            # The states of several ranks together may have enough samples for some outputs.
            self.take(node, self._rebuilt(node.children[0], refs))

    def _rebuilt(self, node: SavableDataset[Any], refs: Sequence[Ref]) -> Group:
        """Returns the outputs of a node by their references; those that fail now are left out."""
        found: Group = []
        for ref, value in zip(refs, rebuilt(node, refs)):
            if type(value) is SkipMarker:
                leave_out(self._failures, value)
            else:
                found.append((ref, value))
        return found

    def _make(self, node: CollectingDataset, group: Group | SkipMarker) -> None:
        """Makes the outputs of a group, and passes them through the nodes above: to the top, or to
        the next collecting node.
        """
        if isinstance(group, SkipMarker):
            leave_out(self._failures, group)
            return
        refs = [ref for ref, _ in group]
        above, upper = [], None
        for one in nodes_above(self._top, node.node_id):
            if isinstance(one, CollectingDataset):
                upper = one
                break
            above.append(one)
        value = raised(above, MultiOutput(node.outputs_of(group)), at_of([node.node_id, 0, refs]))
        for part, item in numbered(value):
            if part is None:
                leave_out(self._failures, item)
                continue
            self._failures.succeeded()
            made = [node.node_id, part, refs], item
            if upper is None:
                self.ready.append(made)
            else:
                self.take(upper, [made])
