"""pure. PackingDataset packs the samples of a block by a user's functions: which of them go
together, and what they make.

Samples that are chosen for no pack are offered again, until none of a block is chosen. Then each
makes a pack by itself if it fits; else it is over-long. So no sample leaves its block, and the
packs of block k depend on k alone.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import GeneratorType
from typing import Any

from megatron.blending.arguments import (
    check_function,
    check_no_more,
    check_one_of,
    check_whole,
    shown,
)
from megatron.blending.energon._streams.collecting import BlocksPlan, CollectingDataset, Group
from megatron.blending.energon._streams.references import at_of, entries_of, rebuilt
from megatron.blending.streams.failures import FatalSampleError, NotChosen
from megatron.blending.streams.items import (
    Deferred,
    Ref,
    Sample,
    SkipMarker,
    numbered,
)
from megatron.blending.streams.node import Binding, SavableDataset
from megatron.blending.streams.seeding import At
from megatron.blending.streams.worker_config import WorkerConfig

OVER_LONG = ("error", "alone", "drop")
# What energon's takes besides, and nothing here needs.
_ENERGON_ONLY = (
    *("final_packer_stateless", "sample_encoder_stateless", "packer_config", "error_handler"),
    *(f"{name}_failure_tolerance" for name in ("pre_packer", "final_packer", "sample_encoder")),
)
_MAX_COPIES = 20_000
_OF_COPIES = (-1, 0)


class SampleLength(int):
    """The length of a sample that is not encoded yet: what `pre_packer` chooses by."""


class PackCollector:
    """Holds samples until they are a block."""

    def __init__(self, node: "PackingDataset") -> None:
        self._node = node
        self._samples: Group = []

    def add(self, sample: Sample) -> Iterable[Group | SkipMarker]:
        self._samples.append(sample)
        return self.finish() if len(self._samples) == self._node.buffer_size else ()

    def finish(self) -> Iterable[Group | SkipMarker]:
        samples, self._samples = self._samples, []
        return self._node.groups(samples)

    def held(self) -> Group:
        return self._samples


class PackingDataset(CollectingDataset):
    """Makes packs of blocks of `buffer_size` consecutive samples.

    `pre_packer(samples)` returns lists of them, each to be a pack; `sample_encoder` finishes each
    that was chosen; `final_packer(samples)` makes the pack, or several by being a generator. What
    is not chosen is offered again with the rest of its block, until nothing is. Then each that is
    left makes a pack by itself if it fits: if `pre_packer` chooses it alone, or of copies of it.
    One that does not fit is over-long: `over_long` says whether it is dropped, logged and counted
    ("drop"), makes a pack by itself ("alone"), or is an error.

    `length_of`: length of a sample that is not encoded. With it a block holds lengths alone,
    `pre_packer` gets `SampleLength`s, and a sample is read again and encoded by `sample_encoder`
    when its pack is made: the memory is that of one pack. All workers choose, and share the packs
    of a block.
    """

    is_block = True

    def __init__(
        self,
        dataset: SavableDataset[Any],
        buffer_size: int,
        pre_packer: Callable[[list[Any]], list[list[Any]]],
        final_packer: Callable[[list[Any]], Any],
        *,
        sample_encoder: Callable[[Any], Any] | None = None,
        length_of: Callable[[Any], int] | None = None,
        over_long: str = "drop",
        worker_config: WorkerConfig | None = None,
        **ignored: object,
    ) -> None:
        check_no_more("PackingDataset", ignored, _ENERGON_ONLY)
        check_whole("PackingDataset: buffer_size", buffer_size)
        check_one_of("PackingDataset: over_long", over_long, OVER_LONG)
        super().__init__(dataset, worker_config)
        functions = {"sample_encoder": sample_encoder, "length_of": length_of}
        given = {name: function for name, function in functions.items() if function is not None}
        for name, function in {
            "pre_packer": pre_packer,
            "final_packer": final_packer,
            **given,
        }.items():
            check_function(f"PackingDataset: {name}", function)
        self.buffer_size = self.num_block = buffer_size
        self.over_long = over_long
        self.pre_packer: Any = pre_packer
        self.final_packer: Any = final_packer
        self.sample_encoder: Any = sample_encoder
        self.length_of: Any = length_of
        self.is_block = True
        self.size = self.num_positions

    def on_bound(self, binding: Binding, is_outermost: bool) -> None:
        super().on_bound(binding, is_outermost)
        self.make = binding.user_function(self.final_packer, self, "final packer")
        self.select = binding.user_function(self.pre_packer, self, "pre packer")
        self.encode = binding.user_function(
            self.sample_encoder or _same_sample, self, "sample encoder"
        )
        self.length = binding.user_function(self.length_of or len, self, "length")

    def collector(self, is_of_rank: bool = False) -> PackCollector:
        return PackCollector(self)

    def is_complete(self, num_positions: int) -> bool:
        return True

    def items(self, plan: BlocksPlan, index: int) -> Iterator[Any]:
        return (
            super().items(plan, index) if self.length_of is None else self._by_length(plan, index)
        )

    def groups(self, samples: Group) -> Iterator[Group | SkipMarker]:
        """Yields the groups that a block is packed in. A group is gone from the block when it is
        taken.
        """
        left = samples
        while left:
            values, at = [value for _, value in left], at_of(left[0][0])
            try:
                chosen = self._selected(values, at)
            except Exception as error:
                # Whatever it does not take is left out, as with any other function.
                entries = partial(entries_of, self.children[0], [left[0][0]])
                yield SkipMarker(self.node_id, self.pre_packer, error, values, entries)
                return
            groups, rest = _parted(left, chosen)
            del values, chosen
            samples.clear()
            if not groups:
                yield from self._single(rest)
                return
            groups.reverse()
            while groups:
                yield groups.pop()
            left = samples = rest

    def outputs_of(self, group: Group | SkipMarker) -> Iterator[Any]:
        if isinstance(group, SkipMarker):
            yield group
            return
        done: Group = []
        for ref, value in group:
            try:
                encoded = self.encode(value, at_of(ref))
                if type(encoded) is GeneratorType:
                    raise TypeError("a sample of a pack must be one, but its encoder gives several")
                done.append((ref, encoded))
            except Exception as error:
                entries = partial(entries_of, self.children[0], [ref])
                yield SkipMarker(self.node_id, self.encode.function, error, value, entries)
        group.clear()
        if done:
            yield from super().outputs_of(done)

    def _single(self, samples: Group) -> Iterator[Group | SkipMarker]:
        """Yields samples of which `pre_packer` chooses none any more, each as a pack if it fits."""
        fitting = self._fit([value for _, value in samples])
        for ref, value in samples:
            if id(value) in fitting:
                yield [(ref, value)]
                continue
            entries = partial(entries_of, self.children[0], [ref])
            if self.over_long == "error":
                source, position = entries()[0]
                raise FatalSampleError(
                    f"{source.describe(position)}: select_samples_to_pack does not choose this "
                    "sample; cut it if it is too long, or set over_long to 'alone' or 'drop'"
                )
            reason = NotChosen("select_samples_to_pack does not choose this sample")
            yield SkipMarker(self.node_id, self.pre_packer, reason, value, entries)

    def _fit(self, values: list[Any]) -> set[int]:
        """Returns the ids of those that fit in a pack. Most often one call does for all of them."""
        if self.over_long == "alone":
            return set(map(id, values))
        fitting = self._chosen_of_copies(values)
        for value in values:
            if id(value) not in fitting:
                fitting |= self._chosen_of_copies([value])
        return fitting

    def _chosen_of_copies(self, values: list[Any]) -> set[int]:
        # Functions that keep a pack open for more samples choose none of a few small ones.
        count = len(values)
        while count < _MAX_COPIES:
            try:
                groups = self._selected(values * -(-count // len(values)), _OF_COPIES)
            except Exception:
                # It does not take copies, so there is no telling.
                return set(map(id, values))
            if any(groups):
                return {id(value) for group in groups for value in group}
            count = max(8 * count, self.buffer_size)
        return set()

    def _selected(self, values: list[Any], at: At) -> list[list[Any]]:
        groups = self.select(values, at)
        if isinstance(groups, Iterable):
            groups = list(groups)
            if all(isinstance(group, (list, tuple)) for group in groups):
                return groups
        raise FatalSampleError(
            "select_samples_to_pack must return a list of lists of samples, but gave "
            f"{shown(groups)}"
        )

    # With lengths.

    def _by_length(self, plan: BlocksPlan, index: int) -> Iterator[Any]:
        lengths: Group = []
        node_id = self.children[0].node_id
        for at in range(*plan.child_range(index)):
            position = int(plan.positions[at])
            for part, sample in numbered(plan.child.values(at, at + 1)[0]):
                if part is None:
                    yield sample
                    continue
                ref: Ref = [node_id, position, part]
                try:
                    lengths.append((ref, SampleLength(self.length(sample, at_of(ref)))))
                except Exception as error:
                    entries = partial(plan.child.entries, at, at + 1)
                    yield SkipMarker(self.node_id, self.length_of, error, sample, entries)
        # Only references are kept. The samples are read again by the worker that makes the pack.
        found: list[list[Ref]] = []
        for group in self.groups(lengths):
            if isinstance(group, SkipMarker):
                yield group
            else:
                found.append([ref for ref, _ in group])
        for turn, refs in enumerate(found):
            yield Deferred(turn, turn == len(found) - 1, partial(self._pack_of, refs))

    def _pack_of(self, refs: list[Ref]) -> Iterator[Any]:
        group: Group = []
        for ref, sample in zip(refs, rebuilt(self.children[0], refs)):
            if type(sample) is SkipMarker:
                yield sample
            else:
                group.append((ref, sample))
        if group:
            yield from self.outputs_of(group)

    def signature(self) -> list[Any]:
        return [type(self).__name__, self.num_block, self.length_of is not None]


def _same_sample(sample: Any) -> Any:
    return sample


def _parted(samples: Group, chosen: list[list[Any]]) -> tuple[list[Group], Group]:
    """Returns the samples of groups of values, and those of none. One object may stand there for
    several samples.
    """
    by_id: dict[int, list[Sample]] = {}
    for sample in reversed(samples):
        by_id.setdefault(id(sample[1]), []).append(sample)
    groups: list[Group] = []
    for group in chosen:
        members = [by_id[id(value)].pop() for value in group if by_id.get(id(value))]
        if len(members) < len(group):
            raise FatalSampleError(
                "select_samples_to_pack must return lists of the samples that it was given, each "
                "at most once"
            )
        if members:
            groups.append(members)
    left = {id(sample) for rest in by_id.values() for sample in rest}
    return groups, [sample for sample in samples if id(sample) in left]
