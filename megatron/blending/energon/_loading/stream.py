"""pure. A Stream is a data set as all ranks share it: bound to a seed, and compared with a saved
one.
"""

import hashlib
import itertools
import json
import logging
import os
from collections.abc import Sequence
from types import GeneratorType
from typing import Any

from megatron.blending.energon._loading.lanes import lanes_of
from megatron.blending.energon._loading.state import State, check_stream, compact
from megatron.blending.energon._streams.collecting import CollectingDataset
from megatron.blending.streams.items import MultiOutput, SkipMarker, applied, no_entries
from megatron.blending.streams.mapping import SameOutputs
from megatron.blending.streams.node import Binding, SavableDataset
from megatron.blending.streams.source import SourceDataset
from megatron.blending.streams.worker_config import WorkerConfig

logger = logging.getLogger("megatron.blending")


class Stream:
    """A tree, bound as `root` by `binding`."""

    def __init__(self, dataset: SavableDataset[Any], config: WorkerConfig) -> None:
        self.dataset = dataset
        self._seed = config.seed + config.seed_offset
        self._num_ranks = config.num_ranks
        self._description: str | None = None
        self._bind({}, {})

    @property
    def is_finite(self) -> bool:
        return self.root.size is not None and not self.root.continues_across_epochs

    def described(self) -> str:
        """Returns what tells this stream from others, as a short text."""
        if self._description is None:
            self._description = compact(describe_stream(self.root, self.binding))
        return self._description

    def source_positions(self, cells: Sequence[int]) -> list[int]:
        """Returns how many records of each source were taken when so many cells of each lane were:
        exact where all of them are finished.
        """
        found = [
            source_positions(lane.node, max(0, at) if lane.size is None else min(at, lane.size))
            for lane, at in zip(lanes_of(self.root), cells)
        ]
        return [position for positions in found for position in positions]

    def check(self, saved: State) -> None:
        """Raises ValueError that names the first difference between a saved stream and this one."""
        check_stream(saved, describe_stream(self.root, self.binding))

    def continue_as(self, saved: State) -> None:
        """Becomes the saved stream, which is one of the same data, with its orders."""
        places = {row[3]: row for row in saved["sources"]}
        salts, bases = ({place: row[column] for place, row in places.items()} for column in (4, 5))
        self._bind(salts, bases)

    def continue_by_name(self, state: State, difference: str) -> None:
        """Becomes a stream whose sources begin where those of their names stood in a state of
        another stream.
        """
        if self.is_finite:
            raise ValueError(
                "on_change='remap' is for endless data, but this is finite: begin it again. "
                f"{difference}"
            )
        salts, bases, summary = remapped(state, describe_stream(self.root, self.binding))
        logger.warning("%s. Continuing all the same: %s", difference.split(";")[0], summary)
        self._bind(salts, bases)

    def sample_again(self, key: Sequence[Any]) -> Any:
        """Makes an output again from its `__restore_key__`; it raises what the functions raise."""
        try:
            return _from_key(self.root, key)
        except (TypeError, IndexError, StopIteration) as error:
            raise ValueError(
                f"no __restore_key__ of this stream: {key!r:.200} ({error})"
            ) from error

    def _bind(self, salts: dict[str, str], bases: dict[str, int]) -> None:
        binding = Binding(self._seed, self._num_ranks, salts=salts, bases=bases)
        self.root = self.dataset.bind(binding)
        self.binding = binding
        self._description = None


def describe_stream(root: SavableDataset[Any], binding: Binding) -> State:
    """Returns what makes the stream of a bound tree what it is.

    Of each source: name, fingerprint, number of records, place, the place that its order is of,
    where it began.
    """
    sources = sources_of(root)
    names = [source.name for source in sources]
    # All of the path that they share, but for the last letters of a folder's name.
    folder = os.path.commonprefix(names)  # noqa: RUF071
    folder = folder[: folder.rfind("/") + 1]
    return {
        "seed": binding.seed,
        "shape": _digest([[node.number, node.end, node.signature()] for node in binding.nodes]),
        "folder": folder,
        "sources": [
            [
                name[len(folder) :],
                source.fingerprint()[:16],
                source.order.num_records,
                source.place,
                source.salt,
                source.base,
            ]
            for name, source in zip(names, sources)
        ],
    }


def source_positions(root: SavableDataset[Any], position: int) -> list[int]:
    """Returns how many records of each source the first positions are made of."""
    if isinstance(root, SourceDataset):
        return [root.base + position]
    return [
        found
        for child, count in zip(root.children, root.used(position))
        for found in source_positions(child, count)
    ]


def remapped(state: State, now: State) -> tuple[dict[str, str], dict[str, int], str]:
    """Returns for a changed stream: by place of each source the place that its order is of, and
    where it continues.

    Sources are recognised by name, those of one name by their order. The text says what became of
    them.
    """
    before: dict[str, list[tuple[str, int]]] = {}
    for row, position in zip(state["stream"]["sources"], state["positions"]):
        before.setdefault(state["stream"]["folder"] + row[0], []).append((row[4], position))
    num_before = sum(map(len, before.values()))
    taken = {salt for known in before.values() for salt, _ in known}
    salts: dict[str, str] = {}
    bases: dict[str, int] = {}
    for name, _, _, place, *_ in now["sources"]:
        if before.get(now["folder"] + name):
            salts[place], bases[place] = before[now["folder"] + name].pop(0)
            continue
        salts[place] = next(
            salt for n in itertools.count() if (salt := place + "+" * n) not in taken
        )
        taken.add(salts[place])
    summary = (
        f"{len(bases)} sources continue, {len(now['sources']) - len(bases)} are new, "
        f"{num_before - len(bases)} are missing"
    )
    if state["held"] or any(cells[1] for cells in state["cells"]):
        summary += "; samples that waited for others are given up"
    return salts, bases, summary


def sources_of(root: SavableDataset[Any]) -> list[SourceDataset]:
    if isinstance(root, SourceDataset):
        return [root]
    return [source for child in root.children for source in sources_of(child)]


def _from_key(node: Any, key: Any) -> Any:
    """Returns an output of a tree from its key: that of a record, or a tuple of those of what it
    was made of.
    """
    if isinstance(node, SourceDataset):
        if len(key) != 3 or not isinstance(key[2], int):
            raise IndexError("a record's is (place, position, record)")
        record = node.source[key[2]]
        value = record if node.load is None else node.user_load(record, tuple(key), tuple(key))
    elif isinstance(node, CollectingDataset):
        if not key:
            raise IndexError("it is empty")
        group = [([0, 0, 0], _from_key(node.children[0], one)) for one in key]
        value = MultiOutput(node.outputs_of(group))
    else:
        of_record = key
        while not isinstance(of_record[0], str):
            of_record = of_record[0]
        child = _towards(node, of_record[0])
        if child is None:
            raise IndexError(f"no source is at place {of_record[0]!r}")
        value = _from_key(node.children[child], key)
        value = applied(node, value, 0, no_entries) if isinstance(node, SameOutputs) else value
    if isinstance(value, (MultiOutput, GeneratorType)):
        values = list(value)
        if len(values) != 1:
            raise ValueError(
                f"{len(values)} outputs were made of one; its key does not say which of them it was"
            )
        value = values[0]
    if isinstance(value, SkipMarker):
        raise value.error or ValueError("the sample is left out")
    return value


def _towards(root: SavableDataset[Any], place: str) -> int | None:
    """Returns the number of the child that stands on the way to a place."""
    # Of a node with one child both may have the same place.
    on_the_way = (
        not child.place or (place + ".").startswith(child.place + ".") for child in root.children
    )
    return next((number for number, is_there in enumerate(on_the_way) if is_there), None)


def _digest(value: object) -> str:
    return hashlib.blake2b(json.dumps(value, default=str).encode(), digest_size=16).hexdigest()
