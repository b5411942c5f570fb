"""pure. A ChunkLoader gives a rank its chunks of a stream, from workers. Its state is one number.

Chunk k is a function of k (streams/chunk.py), so the number of chunks that were given is all that
is saved. Rank r of R gives the chunks r, r + R, r + 2 R, ...; worker w of W makes every W-th of
these. Rank 1 of 2 with 2 workers: worker 0 makes the chunks 1 5 9 ..., worker 1 the chunks 3 7 11.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from megatron.blending.loading.messages import END, MakeServer, Message, Start
from megatron.blending.loading.worker_pool import WorkerPool
from megatron.blending.streams.chunk import ChunkDataset
from megatron.blending.streams.failures import Failure, FailureLog
from megatron.blending.streams.node import Binding, PlanBatch
from megatron.blending.streams.worker_config import WorkerConfig

_FIRST_SAMPLES = 2048
_MAX_SAMPLES = 32768
"""Samples planned in one call: few at first, so that the first chunk comes soon, then ever more.
Parquet in random order is decoded once per plan: 8,192 would cost 400 MB of it 38 microseconds per
sample, instead of 14.
"""


class _Begin(NamedTuple):
    next: int
    """Number of the rank's chunks that were given."""


class ChunkLoader(Iterator[list[Any]]):
    """Iterator over a rank's chunks, from its chunk number `num_given` on.

    `start()` starts the workers, else the first chunk does; `close()` stops them.
    """

    def __init__(
        self,
        chunks: ChunkDataset,
        config: WorkerConfig,
        *,
        prefetch_factor: int = 2,
        num_given: int = 0,
    ) -> None:
        self.num_given = num_given
        """Number of the rank's chunks that were given: the state."""
        self._chunks = chunks
        self._config = config
        self._ahead = prefetch_factor
        self._pool: WorkerPool | None = None
        self._begun = num_given

    def start(self) -> None:
        """Starts the workers from this thread. Call it before other threads start: workers are
        forked.
        """
        if self._pool is None:
            self._pool = WorkerPool(self._server_of, self._config, self._ahead, FailureLog())
            self._pool.start(Start(cells=[_Begin(self.num_given)]))
            self._begun = self.num_given

    def hurry(self) -> None:
        """Makes the wait for a worker an error within seconds; it may be called from any thread."""
        if (pool := self._pool) is not None:
            pool.hurry()

    def close(self) -> None:
        """Stops the workers. The next chunk starts them again."""
        if self._pool is not None:
            self._pool.close()
        self._pool = None

    def __next__(self) -> list[Any]:
        self.start()
        assert self._pool is not None
        try:
            # Workers take turns from the chunk at which the pool was started. Started at 4 with 3
            # workers: chunks 4 5 6 7 come from workers 0 1 2 0.
            worker = (self.num_given - self._begun) % len(self._pool)
            message = self._pool.next(worker, 0)
        except BaseException:
            self.close()
            raise
        if message.turn == END:
            raise StopIteration
        self.num_given += 1
        chunk: list[Any] = message.items[0][1]
        return chunk

    def _server_of(self, worker: int) -> MakeServer:
        config = self._config
        part = (worker, max(1, config.num_workers), config.this_rank, config.num_ranks)
        return functools.partial(ChunkServer, self._chunks, config.seed, part)


class ChunkServer:
    """Makes the chunks of a worker."""

    def __init__(
        self,
        chunks: ChunkDataset,
        seed: int,
        part: tuple[int, int, int, int],
        report: Callable[[Failure], None],
    ) -> None:
        """`part`: (worker, number of workers, rank, number of ranks). `report` is not called, as
        failures stand in the chunks.
        """
        self._root = chunks.bind(Binding(seed, part[3]))
        self._part = part

    def start(self, start: Start) -> None:
        self._generation = start.generation
        self._made = self._chunks(start.cells[0].next)

    def next(self, lane: int = 0) -> Message:
        """Makes the next chunk. After the last one every message is END."""
        chunk = next(self._made, None)
        if chunk is None:
            return Message(self._generation, 0, END)
        return Message(self._generation, 0, 0, items=[(0, chunk)])

    def places(self) -> list[str]:
        """Returns nothing: each SkippedSample of a chunk says its own place."""
        return []

    def close(self) -> None:
        """Does nothing, unlike the process that may stand in its place."""

    def _chunks(self, num_given: int) -> Iterator[list[Any]]:
        worker, num_workers, rank, num_ranks = self._part
        step, size = num_ranks * num_workers, self._root.size
        # Rank 1 of 2, worker 0 of 3, 4 given: its chunks are 9, 15, 21, ...
        first, samples = rank + num_ranks * (num_given + worker), _FIRST_SAMPLES
        while True:
            count = max(1, samples // self._root.samples_per_output)
            numbers = first + step * np.arange(count, dtype=np.int64)
            numbers = numbers if size is None else numbers[numbers < size]
            if not len(numbers):
                return
            plan = self._root.plan(numbers, PlanBatch())
            for index in range(len(numbers)):
                yield plan.values(index, index + 1)[0]
            first, samples = first + step * count, min(2 * samples, _MAX_SAMPLES)
