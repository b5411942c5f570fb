"""pure. A ChunkLoader gives a rank its chunks of a stream, from workers. Its state is one number.

Chunk k is a function of k (streams/chunk.py), so nothing is held and nothing else is saved. Rank
r of R gives the chunks r, r + R, r + 2 R, ...; worker w of W makes every W-th of these.
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

_FIRST_SAMPLES = 256
_MAX_SAMPLES = 8192
"""Planned together: few at first, so that the first chunk comes soon."""


class _Begin(NamedTuple):
    next: int
    """Chunks of the rank that were given."""


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
        """The state: of the rank's chunks."""
        self._chunks = chunks
        self._config = config
        self._ahead = prefetch_factor
        self._pool: WorkerPool | None = None
        self._begun = num_given

    def start(self) -> None:
        """Starts the workers: from this thread, before there are others."""
        if self._pool is None:
            self._pool = WorkerPool(self._server_of, self._config, self._ahead, FailureLog())
            self._pool.start(Start(cells=[_Begin(self.num_given)]))
            self._begun = self.num_given

    def hurry(self) -> None:
        """Lets a worker that gives nothing be an error within seconds; called from any thread."""
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
            # Workers take chunks in turns from where the pool was started, so the next one has a
            # known sender.
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
        """`part`: worker, of how many; rank, of how many. Failures stand in the chunks."""
        self._root = chunks.bind(Binding(seed, part[3]))
        self._part = part

    def start(self, start: Start) -> None:
        self._generation = start.generation
        self._made = self._chunks(start.cells[0].next)

    def next(self, lane: int = 0) -> Message:
        """Makes the next chunk. END for ever after the last one."""
        chunk = next(self._made, None)
        if chunk is None:
            return Message(self._generation, 0, END)
        return Message(self._generation, 0, 0, items=[(0, chunk)])

    def places(self) -> list[str]:
        """Returns nothing: samples of chunks have places of their own."""
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
            for place in range(len(numbers)):
                yield plan.values(place, place + 1)[0]
            first, samples = first + step * count, min(2 * samples, _MAX_SAMPLES)
