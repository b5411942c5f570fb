"""pure. GroupBatchDataset makes batches of samples that are alike."""

from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import Any

from megatron.blending.arguments import check_function, check_no_more, check_whole
from megatron.blending.energon._streams.collecting import CollectingDataset, Group
from megatron.blending.energon._streams.references import at_of, entries_of
from megatron.blending.streams.items import Sample, SkipMarker
from megatron.blending.streams.node import Binding, SavableDataset
from megatron.blending.streams.worker_config import WorkerConfig

_ENERGON_ONLY = ("batcher_stateless", "batcher_config", "error_handler", "failure_tolerance")
_SAMPLES_OF_BATCH = 32
"""Stands for a batch size that the criterion gives for each sample."""
_BATCHES_PER_BLOCK = 8
MAX_OPEN_GROUPS = 256


class GroupCollector:
    """Holds open groups by key, in the order in which they were begun."""

    def __init__(self, node: "GroupBatchDataset", max_open: int | None) -> None:
        self._node = node
        self._max_open = max_open
        self._groups: dict[Hashable, Group] = {}
        self.num_short = 0
        """Groups that were given out before they were full, as there were too many."""

    def add(self, sample: Sample) -> Iterator[Group | SkipMarker]:
        node, (ref, value) = self._node, sample
        try:
            key, size = node.key_of(value, at_of(ref))
            size = size or node.fixed_batch_size
            if size is None:
                raise ValueError(
                    "batch_group_criterion gives no batch size, and no batch_size was asked for"
                )
            group = self._groups.setdefault(key, [])
        except Exception as error:
            entries = partial(entries_of, node.children[0], [ref])
            yield SkipMarker(node.node_id, node.sample_group_key, error, value, entries)
            return
        group.append(sample)
        if len(group) >= size:
            yield self._groups.pop(key)
        elif self._max_open is not None and len(self._groups) > self._max_open:
            self.num_short += 1
            yield self._groups.pop(next(iter(self._groups)))

    def finish(self) -> Iterator[Group]:
        groups, self._groups = self._groups, {}
        if not self._node.drop_last:
            yield from groups.values()

    def held(self) -> list[Sample]:
        return [sample for group in self._groups.values() for sample in group]


class GroupBatchDataset(CollectingDataset):
    """Makes batches of equal keys: `sample_group_key(sample)` is (key, batch size or None for the
    fixed one).

    The samples of a key are held until they fill a batch. Each rank keeps at most
    `max_open_groups` of them open: of more, the oldest is given out as it is, and counted
    (`loader.num_short_groups`). At the end of finite data the rest makes smaller batches.
    """

    def __init__(
        self,
        dataset: SavableDataset[Any],
        fixed_batch_size: int | None = None,
        sample_group_key: Callable[[Any], tuple[Hashable, int | None]] | None = None,
        batcher: Callable[[list[Any]], Any] | None = None,
        *,
        drop_last: bool = False,
        max_open_groups: int = MAX_OPEN_GROUPS,
        worker_config: WorkerConfig | None = None,
        **ignored: object,
    ) -> None:
        check_no_more("GroupBatchDataset", ignored, _ENERGON_ONLY)
        super().__init__(dataset, worker_config)
        check_function("GroupBatchDataset: sample_group_key", sample_group_key)
        check_whole("GroupBatchDataset: max_open_groups", max_open_groups)
        self.sample_group_key: Any = sample_group_key
        self.batcher: Any = list if batcher is None else batcher
        self.fixed_batch_size = fixed_batch_size
        self.max_open_groups = max_open_groups
        self.drop_last = drop_last
        self.num_block = _BATCHES_PER_BLOCK * (fixed_batch_size or _SAMPLES_OF_BATCH)
        self.is_block = True
        self.size = self.num_positions

    @property
    def _drops_short(self) -> bool:
        # What is dropped is groups, not the end of the data.
        return False

    def on_bound(self, binding: Binding, is_outermost: bool) -> None:
        super().on_bound(binding, is_outermost)
        self.make = binding.user_function(self.batcher, self, "batcher")
        self.key_of = binding.user_function(self.sample_group_key, self, "key")

    def collector(self, is_of_rank: bool = False) -> GroupCollector:
        return GroupCollector(self, self.max_open_groups if is_of_rank else None)

    def is_complete(self, num_positions: int) -> bool:
        return False

    def signature(self) -> list[Any]:
        return [*super().signature(), self.drop_last, self.max_open_groups]
