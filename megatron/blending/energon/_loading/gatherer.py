"""pure. Samples of a rank that wait until they are enough for a batch, a pack or a group."""

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
"""References of samples that wait, by number of the node that collects them; "" of outputs that are
made.
"""


class Gatherer:
    """Samples that wait below one node, `top`, until they are enough; and what they make there."""

    def __init__(
        self, top: SavableDataset[Any], collecting: Sequence[CollectingDataset], failures: Failures
    ) -> None:
        """`collecting`: the nodes that samples wait for."""
        self.ready: deque[Sample] = deque()
        """Outputs of `top` that were made and not given yet."""
        self._top = top
        self._failures = failures
        self._nodes = {node.node_id: node for node in collecting}
        self._collectors = {node.node_id: node.collector(is_of_rank=True) for node in collecting}
        self._saved: Held = {}

    def take(self, node: CollectingDataset, samples: Sequence[Sample]) -> None:
        """Adds samples to those that wait for a node."""
        for sample in samples:
            for group in self._collectors[node.node_id].add(sample):
                self._make(node, group)

    def take_leftover(self, left: Leftover) -> None:
        self.take(self._nodes[left.node], left.samples)

    def finish(self) -> None:
        """Makes outputs of all samples that wait, as no more come."""
        # Innermost nodes first, which have the largest ids: their outputs are samples of the
        # others.
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
        """Holds what a state says. Samples are made again when the next output is asked for."""
        self._saved = held

    def remake(self) -> None:
        """Makes again what a state said is held."""
        saved, self._saved = self._saved, {}
        for number, refs in saved.items():
            if not number:
                self.ready.extend(self._made_again(self._top, refs))
                continue
            node = self._nodes[int(number)]
            # Of other ranks' states together there may be enough for some outputs.
            self.take(node, self._made_again(node.children[0], refs))

    def _made_again(self, node: SavableDataset[Any], refs: Sequence[Ref]) -> Group:
        made: Group = []
        for ref, value in zip(refs, rebuilt(node, refs)):
            if type(value) is SkipMarker:
                leave_out(self._failures, value)
            else:
                made.append((ref, value))
        return made

    def _make(self, node: CollectingDataset, group: Group | SkipMarker) -> None:
        """Makes the outputs of a group, and brings them up to where they are asked for: the top, or
        the next node that collects samples.
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
