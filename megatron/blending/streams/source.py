"""pure. A SourceDataset is a source of records as a node: it decides which record stands at each
position, and reads it.
"""

from collections.abc import Callable
from functools import partial
from itertools import repeat
from typing import Any

import numpy as np

from megatron.blending.arguments import check_whole
from megatron.blending.formats.record import (
    ReadRecords,
    Record,
    RecordError,
    RecordSource,
    planned_read,
    read_records,
)
from megatron.blending.order.reading import ReadingOrder, records_at
from megatron.blending.streams.items import SkipMarker, failed
from megatron.blending.streams.node import (
    Binding,
    Ints,
    PlanBatch,
    SavableDataset,
)
from megatron.blending.streams.seeding import UserFunction
from megatron.blending.streams.worker_config import WorkerConfig

Load = Callable[[Record, tuple[str, int, int]], Any]


class SourceDataset(SavableDataset[Any]):
    """Gives the records of a source, each once per pass, in an order of its own that changes from
    pass to pass.

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
        worker_config: WorkerConfig | None = None,
    ) -> None:
        """`load(record, key)` makes a sample of a record. Its key is (tree path of the source,
        position in its stream, number of the record). A `load` with a method `many(records, keys)`
        makes several at once; that returns an exception in the place of each sample that fails.

        `multiplier`: so many passes together read each record that often; -1: records are drawn
        with replacement; None: as shuffle=False. `slice_length`: so many consecutive records are
        read near one another, mixed within about `shuffle_window`. `name`: names the source in
        states and errors; a resumed blend that has changed finds its sources by name.
        """
        label = name or "source"
        if len(source) == 0:
            raise ValueError(f"{label}: has no records; leave it out of the data")
        if multiplier is not None and multiplier != -1 and multiplier < 1:
            raise ValueError(
                f"{label}: multiplier must be at least 1, or -1 or None, but is {multiplier}"
            )
        check_whole(f"{label}: slice_length", slice_length, may_be_none=True)
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
        self.size = len(source)
        self.user_load = UserFunction(read_records)
        self.seed_path = ""
        self.start_position = 0
        self._fingerprint: str | None = None

    def __len__(self) -> int:
        return len(self.source)

    def on_bound(self, binding: Binding, is_outermost: bool) -> None:
        # The order depends on the tree path, so sources of equal length are not read in lockstep.
        self.order = self.order._replace(seed=binding.seed_at(self.tree_path))
        self.seed_path = binding.seed_paths.get(self.tree_path, self.tree_path)
        self.start_position = binding.start_positions.get(self.tree_path, 0)
        if self.load is not None:
            self.user_load = binding.user_function(self.load, self, "load")

    def plan(self, positions: Ints, plan_batch: PlanBatch) -> "SourcePlan":
        # A source that had given 100 records to another blend: positions 0 1 2 -> 100 101 102.
        start = self.start_position
        return SourcePlan(self, positions + start if start else positions, plan_batch)

    def describe(self, position: int) -> str:
        return self.source.describe(
            int(records_at([self.order], [np.array([position], np.int64)])[0][0])
        )

    def fingerprint(self) -> str:
        if self._fingerprint is None:
            self._fingerprint = self.source.fingerprint()
        return self._fingerprint

    def signature(self) -> list[Any]:
        return [type(self).__name__, *self.order[2:]]


class SourcePlan:
    """Plan of positions in the endless stream of a source.

    The records that stand at them are computed when the first is read, for all sources of the
    PlanBatch in one call: a call costs about 200 microseconds, a record 0.2.
    """

    def __init__(self, node: SourceDataset, positions: Ints, plan_batch: PlanBatch) -> None:
        self.length = len(positions)
        self.order = node.order
        self.positions = positions
        self._node = node
        self._plan_batch = plan_batch
        self._records: Any = None
        self._lists: tuple[list[int], list[int]] | None = None
        self._read: ReadRecords | None = None
        plan_batch.add(self)

    def set_records(self, records: Ints) -> None:
        self._records = records

    def record(self, index: int) -> int:
        """Returns the number of the record at an index of the plan."""
        if self._records is None:
            self._plan_batch.resolve_records()
        return int(self._records[index])

    def values(self, start: int, end: int) -> list[Any]:
        if self._lists is None:
            self.record(0)
            self._lists = self.positions.tolist(), self._records.tolist()
            self._read = planned_read(self._node.source, self._lists[1])
        node = self._node
        numbers = self._lists[1][start:end]
        records = read_records(node.source, numbers, self._read)
        is_whole = RecordError not in map(type, records)
        if node.load is None and is_whole:
            return records
        keys = list(zip(repeat(node.tree_path), self._lists[0][start:end], numbers))
        many = None if node.user_load.is_seeded else getattr(node.load, "many", None)
        if many is not None and is_whole:
            # An exception stands in the list for each sample that failed.
            made = many(records, keys)
            for number, sample in enumerate(made):
                if isinstance(sample, Exception):
                    made[number] = self._skipped(sample, start + number)
            return made
        return [
            self._loaded(record, key, index)
            for index, (record, key) in enumerate(zip(records, keys), start)
        ]

    def _loaded(self, record: Record | RecordError, key: tuple[str, int, int], index: int) -> Any:
        node = self._node
        if isinstance(record, RecordError):
            return self._skipped(record, index)
        try:
            return record if node.load is None else node.user_load(record, key, key)
        except Exception as error:
            return self._skipped(error, index)

    def _skipped(self, error: Exception, index: int) -> SkipMarker:
        node, entries = self._node, partial(self.entries, index, index + 1)
        return failed(node.node_id, node.load or node.source, error, None, entries)

    def entries(self, start: int, end: int) -> list[tuple[Any, int]]:
        return [(self._node, int(position)) for position in self.positions[start:end]]
