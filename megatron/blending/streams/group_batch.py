"""pure. GroupBatchDataset makes batches of samples that are alike."""

from collections.abc import Callable, Hashable
from typing import Any

from megatron.blending.arguments import check_function, check_no_more
from megatron.blending.streams.holder import ShardEnd
from megatron.blending.streams.holding import at_of, packed_origins, unpacked_origins
from megatron.blending.streams.node import Binding, SavableDataset, SkipMarker
from megatron.blending.streams.sample_buffer import BufferDataset, BufferState
from megatron.blending.streams.worker_config import WorkerConfig

_ENERGON_ONLY = ("batcher_stateless", "batcher_config", "error_handler", "failure_tolerance")
_ABOUT_HELD = 32
# How many keys are there is not known before: half-filled batches of eight, say.
_ABOUT_OPEN = 4


class GroupBatchHolder(BufferState):
    """It holds, by key, (origin, value) of open batches; a state has the origins, values are made
    again.
    """

    node: "GroupBatchDataset"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._groups: dict[Hashable, list[tuple[Any, Any]]] = {}

    def gather(self) -> tuple[list[Any], list[Any]]:
        self.remake()
        while True:
            try:
                origin, value = self.draw()
            except ShardEnd:
                if not self._groups or self.node.drop_last:
                    raise
                key = next(iter(self._groups))
                break
            try:
                key, size = self.node.key_of(value, at_of(origin))
                size = size or self.node.fixed_batch_size
                if size is None:
                    raise ValueError(
                        "batch_group_criterion gives no batch size, and no batch_size was asked for"
                    )
            except Exception as error:
                self.leave_out(
                    SkipMarker(self.node.number, self.node.sample_group_key, error, value), origin
                )
                continue
            group = self._groups.setdefault(key, [])
            group.append((origin, value))
            if len(group) >= size:
                break
        group = self._groups.pop(key)
        return [origin for origin, _ in group], [value for _, value in group]

    def packed(self) -> object:
        return packed_origins(origin for group in self._groups.values() for origin, _ in group)

    def unpack(self, held: Any) -> None:
        for origin in unpacked_origins(held):
            for value in self.try_again(origin):
                self._groups.setdefault(self.node.key_of(value, at_of(origin))[0], []).append(
                    (origin, value)
                )


class GroupBatchDataset(BufferDataset):
    """It makes batches of equal keys: `sample_group_key(sample)` is (key, batch size or None for
    the fixed one).

    A key's samples are held back until they fill a batch; at the end of finite data the rest makes
    smaller ones.
    """

    holder = GroupBatchHolder

    def __init__(
        self,
        dataset: SavableDataset[Any],
        fixed_batch_size: int | None = None,
        sample_group_key: Callable[[Any], tuple[Hashable, int | None]] | None = None,
        batcher: Callable[[list[Any]], Any] | None = None,
        *,
        drop_last: bool = False,
        worker_config: WorkerConfig | None = None,
        **ignored: object,
    ) -> None:
        check_no_more("GroupBatchDataset", ignored, _ENERGON_ONLY)
        super().__init__(dataset, fixed_batch_size or _ABOUT_HELD, worker_config)
        check_function("GroupBatchDataset: sample_group_key", sample_group_key)
        self.sample_group_key: Any = sample_group_key
        self.batcher: Any = list if batcher is None else batcher
        self.fixed_batch_size = fixed_batch_size
        self.drop_last = drop_last

    @property
    def num_buffered(self) -> int:
        return _ABOUT_OPEN * self.num_held

    def on_bound(self, binding: Binding, is_outermost: bool) -> None:
        super().on_bound(binding, is_outermost)
        self.make = binding.user_function(self.batcher, self, "batcher")
        self.key_of = binding.user_function(self.sample_group_key, self, "key")

    def signature(self) -> list[Any]:
        return [*super().signature(), self.drop_last]
