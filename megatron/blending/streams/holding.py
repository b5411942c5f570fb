"""pure. Some nodes make an output of several samples, or hold some back: in sequence where it is
not as planned.

The outputs of a stream are dealt to a fixed number of shards: output k belongs to shard k %
num_shards. Within a shard, a node that makes one output of several takes them from its child in
order, from a cursor of its own, so that holes are filled by what follows; no other shard is
touched. So the stream depends on the number of shards, and on nothing that ranks and workers are.
Worked example, batches of two of the samples a b c d e f, of which b fails: the plan [a b] [c d] [e
f] becomes [a c] [d e] [f ...].

What such a node holds is saved as origins, from which samples are made again: of the child's
position p the origin is p; or [p, part of several, origin of the output of another such node, or
None].
"""

import contextlib
from collections.abc import Callable, Iterable
from types import GeneratorType
from typing import Any, ClassVar

import numpy as np

from megatron.blending.streams.node import (
    FAST_PATH_ONLY,
    Block,
    Holders,
    Ints,
    MultiOutput,
    NeedsSequential,
    Origin,
    Plan,
    SavableDataset,
    SkipMarker,
    check_datasets,
)
from megatron.blending.streams.seeding import At, UserFunction, restore_key_of
from megatron.blending.streams.worker_config import WorkerConfig


class BufferedDataset(SavableDataset[Any]):
    """The node makes its outputs of several of the child's."""

    num_held = 0
    """How many samples it holds back, where that does not depend on their failing."""

    def __init__(self, dataset: SavableDataset[Any], worker_config: WorkerConfig | None) -> None:
        check_datasets(type(self).__name__, [dataset])
        self.children = (dataset,)
        self.worker_config = worker_config
        self.size = dataset.size

    holder: ClassVar[Callable[..., Any]]
    """What makes this node's outputs in a shard of the stream."""

    make: UserFunction
    """It makes an output of several of the child's, or is a generator of outputs."""

    def values_again(self, origins: list[Origin]) -> list[Any]:
        """Return what `make` is called with, from where it came from."""
        return [remade(self.children[0], origin) for origin in origins]

    def extra(self, holders: Holders) -> object:
        found = holders.output_of(self, None, 0)
        return None if type(found) is SkipMarker else found

    def remade(self, inner: list[Any] | None) -> object:
        """Return an output again, from where it came from."""
        if inner is None:
            raise ValueError("a state does not say what an output was made of; it is damaged")
        origins, part = inner
        samples = self.values_again(origins)
        made = self.make(samples, at_of(origins[0]))
        if type(made) is not GeneratorType:
            return keyed(made, samples)
        values = [keyed(value, samples) for value in made]
        if part < len(values):
            return values[part]
        raise ValueError(
            f"a generator gave {len(values)} values, but more before; it must give the same each "
            "time"
        )


def keyed(made: Any, samples: list[Any]) -> Any:
    """Give an output that has a `__restore_key__` those of what it was made of, whatever the
    function put there.
    """
    is_dict = isinstance(made, dict)
    if ("__restore_key__" in made) if is_dict else hasattr(made, "__restore_key__"):
        keys = [restore_key_of(sample) for sample in samples]
        if all(keys):
            # What is frozen stays as it is.
            with contextlib.suppress(AttributeError):
                made.update(__restore_key__=tuple(keys)) if is_dict else setattr(
                    made, "__restore_key__", tuple(keys)
                )
    return made


def at_of(origin: Origin) -> At:
    """Return where a sample stands among the outputs of its node, for `UserFunction`."""
    return (origin, 0) if isinstance(origin, int) else (origin[0], origin[1])


def remade(node: SavableDataset[Any], origin: Origin) -> object:
    """Return an output of a tree again; it raises what the functions raise."""
    value, part = value_again(node, origin), 0 if isinstance(origin, int) else origin[1]
    if type(value) is MultiOutput:
        value = value[part] if part < len(value) else SkipMarker(node.number, node, None)
    if type(value) is SkipMarker:
        raise value.error or ValueError("a sample that was there before is left out now")
    return value


def value_again(node: SavableDataset[Any], origin: Origin) -> object:
    """Return what stands at the position of an origin, which may be several outputs."""
    position, _, inner = (origin, 0, None) if isinstance(origin, int) else origin
    return node.plan(np.array([position], np.int64), Block()).values(0, 1, _Again(inner))[0]


class _Again:
    asked_position = 0

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def output_of(self, node: BufferedDataset, plan: Any, place: int) -> object:
        return node.remade(self._inner)


class HoldingPlan:
    """It plans outputs of a node that makes one of several: of the child's outputs, so many
    each."""

    def __init__(self, node: Any, starts: Ints, sizes: Ints, block: Block) -> None:
        """`starts`: positions of the child, of each output; it goes on from there for `sizes`."""
        self.length = len(starts)
        self._node = node
        self._ends = np.cumsum(sizes)
        first = np.repeat(starts - (self._ends - sizes), sizes)
        self.positions: Ints = first + np.arange(len(first), dtype=np.int64)
        self._child = node.children[0].plan(self.positions, block)

    def values(self, start: int, end: int, holders: Holders | None = None) -> list[Any]:
        if holders is not None and holders is not FAST_PATH_ONLY:
            return [holders.output_of(self._node, self, place) for place in range(start, end)]
        if self._node.num_held:
            raise NeedsSequential
        return [self._made(*self.child_range(place)) for place in range(start, end)]

    def _made(self, start: int, end: int) -> object:
        try:
            values = self._child.values(start, end, FAST_PATH_ONLY)
            made = self._node.make(values, (int(self.positions[start]), 0))
        except Exception as error:
            raise NeedsSequential from error
        if type(made) is GeneratorType:
            raise NeedsSequential
        return keyed(made, values)

    def child(self, number: int) -> Plan:
        return self._child

    def entries(self, start: int, end: int, inner: Any = None) -> list[tuple[Any, int]]:
        if inner is not None:
            return [
                entry for origin in inner[0] for entry in entries_of(self._node.children[0], origin)
            ]
        return self._child.entries(self.child_range(start)[0], self.child_range(end - 1)[1])

    def child_range(self, place: int) -> tuple[int, int]:
        """Return where in the child's plan the samples of an output start and end."""
        return int(self._ends[place - 1]) if place else 0, int(self._ends[place])


def entries_of(node: SavableDataset[Any], origin: Origin) -> list[tuple[Any, int]]:
    """Return the sources that an output of a tree was made of, with positions."""
    position, _, inner = (origin, 0, None) if isinstance(origin, int) else origin
    return node.plan(np.array([position], np.int64), Block()).entries(0, 1, inner)


def packed_origins(origins: Iterable[Origin]) -> list[Origin]:
    """Return origins with positions less the one before, as shorter states are made of: `[7, 9, 4]
    -> [7, 2, -5]`.
    """
    packed: list[Origin] = []
    last = 0
    for origin in origins:
        packed.append(origin - last if isinstance(origin, int) else origin)
        last = origin if isinstance(origin, int) else last
    return packed


def unpacked_origins(packed: Iterable[Origin]) -> list[Origin]:
    """Return what `packed_origins` made shorter."""
    origins: list[Origin] = []
    last = 0
    for step in packed:
        last += step if isinstance(step, int) else 0
        origins.append(last if isinstance(step, int) else step)
    return origins
