"""pure. A Stream is a data set as all ranks share it: bound to a seed, compared with a saved one,
changed.
"""

import hashlib
import itertools
import json
import logging
import os
from collections.abc import Sequence
from types import GeneratorType
from typing import Any

from megatron.blending.loading.state import check_stream
from megatron.blending.loading.state_form import State, compact
from megatron.blending.streams.choice import BlendDataset
from megatron.blending.streams.holding import BufferedDataset, keyed
from megatron.blending.streams.mapping import SameOutputs
from megatron.blending.streams.node import Binding, MultiOutput, SavableDataset, SkipMarker
from megatron.blending.streams.sample_buffer import BufferDataset
from megatron.blending.streams.shard import ShardState, block_length
from megatron.blending.streams.source import SourceDataset
from megatron.blending.streams.worker_config import WorkerConfig

logger = logging.getLogger("megatron.blending")

_NUMBERS_OF_SHARDS = (1, 2, 4, 8, 16, 32, 64, 192, 320, 960)
_MIN_OF_SHARD = 64
_MIN_UNHELD = 8
_MIN_HELD_TIMES = 8
_MAX_HELD = 2**16


class Stream:
    """A Stream has a tree, bound now as `root` by `binding`, and a number of shards, by the data or
    a state.
    """

    def __init__(self, dataset: SavableDataset[Any], config: WorkerConfig) -> None:
        self.dataset = dataset
        self._seed = config.seed + config.seed_offset
        self._num_ranks = config.num_ranks
        self._description: str | None = None
        self._bind({}, {}, [])
        self.num_shards = number_of_shards(self.root, self.binding, config.num_shards)

    @property
    def is_finite(self) -> bool:
        return self.root.size is not None and not self.root.continues_across_epochs

    def described(self) -> str:
        """Return what tells this stream from others, as a short text."""
        if self._description is None:
            self._description = compact(describe_stream(self.root, self.binding))
        return self._description

    def source_positions(self, turn: int, shards: dict[int, ShardState]) -> list[int]:
        """Return of how many records of each source the outputs before `turn` were made, by where
        shards stand.
        """
        at = min(turn, self.root.size or 0) if self.is_finite else turn
        return source_positions(self.root, at, total_drawn(shards, self.num_shards, self.binding))

    def check(self, saved: State) -> None:
        """ValueError that names the first difference between a saved stream and this one."""
        check_stream(saved, describe_stream(self.root, self.binding))

    def continue_as(self, saved: State, num_shards: int) -> None:
        """Become the saved stream, which is one of the same data: with its orders, and the weights
        it was given.
        """
        places = {row[3]: row for row in saved["sources"]}
        salts, bases = ({place: row[column] for place, row in places.items()} for column in (4, 5))
        self._bind(salts, bases, [tuple(change) for change in saved["changes"]])
        self.num_shards = num_shards

    def continue_by_name(self, state: State, difference: str) -> None:
        """Become a stream whose sources begin where those of their names stood in a state of
        another stream.
        """
        if self.is_finite:
            raise ValueError(
                "on_change='remap' is for endless data, but this is finite: begin it again. "
                f"{difference}"
            )
        salts, bases, told = remapped(state, describe_stream(self.root, self.binding))
        logger.warning("%s. Continuing all the same: %s", difference.split(";")[0], told)
        self._bind(salts, bases, [])

    def check_shards(self, shards: dict[int, ShardState]) -> None:
        """ValueError unless the nodes that states are of are there, each behind those that it
        stands below.
        """
        for number, state in shards.items():
            known: set[int] = set()
            for at, _ in state[3:]:
                nodes = self.binding.nodes
                above = [
                    node
                    for node in nodes
                    if node.number <= at < node.end and isinstance(node, BufferedDataset)
                ]
                known.add(at)
                if not above or {node.number for node in above} - known or above[-1].number != at:
                    raise ValueError(
                        f"shard {number} of the state is not of this stream; it is damaged"
                    )

    def sample_again(self, key: Sequence[Any]) -> Any:
        """Make an output again from its `__restore_key__`; it raises what the functions raise."""
        try:
            return _from_key(self.root, key)
        except (TypeError, IndexError, StopIteration) as error:
            raise ValueError(
                f"no __restore_key__ of this stream: {key!r:.200} ({error})"
            ) from error

    def change_weights(
        self, weights: Sequence[float], blend: str, turn: int, shards: dict[int, ShardState]
    ) -> None:
        """From output `turn` on, give the children of the blend at a place other weights.
        ValueError if that is not the same for all ranks: where samples are held back, each knows
        only how many it drew itself.
        """
        if self._num_ranks > 1 and is_below_buffers(self.root, blend):
            raise ValueError(
                "weights below packing_buffer_size or batch groups cannot be changed on several "
                "ranks, none of which knows how far the others have read; plan the change "
                "(weight_schedule)"
            )
        drawn = total_drawn(shards, self.num_shards, self.binding)
        position = position_of_blend(self.root, blend, turn, drawn)
        change = (blend, position, [float(weight) for weight in weights])
        self._bind(self.binding.salts, self.binding.bases, [*self.binding.changes, change])

    def _bind(self, salts: dict[str, str], bases: dict[str, int], changes: list[Any]) -> None:
        binding = Binding(self._seed, self._num_ranks, salts=salts, bases=bases, changes=changes)
        self.root = self.dataset.bind(binding)
        self.binding = binding
        self._description = None


def number_of_shards(root: SavableDataset[Any], binding: Binding, num_shards: int | None) -> int:
    """Return how many shards a stream has, from its data and `num_shards` alone.

    None: the most of 1, 2, 4, ... 64, 192, 320, 960 that leave each shard 64 samples of an epoch of
    all sources, and eight times what it holds back; for shards that leave out or hold back drift
    apart, and few samples for each mean that an epoch is read far into the next ones before all of
    it was. 8 where nothing is held back, however small the data, as workers that share a shard make
    all of it. Of finite batches each shard has 64, for it may end with a short one. All shards
    together hold at most 65,536 samples back, which are part of a state. A pass over finite data
    reads each sample once with any number. They are powers of two, or multiples of 64, as numbers
    of ranks times workers mostly are: fewer shards than 960 are then seldom shared by more.

    Where finite data is packed there are fewer, for each shard holds back what it cannot fill: a
    divisor that sources each four buffers or more, if there is one.
    """
    holding = [node for node in binding.nodes if isinstance(node, BufferDataset)]
    most = [node.size // (4 * node.num_held) for node in holding if node.size is not None]
    if num_shards is None:
        if holding:
            most.append(_MAX_HELD // sum(node.num_buffered for node in holding))
        if (
            root.size is not None
            and not root.continues_across_epochs
            and root.samples_per_output > 1
        ):
            most.append(max(_MIN_UNHELD, root.size // _MIN_OF_SHARD))
        if root.size is None or root.continues_across_epochs:
            most.append(max(_MIN_UNHELD, sum(map(len, sources_of(root))) // _MIN_OF_SHARD))
            most += [
                len(node.children[0]) // (_MIN_HELD_TIMES * node.num_buffered) for node in holding
            ]
        return max(
            shards
            for shards in _NUMBERS_OF_SHARDS
            if shards <= max(1, min(most, default=_NUMBERS_OF_SHARDS[-1]))
        )
    least = max(1, min(most, default=num_shards))
    return max(
        shards
        for shards in range(1, num_shards + 1)
        if num_shards % shards == 0 and shards <= least
    )


def describe_stream(root: SavableDataset[Any], binding: Binding) -> State:
    """Return what makes the stream of a bound tree what it is, apart from the number of shards.

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
        "block_length": block_length(root),
        "changes": [list(change) for change in binding.changes],
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


def source_positions(root: SavableDataset[Any], position: int, drawn: dict[int, int]) -> list[int]:
    """Return how many records of each source the first outputs were made of: exact, but for what
    shards left out.
    """
    if isinstance(root, SourceDataset):
        return [root.base + position]
    used = root.used(position, drawn)
    return [
        found
        for child, count in zip(root.children, used)
        for found in source_positions(child, count, drawn)
    ]


def position_of_blend(
    root: SavableDataset[Any], place: str, position: int, drawn: dict[int, int]
) -> int:
    """Return how many outputs of the blend at a place the first outputs of the stream are made
    of."""
    if isinstance(root, BlendDataset) and root.place == place:
        return position
    child = _towards(root, place)
    if child is None:
        raise ValueError(f"there is no blend at place {place!r}; the outermost one is at ''")
    return position_of_blend(root.children[child], place, root.used(position, drawn)[child], drawn)


def is_below_buffers(root: SavableDataset[Any], place: str) -> bool:
    """Whether outputs of the blend at a place are held back on their way, so that no arithmetic
    tells how many.
    """
    if isinstance(root, BlendDataset) and root.place == place:
        return False
    child = _towards(root, place)
    return isinstance(root, BufferDataset) or (
        child is not None and is_below_buffers(root.children[child], place)
    )


def total_drawn(shards: dict[int, ShardState], num_shards: int, binding: Binding) -> dict[int, int]:
    """Return about how many samples each node that holds some back drew, over all shards, from the
    states of some.
    """
    drawn: dict[int, int] = {}
    for state in shards.values():
        for number, held in state[3:]:
            if isinstance(binding.nodes[number], BufferDataset):
                drawn[number] = drawn.get(number, 0) + held[0]
    return {number: count * num_shards // len(shards) for number, count in drawn.items()}


def remapped(state: State, now: State) -> tuple[dict[str, str], dict[str, int], str]:
    """Return for a changed stream: by place of each source the place that its order is of, and
    where it goes on.

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
    told = (
        f"{len(bases)} sources go on, {len(now['sources']) - len(bases)} are new, "
        f"{num_before - len(bases)} are gone"
    )
    if state["shards"]:
        told += f"; what {len(state['shards'])} shards held back or left out is given up"
    return salts, bases, told


def sources_of(root: SavableDataset[Any]) -> list[SourceDataset]:
    if isinstance(root, SourceDataset):
        return [root]
    return [source for child in root.children for source in sources_of(child)]


def _from_key(node: Any, key: Any) -> Any:
    """Return an output of a tree from its key: that of a record, or a tuple of those of what it was
    made of.
    """
    if isinstance(node, SourceDataset):
        if len(key) != 3 or not isinstance(key[2], int):
            raise IndexError("a record's is (place, position, record)")
        record = node.source[key[2]]
        value = record if node.load is None else node.user_load(record, tuple(key), tuple(key))
    elif isinstance(node, BufferedDataset):
        if not key:
            raise IndexError("it is empty")
        samples = [_from_key(node.children[0], one) for one in key]
        encode = getattr(node, "encode", None)
        samples = samples if encode is None else [encode(one, 0) for one in samples]
        made: Any = node.make(samples, 0)
        several = isinstance(made, GeneratorType)
        value = (
            MultiOutput(keyed(one, samples) for one in made) if several else keyed(made, samples)
        )
    else:
        of_record = key
        while not isinstance(of_record[0], str):
            of_record = of_record[0]
        child = _towards(node, of_record[0])
        if child is None:
            raise IndexError(f"no source is at place {of_record[0]!r}")
        value = _from_key(node.children[child], key)
        value = node.apply(value, 0) if isinstance(node, SameOutputs) else value
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
    """Return the number of the child that stands on the way to a place."""
    # Of a node with one child both may have the same place.
    on_the_way = (
        not child.place or (place + ".").startswith(child.place + ".") for child in root.children
    )
    return next((number for number, is_there in enumerate(on_the_way) if is_there), None)


def _digest(value: object) -> str:
    return hashlib.blake2b(json.dumps(value, default=str).encode(), digest_size=16).hexdigest()
