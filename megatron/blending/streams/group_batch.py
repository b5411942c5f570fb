"""pure. Batches of samples that are alike: GroupBatchDataset."""

from collections.abc import Callable, Hashable
from typing import Any

from megatron.blending.streams.holding import HoldingDataset, HoldingLane
from megatron.blending.streams.lane import LaneEnd, Place
from megatron.blending.streams.mapping import check_function, check_no_more
from megatron.blending.streams.origins import columns_of, origin_tag, origins_of

_ABOUT_HELD = 32
# How many keys are there is not known before: half-filled batches of eight, say.
_ABOUT_OPEN = 4


class GroupBatchDataset(HoldingDataset):
    """Batches whose samples have equal keys: `sample_group_key(sample)` is (key, batch size or None for the fixed one).

    A key's samples are held back until they fill a batch; at the end of finite data the rest makes smaller ones.
    """

    def __init__(
        self,
        dataset: Any,
        sample_group_key: Callable[[Any], tuple[Hashable, int | None]],
        batcher: Callable[[list[Any]], Any] | None = None,
        *,
        fixed_batch_size: int | None = None,
        drop_last: bool = False,
        worker_config: Any = None,
        **ignored: Any,
    ) -> None:
        check_no_more("GroupBatchDataset", ignored, ("batcher_stateless", "batcher_config", "error_handler"))
        super().__init__(dataset, fixed_batch_size or _ABOUT_HELD, worker_config)
        check_function("GroupBatchDataset", "sample_group_key", sample_group_key)
        self.sample_group_key: Any = sample_group_key
        self.batcher: Any = list if batcher is None else batcher
        self.fixed_batch_size = fixed_batch_size
        self.drop_last = drop_last

    @property
    def num_under_way(self) -> int:
        return _ABOUT_OPEN * self.num_held

    def in_lane(self, lane: Any, parent: Any, child_number: int) -> "GroupBatchLane":
        return GroupBatchLane(self, lane, parent, child_number)

    def rebuild(self, origin: Any) -> Any:
        return self.batcher([self.children[0].rebuild(part) for part in origin[1]])

    def signature(self) -> list[Any]:
        return [*super().signature(), self.drop_last]


class GroupBatchLane(HoldingLane):
    """`_groups`: by key, (origin, value) of those held back; a state has the origins, values are made again."""

    node: GroupBatchDataset

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._groups: dict[Hashable, list[tuple[Any, Any]]] = {}
        self._saved: Any = None

    def pull(self, place: Place | None) -> tuple[Any, Any]:
        for origin in origins_of(self._saved[1]) if self._saved else ():
            for value in self.rebuild(origin):
                self._groups.setdefault(self.node.sample_group_key(value)[0], []).append((origin, value))
        self._saved = None
        while True:
            origins, values = [list(part) for part in zip(*self._next_group(place))]
            try:
                return [origin_tag(self.node), origins, 0], self.node.batcher(values)
            except Exception as error:
                self.fail(error, self.node.batcher, origins[0], values[0])

    def _next_group(self, place: Place | None) -> list[tuple[Any, Any]]:
        while True:
            try:
                origin, value = self.draw(place)
            except LaneEnd:
                if not self._groups or self.node.drop_last:
                    raise
                return self._groups.pop(next(iter(self._groups)))
            try:
                key, size = self.node.sample_group_key(value)
                size = size or self.node.fixed_batch_size
                if size is None:
                    raise ValueError("batch_group_criterion gives no batch size, and no batch_size was asked for")
            except Exception as error:
                self.fail(error, self.node.sample_group_key, origin, value)
                continue
            group = self._groups.setdefault(key, [])
            group.append((origin, value))
            if len(group) >= size:
                return self._groups.pop(key)

    def held(self) -> Any:
        if self._saved is not None:
            return self._saved
        if not self.is_started:
            return None
        return [self.num_drawn, columns_of(origin for group in self._groups.values() for origin, _ in group)]

    def restore(self, held: Any) -> None:
        self.is_started = True
        self.num_drawn = held[0]
        self._saved = held
