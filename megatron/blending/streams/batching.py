"""pure. BatchDataset and MixBatchDataset make each output of several, as many each time."""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np

from megatron.blending.arguments import check_function, check_no_more, check_whole
from megatron.blending.order.proportions import BlendMode
from megatron.blending.streams.choice import BlendDataset
from megatron.blending.streams.holder import Holder, ShardEnd
from megatron.blending.streams.holding import BufferedDataset, HoldingPlan
from megatron.blending.streams.node import Binding, Block, Ints, SavableDataset
from megatron.blending.streams.worker_config import WorkerConfig


class BatchHolder(Holder):
    """It makes batches of whichever samples come next."""

    node: "BatchDataset"

    def gather(self) -> tuple[list[Any], list[Any]]:
        found: list[tuple[Any, Any]] = []
        try:
            while len(found) < self.node.batch_size:
                found.append(self.draw())
        except ShardEnd:
            if not found or self.node.drop_last:
                raise
        return [origin for origin, _ in found], [value for _, value in found]


class BatchDataset(BufferedDataset):
    """`batcher` makes one of each `batch_size` consecutive outputs; the last batch of finite data
    may be smaller.

    Where a sample is left out, the next one of the shard takes its place; so at the end of finite
    data each shard that left some out ends with a batch that is smaller, or dropped with
    `drop_last`.
    """

    holder = BatchHolder

    def __init__(
        self,
        dataset: SavableDataset[Any],
        batch_size: int,
        batcher: Callable[[list[Any]], Any] | None = None,
        *,
        drop_last: bool = False,
        worker_config: WorkerConfig | None = None,
        **ignored: object,
    ) -> None:
        """`batcher`: None gives the list. It may raise SkipSample, and give several batches by
        being a generator.
        """
        kind = type(self).__name__
        super().__init__(dataset, worker_config)
        check_no_more(
            kind,
            ignored,
            ("batcher_stateless", "batcher_config", "error_handler", "failure_tolerance"),
        )
        check_whole(f"{kind}: batch_size", batch_size)
        if batcher is not None:
            check_function(f"{kind}: batcher", batcher)
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.batcher: Any = list if batcher is None else batcher
        self.size = self._num_batches()

    def __len__(self) -> int:
        num_samples = len(self.children[0])
        return (
            num_samples // self.batch_size if self.drop_last else -(-num_samples // self.batch_size)
        )

    @cached_property
    def samples_per_output(self) -> int:
        return self.batch_size * self.children[0].samples_per_output

    def on_bound(self, binding: Binding, is_outermost: bool) -> None:
        self.make = binding.user_function(self.batcher, self, "batcher")
        self.size = self._num_batches()

    def _num_batches(self) -> int | None:
        size = self.children[0].size
        if size is None:
            return None
        return size // self.batch_size if self.drop_last else -(-size // self.batch_size)

    def plan(self, positions: Ints, block: Block) -> HoldingPlan:
        inner = self.children[0].size
        starts, sizes = positions * self.batch_size, np.full_like(positions, self.batch_size)
        if inner is not None and self.size is not None:
            passes, places = np.divmod(positions, max(self.size, 1))
            starts = passes * inner + places * self.batch_size
            sizes = np.clip(inner - places * self.batch_size, 0, self.batch_size)
        return HoldingPlan(self, starts, sizes, block)

    def used(self, position: int, drawn: dict[int, int]) -> list[int]:
        inner = self.children[0].size
        if inner is None or not self.size:
            return [position * self.batch_size]
        passes, place = divmod(position, self.size)
        return [passes * inner + min(place * self.batch_size, inner)]

    def signature(self) -> list[Any]:
        return [type(self).__name__, self.batch_size, self.drop_last]


class MixBatchDataset(BatchDataset):
    """It mixes outputs of several data sets, in proportion to weights, inside of each batch.

    `MixBatchDataset((a, 6), (b, 4), batch_size=32, batch_mix_fn=homogeneous_concat_mix)`, also with
    one tuple of pairs. `batch_mix_fn(list of outputs)` makes the batch: the list itself by default;
    see `concat_pad` for writing one.
    """

    def __init__(
        self,
        *dataset_weights: object,
        batch_size: int,
        batch_mix_fn: Callable[[list[Any]], Any] | None = None,
        mode: BlendMode = "exact",
        drop_last: bool = False,
        worker_config: WorkerConfig | None = None,
    ) -> None:
        blend = BlendDataset(*dataset_weights, mode=mode, worker_config=worker_config)
        super().__init__(
            blend, batch_size, batch_mix_fn, drop_last=drop_last, worker_config=worker_config
        )
