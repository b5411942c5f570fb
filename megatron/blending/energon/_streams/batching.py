"""pure. BatchDataset and MixBatchDataset make each output of several, as many each time."""

from collections.abc import Callable, Iterator
from functools import partial
from types import GeneratorType
from typing import Any

from megatron.blending.arguments import check_function, check_no_more, check_whole
from megatron.blending.energon._streams.collecting import (
    BlocksPlan,
    CollectingDataset,
    Group,
    keyed,
)
from megatron.blending.order.proportions import BlendMode
from megatron.blending.streams.choice import BlendDataset
from megatron.blending.streams.items import SPECIAL, MultiOutput, Sample, SkipMarker, generated
from megatron.blending.streams.node import Binding, SavableDataset
from megatron.blending.streams.worker_config import WorkerConfig


class BatchCollector:
    """Fills batches with whatever comes."""

    def __init__(self, batch_size: int, drop_last: bool) -> None:
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._samples: Group = []

    def add(self, sample: Sample) -> Iterator[Group]:
        self._samples.append(sample)
        if len(self._samples) == self._batch_size:
            full, self._samples = self._samples, []
            yield full

    def finish(self) -> Iterator[Group]:
        rest, self._samples = self._samples, []
        if rest and not self._drop_last:
            yield rest

    def held(self) -> Group:
        return self._samples


class BatchDataset(CollectingDataset):
    """Makes a batch of each `batch_size` outputs with `batcher`; the last batch of finite data may
    be smaller.

    A batch is of `batch_size` consecutive outputs. Where some of these are left out, the rest waits
    on the rank for the rest of other batches, and all of them are full. At the end of finite data
    each rank that left some out has one smaller batch, or none with `drop_last`.
    """

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
        self.batch_size = self.num_block = batch_size
        self.drop_last = drop_last
        self.batcher: Any = list if batcher is None else batcher
        self.size = self._num_batches()

    def __len__(self) -> int:
        num_samples = len(self.children[0])
        return (
            num_samples // self.batch_size if self.drop_last else -(-num_samples // self.batch_size)
        )

    def on_bound(self, binding: Binding, is_outermost: bool) -> None:
        super().on_bound(binding, is_outermost)
        self.make = binding.user_function(self.batcher, self, "batcher")
        self.size = self._num_batches()

    def _num_batches(self) -> int | None:
        positions, inner = self.num_positions, self.children[0].size
        return inner // self.block if inner is not None and self.drop_last else positions

    def collector(self, is_of_rank: bool = False) -> BatchCollector:
        return BatchCollector(self.batch_size, self.drop_last)

    def value(self, plan: BlocksPlan, index: int) -> Any:
        # The fast path for a whole batch, as nearly all are: half the time of `items`.
        first, last = plan.child_range(index)
        if last - first != self.batch_size or self.children[0].is_block:
            return super().value(plan, index)
        values = plan.child.values(first, last)
        if not SPECIAL.isdisjoint(map(type, values)):
            return MultiOutput(self.collected(plan.samples(index, values), False))
        entries = partial(plan.child.entries, first, last)
        try:
            made = self.make(values, (int(plan.positions[first]), 0))
        except Exception as error:
            return SkipMarker(self.node_id, self.make.function, error, values, entries)
        if type(made) is not GeneratorType:
            return keyed(made, values)
        several = generated(made, self.make.function, values, self.node_id, entries)
        return MultiOutput(
            one if type(one) is SkipMarker else keyed(one, values) for one in several
        )

    def signature(self) -> list[Any]:
        return [type(self).__name__, self.batch_size, self.drop_last]


class MixBatchDataset(BatchDataset):
    """Mixes outputs of several data sets, in proportion to weights, inside of each batch.

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
