"""pure. A Stream is a data set as all ranks share it: bound to a seed, and compared with a saved
stream.
"""

import hashlib
import itertools
import json
import logging
import os
from collections.abc import Sequence
from types import GeneratorType
from typing import Any

from megatron.blending.arguments import shown
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
        """Returns a short text of what distinguishes this stream from others."""
        if self._description is None:
            self._description = compact(describe_stream(self.root, self.binding))
        return self._description

    def source_positions(self, cells: Sequence[int]) -> list[int]:
        """Returns how many records of each source were read for the first `cells` of each lane. The
        numbers are exact if all of these cells are finished.
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
        """Becomes the saved stream, which has the same data, with its orders of reading."""
        # Columns as in `describe_stream`: tree path, seed path, start position.
        rows = [row[3:6] for row in saved["sources"]]
        seed_paths = {tree_path: seed_path for tree_path, seed_path, _ in rows}
        self._bind(seed_paths, {tree_path: start for tree_path, _, start in rows})

    def continue_by_name(self, state: State, difference: str) -> None:
        """Becomes a stream whose sources continue where the sources of the same names stood in the
        state of another stream.
        """
        if self.is_finite:
            raise ValueError(
                "on_change='remap' is for endless data, but this is finite: begin it again. "
                f"{difference}"
            )
        seed_paths, start_positions, summary = remapped(
            state, describe_stream(self.root, self.binding)
        )
        logger.warning("%s. Continuing all the same: %s", difference.split(";")[0], summary)
        self._bind(seed_paths, start_positions)

    def sample_again(self, key: Sequence[Any]) -> Any:
        """Returns an output again by its `__restore_key__`. Raises what the functions raise."""
        try:
            return _from_key(self.root, key)
        except (TypeError, IndexError, StopIteration) as error:
            raise ValueError(
                f"no __restore_key__ of this stream: {shown(key)} ({error})"
            ) from error

    def _bind(self, seed_paths: dict[str, str], start_positions: dict[str, int]) -> None:
        binding = Binding(
            self._seed, self._num_ranks, seed_paths=seed_paths, start_positions=start_positions
        )
        self.root = self.dataset.bind(binding)
        self.binding = binding
        self._description = None


def describe_stream(root: SavableDataset[Any], binding: Binding) -> State:
    """Returns all that the stream of a bound tree depends on.

    The row of a source: name, fingerprint, number of records, tree path, tree path whose seed it
    keeps, first position.
    """
    sources = sources_of(root)
    names = [source.name for source in sources]
    # The common folder, cut back to a whole name: a/chats1, a/chats2 -> a/, not a/chats.
    folder = os.path.commonprefix(names)  # noqa: RUF071
    folder = folder[: folder.rfind("/") + 1]
    return {
        "seed": binding.seed,
        "shape": _digest(
            [[node.node_id, node.end_node_id, node.signature()] for node in binding.nodes]
        ),
        "folder": folder,
        "sources": [
            [
                name[len(folder) :],
                source.fingerprint()[:16],
                source.order.num_records,
                source.tree_path,
                source.seed_path,
                source.start_position,
            ]
            for name, source in zip(names, sources)
        ],
    }


def source_positions(root: SavableDataset[Any], position: int) -> list[int]:
    """Returns how many records of each source the first `position` positions are made of."""
    if isinstance(root, SourceDataset):
        return [root.start_position + position]
    return [
        found
        for child, count in zip(root.children, root.used(position))
        for found in source_positions(child, count)
    ]


def remapped(state: State, now: State) -> tuple[dict[str, str], dict[str, int], str]:
    """Returns seed paths and start positions of a changed stream, and a text that sums them up.

    Sources are matched by name, those of equal names in their order. A state of [a at 100 of path
    "0", b at 50 of "1"] and a tree of [b, c] -> seed paths {"0": "1", "1": "1+"}, start positions
    {"0": 50}: c may not have the order of b, so its seed path is one that no source had.
    """
    before: dict[str, list[tuple[str, int]]] = {}
    for row, position in zip(state["stream"]["sources"], state["positions"]):
        before.setdefault(state["stream"]["folder"] + row[0], []).append((row[4], position))
    num_before = sum(map(len, before.values()))
    used = {seed_path for known in before.values() for seed_path, _ in known}
    seed_paths: dict[str, str] = {}
    start_positions: dict[str, int] = {}
    for name, _, _, tree_path, *_ in now["sources"]:
        if before.get(now["folder"] + name):
            continued = before[now["folder"] + name].pop(0)
            seed_paths[tree_path], start_positions[tree_path] = continued
            continue
        candidates = (tree_path + "+" * n for n in itertools.count())
        seed_paths[tree_path] = next(path for path in candidates if path not in used)
        used.add(seed_paths[tree_path])
    summary = (
        f"{len(start_positions)} sources continue, "
        f"{len(now['sources']) - len(start_positions)} are new, "
        f"{num_before - len(start_positions)} are missing"
    )
    if state["held"] or any(cells[1] for cells in state["cells"]):
        summary += "; samples that waited for others are given up"
    return seed_paths, start_positions, summary


def sources_of(root: SavableDataset[Any]) -> list[SourceDataset]:
    if isinstance(root, SourceDataset):
        return [root]
    return [source for child in root.children for source in sources_of(child)]


def _from_key(node: Any, key: Any) -> Any:
    """Returns an output of a tree from its key. The key of a record is (tree path, position,
    record); that of a batch or pack is a tuple of the keys of its samples.
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
        # The first record, however deep: ((("0.1", 7, 3), ...), ...) -> ("0.1", 7, 3).
        of_record = key
        while not isinstance(of_record[0], str):
            of_record = of_record[0]
        child = _towards(node, of_record[0])
        if child is None:
            raise IndexError(f"no source is at place {shown(of_record[0])}")
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


def _towards(root: SavableDataset[Any], tree_path: str) -> int | None:
    """Returns the number of the child on the way to a tree path; None if there is none."""
    # A node and its only child may have the same path. With the dots, "0.1" is not below "0.10".
    on_the_way = (
        not child.tree_path or (tree_path + ".").startswith(child.tree_path + ".")
        for child in root.children
    )
    return next((number for number, is_there in enumerate(on_the_way) if is_there), None)


def _digest(value: object) -> str:
    return hashlib.blake2b(json.dumps(value, default=str).encode(), digest_size=16).hexdigest()
