"""pure. Nodes whose outputs are made of several, as many each time: BatchDataset, MixBatchDataset."""

from collections.abc import Callable
from functools import cached_property
from types import GeneratorType
from typing import Any

import numpy as np

from megatron.blending.streams.arguments import check_count, check_datasets
from megatron.blending.streams.choice import BlendDataset
from megatron.blending.streams.dataset import Binding, Block, Ints, NotPlain, Plan, SavableDataset
from megatron.blending.streams.lane import LaneEnd, LaneNode, Place
from megatron.blending.streams.mapping import check_function, check_no_more, nth
from megatron.blending.streams.origins import origin_tag


class BatchDataset(SavableDataset[Any]):
    """`batcher` of each `batch_size` consecutive outputs; the last batch of finite data may be smaller.

    Where a sample is left out, the next one of the lane takes its place; so at the end of finite data each lane that
    left some out ends with a batch that is smaller, or dropped with `drop_last`.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        batcher: Callable[[list[Any]], Any] | None = None,
        *,
        drop_last: bool = False,
        worker_config: Any = None,
        **ignored: Any,
    ) -> None:
        """`batcher`: None gives the list. It may raise SkipSample, and give several batches by being a generator."""
        kind = type(self).__name__
        check_datasets(kind, [dataset])
        check_no_more(kind, ignored, ("batcher_stateless", "batcher_config", "error_handler", "failure_tolerance"))
        check_count(kind, "batch_size", batch_size)
        if batcher is not None:
            check_function(kind, "batcher", batcher)
        self.children = (dataset,)
        self.worker_config = worker_config
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.batcher: Any = list if batcher is None else batcher
        self.size = self._num_batches()

    def __len__(self) -> int:
        num_samples = len(self.children[0])
        return num_samples // self.batch_size if self.drop_last else -(-num_samples // self.batch_size)

    @cached_property
    def samples_per_output(self) -> int:
        return self.batch_size * self.children[0].samples_per_output

    def on_bound(self, binding: Binding, is_outermost: bool) -> None:
        self.size = self._num_batches()

    def _num_batches(self) -> int | None:
        size = self.children[0].size
        if size is None:
            return None
        return size // self.batch_size if self.drop_last else -(-size // self.batch_size)

    def plan(self, positions: Ints, block: Block) -> "BatchPlan":
        return BatchPlan(self, positions, block)

    def in_lane(self, lane: Any, parent: Any, child_number: int) -> "BatchLane":
        return BatchLane(self, lane, parent, child_number)

    def used(self, position: int, drawn: dict[int, int]) -> list[int]:
        inner = self.children[0].size
        if inner is None or not self.size:
            return [position * self.batch_size]
        passes, place = divmod(position, self.size)
        return [passes * inner + min(place * self.batch_size, inner)]

    def rebuild(self, origin: Any) -> Any:
        below = self.children[0]
        return nth(self.batcher([below.rebuild(part) for part in origin[1]]), origin[2])

    def signature(self) -> list[Any]:
        return [type(self).__name__, self.batch_size, self.drop_last]


class MixBatchDataset(BatchDataset):
    """Outputs of several data sets in proportion to weights, mixed inside of each batch.

    `MixBatchDataset((a, 6), (b, 4), batch_size=32, batch_mix_fn=homogeneous_concat_mix)`, also with one tuple of pairs.
    `batch_mix_fn(list of outputs)` makes the batch: the list itself by default; see `concat_pad` for writing one.
    """

    def __init__(
        self,
        *dataset_weights: Any,
        batch_size: int,
        batch_mix_fn: Callable[[list[Any]], Any] | None = None,
        mode: str = "exact",
        drop_last: bool = False,
        worker_config: Any = None,
    ) -> None:
        blend = BlendDataset(*dataset_weights, mode=mode, worker_config=worker_config)
        super().__init__(blend, batch_size, batch_mix_fn, drop_last=drop_last, worker_config=worker_config)


class BatchPlan:
    def __init__(self, node: BatchDataset, positions: Ints, block: Block) -> None:
        self.length = len(positions)
        self._batcher = node.batcher
        size, inner = node.batch_size, node.children[0].size
        if inner is None or node.size is None:
            starts, sizes = positions * size, np.full(len(positions), size)
        elif node.size == 0:
            starts, sizes = np.zeros_like(positions), np.zeros_like(positions)
        else:
            passes, places = np.divmod(positions, node.size)
            starts = passes * inner + places * size
            sizes = np.minimum(size, inner - places * size)
        each = starts[:, None] + np.arange(size)
        within = each.ravel() if inner is None else each[np.arange(size) < sizes[:, None]]
        self._child = node.children[0].plan(within.astype(np.int64), block)
        self._sizes = sizes.tolist()
        self._ends = np.cumsum(sizes).tolist()
        self._at = 0

    def seek(self, offset: int) -> None:
        self._at = offset
        self._child.seek(self._ends[offset - 1] if offset else 0)

    def take(self, count: int) -> list[Any]:
        sizes = self._sizes[self._at : self._at + count]
        self._at += count
        batches = [self._batcher(self._child.take(size)) for size in sizes]
        if GeneratorType in map(type, batches):
            raise NotPlain
        return batches

    def child(self, number: int) -> Plan:
        return self._child

    def sources(self, start: int, end: int) -> set[int]:
        return self._child.sources(self.span(start)[0], self.span(end - 1)[1])

    def span(self, place: int) -> tuple[int, int]:
        """Where in the child's plan a batch starts and ends."""
        return self._ends[place] - self._sizes[place], self._ends[place]


class BatchLane(LaneNode):
    node: BatchDataset
    _origins: Any = None
    _batches: Any = None
    _given = 0
    """Of what a generator gives, while it does: what it was made from, the rest of it, how many were given."""

    def pull(self, place: Place | None) -> tuple[Any, Any]:
        batcher, tag = self.node.batcher, origin_tag(self.node)
        while True:
            if self._origins is not None:
                if (found := self._next_of_several()) is not None:
                    return found
                place = None
            origins, values = self._gather(place)
            try:
                batch = batcher(values)
            except Exception as error:
                self.fail(error, batcher, origins[0], values[0])
                self.detach()
                place = None
                continue
            if type(batch) is not GeneratorType:
                return [tag, origins, 0], batch
            self.detach()
            self._origins, self._batches, self._given = origins, batch, 0

    def _gather(self, place: Place | None) -> tuple[list[Any], list[Any]]:
        child, size = self.child(0), self.node.batch_size
        origins, values = [], []
        start = end = 0
        if place is not None:
            plan: Any = self.plan(place[0])
            start, end = plan.span(place[1])
        for number in range(size):
            is_planned = place is not None and start + number < end
            if not is_planned and not child.is_detached():
                break
            try:
                origin, value = child.pull((place[0], start + number) if is_planned and place is not None else None)
            except LaneEnd:
                break
            origins.append(origin)
            values.append(value)
        if not values or (len(values) < size and self.node.drop_last):
            raise LaneEnd
        return origins, values

    def _next_of_several(self) -> tuple[Any, Any] | None:
        origins = self._origins
        try:
            if self._batches is None:
                below = self.node.children[0]
                self._batches = iter(self.node.batcher([below.rebuild(origin) for origin in origins]))
                for _ in range(self._given):
                    next(self._batches, None)
            batch = next(self._batches)
        except StopIteration:
            self._origins = self._batches = None
            return None
        except Exception as error:
            self._origins = self._batches = None
            self.fail(error, self.node.batcher, origins[0], None)
            return None
        self._given += 1
        return [origin_tag(self.node), origins, self._given - 1], batch

    def held(self) -> Any:
        return None if self._origins is None else [self._origins, self._given]

    def restore(self, held: Any) -> None:
        self._origins, self._given = held
