"""pure. A source of records as a node: which record is read when, and the reading."""

from collections.abc import Callable
from itertools import repeat
from typing import Any

import numpy as np

from megatron.blending.formats.record import Record, RecordError, RecordSource
from megatron.blending.order.reading import ReadingOrder, records_at
from megatron.blending.streams.dataset import Binding, Block, Ints, NotPlain, SavableDataset
from megatron.blending.streams.lane import CursorNode, Place

Load = Callable[[Record, tuple[str, int, int]], Any]


class LeafDataset(SavableDataset[Any]):
    """The records of a source, each once per pass, in an order of its own that changes from pass to pass.

    About 0.5 microseconds per record over reading and `load`.
    """

    def __init__(
        self,
        source: RecordSource,
        *,
        load: Load | None = None,
        shuffle: bool = True,
        multiplier: int | None = 1,
        slice_length: int | None = None,
        shuffle_window: int | None = 0,
        name: str = "",
        worker_config: Any = None,
    ) -> None:
        """`load(record, key)` makes a sample of a record; key is (place in the tree, position in the stream, record).
        If it has a method `many(records, keys)`, that makes several.

        `multiplier`: a pass reads each record so often; -1: reads are drawn with replacement; None: as shuffle=False.
        `slice_length`: so many consecutive records are read near one another, mixed within about `shuffle_window`.
        `name`: stands in states and errors; by it a changed blend is recognised.
        """
        label = name or "source"
        if len(source) == 0:
            raise ValueError(f"{label}: has no records; leave it out of the data")
        if multiplier is not None and multiplier != -1 and multiplier < 1:
            raise ValueError(f"{label}: multiplier must be at least 1, or -1 or None, but is {multiplier}")
        if slice_length is not None and slice_length < 1:
            raise ValueError(f"{label}: slice_length must be at least 1 or None, but is {slice_length}")
        self.source = source
        self.load = load
        self.name = name
        self.worker_config = worker_config
        self.order = ReadingOrder(
            num_records=len(source),
            seed=0,
            shuffle=shuffle and multiplier is not None,
            num_turns=1 if multiplier is None else multiplier,
            slice_length=slice_length or 1,
            window_length=shuffle_window or 1,
        )
        self.size = self.order.epoch_length
        self.salt = ""
        self.base = 0
        self._fingerprint: str | None = None

    def __len__(self) -> int:
        return self.order.epoch_length

    def on_bound(self, binding: Binding, is_outermost: bool) -> None:
        self.order = self.order._replace(seed=binding.seed_at(self.place))
        self.salt = binding.salts.get(self.place, self.place)
        self.base = binding.bases.get(self.place, 0)

    def plan(self, positions: Ints, block: Block) -> "LeafPlan":
        return LeafPlan(self, positions + self.base if self.base else positions, block)

    def in_lane(self, lane: Any, parent: Any, child_number: int) -> "LeafLane":
        return LeafLane(self, lane, parent, child_number)

    def rebuild(self, origin: Any) -> Any:
        return self.read_one(origin[1], self._record(origin[1]))

    def read_one(self, position: int, record: int) -> Any:
        found = self.source[record]
        return found if self.load is None else self.load(found, (self.place, position, record))

    def describe(self, position: int) -> str:
        return self.source.describe(self._record(position))

    def _record(self, position: int) -> int:
        return int(records_at([self.order], [np.array([position], np.int64)])[0][0])

    def fingerprint(self) -> str:
        if self._fingerprint is None:
            self._fingerprint = self.source.fingerprint()
        return self._fingerprint

    def signature(self) -> list[Any]:
        return [type(self).__name__, *self.order[2:]]


class LeafPlan:
    """Positions in the endless stream of a leaf, and the records that stand there."""

    def __init__(self, leaf: LeafDataset, positions: Ints, block: Block) -> None:
        self.length = len(positions)
        self.order = leaf.order
        self.positions = positions
        self._leaf = leaf
        self._block = block
        self._records: Any = None
        self._lists: tuple[list[int], list[int]] | None = None
        self._at = 0
        block.add(self)

    def settle(self, records: Ints) -> None:
        self._records = records

    def record(self, at: int) -> int:
        if self._records is None:
            self._block.settle()
        return int(self._records[at])

    def seek(self, offset: int) -> None:
        self._at = offset

    def take(self, count: int) -> list[Any]:
        if self._lists is None:
            self.record(0)
            self._lists = self.positions.tolist(), self._records.tolist()
        start, end = self._at, self._at + count
        self._at = end
        numbers = self._lists[1][start:end]
        records = self._leaf.source.read(numbers)
        if RecordError in map(type, records):
            raise NotPlain
        load, place = self._leaf.load, self._leaf.place
        if load is None:
            return records
        keys = zip(repeat(place), self._lists[0][start:end], numbers)
        many = getattr(load, "many", None)
        if many is not None:
            return many(records, keys)
        return [load(record, key) for record, key in zip(records, keys)]  # type: ignore[arg-type]

    def child(self, number: int) -> None:
        return None

    def sources(self, start: int, end: int) -> set[int]:
        return {self._leaf.number}


class LeafLane(CursorNode):
    node: LeafDataset

    def pull(self, place: Place | None) -> tuple[Any, Any]:
        while True:
            plan, block, within = self.locate(place)
            position, record = int(plan.positions[within]), plan.record(within)
            try:
                value = self.node.read_one(position, record)
            except Exception as error:
                self.passed_over(block, within)
                self.fail(error, self.node.load or self.node.source, (self.node.number, position), None)
            else:
                self.passed(block, within)
                return (self.node.number, position), value
