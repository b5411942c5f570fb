"""pure. A WindowLoader gives a rank its windows of a stream, from workers. Its state is one number.

Window k is a function of k (streams/window.py), so nothing is held and nothing else is saved. Rank
r of R gives the windows r, r + R, r + 2 R, ...; worker w of W makes every W-th of these.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from megatron.blending.loading.messages import END, MakeServer, Message, Start
from megatron.blending.loading.worker_pool import WorkerPool
from megatron.blending.streams.failures import Failure, FailureLog
from megatron.blending.streams.node import Binding, Block
from megatron.blending.streams.window import WindowDataset
from megatron.blending.streams.worker_config import WorkerConfig

_FIRST_SAMPLES = 256
_MAX_SAMPLES = 8192
"""Planned together: few at first, so that the first window comes soon."""


class _Begin(NamedTuple):
    next: int
    """Windows of the rank that were given."""


class WindowLoader(Iterator[list[Any]]):
    """Iterator over a rank's windows, from its window number `num_given` on.

    `start()` starts the workers, else the first window does; `close()` stops them.
    """

    def __init__(
        self,
        windows: WindowDataset,
        config: WorkerConfig,
        *,
        prefetch_factor: int = 2,
        num_given: int = 0,
    ) -> None:
        self.num_given = num_given
        """The state: of the rank's windows."""
        self._windows = windows
        self._config = config
        self._ahead = prefetch_factor
        self._pool: WorkerPool | None = None
        self._begun = num_given

    def start(self) -> None:
        """Start the workers: from this thread, before there are others."""
        if self._pool is None:
            self._pool = WorkerPool(self._server_of, self._config, self._ahead, FailureLog())
            self._pool.start(Start(cells=[_Begin(self.num_given)]))
            self._begun = self.num_given

    def hurry(self) -> None:
        """Let a worker that gives nothing be an error within seconds; called from any thread."""
        if (pool := self._pool) is not None:
            pool.hurry()

    def close(self) -> None:
        """Stop the workers. The next window starts them again."""
        if self._pool is not None:
            self._pool.close()
        self._pool = None

    def __next__(self) -> list[Any]:
        self.start()
        assert self._pool is not None
        try:
            # Workers take windows in turns from where the pool was started, so the next one has a
            # known sender.
            worker = (self.num_given - self._begun) % len(self._pool)
            message = self._pool.next(worker, 0)
        except BaseException:
            self.close()
            raise
        if message.turn == END:
            raise StopIteration
        self.num_given += 1
        window: list[Any] = message.items[0][1]
        return window

    def _server_of(self, worker: int) -> MakeServer:
        config = self._config
        part = (worker, max(1, config.num_workers), config.this_rank, config.num_ranks)
        return functools.partial(WindowServer, self._windows, config.seed, part)


class WindowServer:
    """Makes the windows of a worker."""

    def __init__(
        self,
        windows: WindowDataset,
        seed: int,
        part: tuple[int, int, int, int],
        report: Callable[[Failure], None],
    ) -> None:
        """`part`: worker, of how many; rank, of how many. Failures stand in the windows."""
        self._root = windows.bind(Binding(seed, part[3]))
        self._part = part

    def start(self, start: Start) -> None:
        self._generation = start.generation
        self._made = self._windows(start.cells[0].next)

    def next(self, lane: int = 0) -> Message:
        """Make the next window. END for ever after the last one."""
        window = next(self._made, None)
        if window is None:
            return Message(self._generation, 0, END)
        return Message(self._generation, 0, 0, items=[(0, window)])

    def places(self) -> list[str]:
        """Returns nothing: samples of windows have places of their own."""
        return []

    def close(self) -> None:
        """Do nothing, unlike the process that may stand in its place."""

    def _windows(self, num_given: int) -> Iterator[list[Any]]:
        worker, num_workers, rank, num_ranks = self._part
        step, size = num_ranks * num_workers, self._root.size
        # Rank 1 of 2, worker 0 of 3, 4 given: its windows are 9, 15, 21, ...
        first, samples = rank + num_ranks * (num_given + worker), _FIRST_SAMPLES
        while True:
            count = max(1, samples // self._root.samples_per_output)
            numbers = first + step * np.arange(count, dtype=np.int64)
            numbers = numbers if size is None else numbers[numbers < size]
            if not len(numbers):
                return
            plan = self._root.plan(numbers, Block())
            for place in range(len(numbers)):
                yield plan.values(place, place + 1)[0]
            first, samples = first + step * count, min(2 * samples, _MAX_SAMPLES)
