"""tensor. Prepares the values that steps take ahead of them, in a thread of its own.

Preparing may exchange data with other ranks, over process groups that nothing else uses while the
thread works. The collectives pair up because all ranks prepare the same number of values in one
order, whatever their pace: the number that may be prepared depends only on the number asked for,
which is equal on all ranks wherever they stop or pause.

    asked for    0   1   2   2         3          3
                   next next settle() next     close()
    prepared     0  ..3 ..4   4       ..5         5       with ahead = 2
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from megatron.packing.device import CPU, Device

T = TypeVar("T")


class Prefetcher(Iterator[T], Generic[T]):
    """Iterator over the results of `prepare`; up to `ahead` calls are made before they are asked
    for.

    An exception of a call (StopIteration at the end of data included) is raised by the `next` that
    it belongs to, and by all later ones; nothing is prepared after it. The thread starts at the
    first `next`. With `ahead` 0 there is none.
    """

    def __init__(
        self,
        prepare: Callable[[], T],
        ahead: int,
        limit: int | None = None,
        *,
        size_of: Callable[[T], int] | None = None,
        max_waiting: int = 0,
        device: Device = CPU,
    ) -> None:
        """Takes the function.

        Args:
            ahead: calls before their `next`.
            limit: `next` calls at most; no more is prepared.
            size_of: bytes of a value, the same on all ranks. Another value is prepared ahead only
                while those that wait have at most `max_waiting` of them.
            device: the one that `prepare` works for.
        """
        if ahead < 0:
            raise ValueError(f"--prefetch-global-batches must be at least 0, but is {ahead}")
        self.seconds_waited = 0.0
        """Duration of the last `next`."""
        self._prepare = prepare
        self._ahead = ahead
        self._limit = limit
        self._size_of, self._max_waiting = size_of, max_waiting
        self._sizes: deque[int] = deque()
        """Bytes of the values prepared for calls of `next` that were not made yet."""
        self._changed = threading.Condition()
        self._ready: deque[T] = deque()
        self._failure: BaseException | None = None
        self._num_asked = self._num_prepared = 0
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._enter_device = device.entry()

    def __next__(self) -> T:
        start = time.perf_counter()
        try:
            return self._next() if self._ahead else self._prepare()
        finally:
            self.seconds_waited = time.perf_counter() - start

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the values that wait, by `size_of`."""
        with self._changed:  # which a thread may hold already
            return sum(self._sizes)

    def settle(self) -> None:
        """Waits until the thread is idle. It stays idle until the next `next`, so its groups may be
        used meanwhile.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._thread is None or self._is_idle())

    def close(self, timeout_seconds: float | None = None) -> bool:
        """Ends the thread, once it has prepared as many values as on other ranks.

        Args:
            timeout_seconds: for an error that other ranks may not know of, when they may never
                prepare theirs. The thread is then left behind, and ends with the process.

        Returns:
            True if it has ended.
        """
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_seconds)
        return self._thread is None or not self._thread.is_alive()

    def _next(self) -> T:
        if self._is_closed:
            raise RuntimeError("the prefetcher was closed")
        with self._changed:
            self._num_asked += 1
            if self._sizes:
                self._sizes.popleft()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="prefetch of global batches", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._ready or self._failure is not None)
            if self._ready:
                return self._ready.popleft()
        assert self._failure is not None
        raise self._failure

    def _is_idle(self) -> bool:
        # The number permitted depends on the number asked for alone, so that ranks of different
        # pace prepare equally many values, and their collectives pair up.
        permitted = self._num_asked + self._ahead
        if self._limit is not None:
            permitted = min(permitted, self._limit)
        # Sizes are of values that all ranks prepared, so this too depends on the number asked for.
        if self.waiting_bytes > self._max_waiting:
            permitted = min(permitted, max(self._num_prepared, self._num_asked))
        return self._failure is not None or self._num_prepared >= permitted

    def _run(self) -> None:
        self._enter_device()  # a thread begins with GPU 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or not self._is_idle())
                if self._is_idle():
                    return
            value, failure = None, None
            try:
                value = self._prepare()
            except BaseException as raised:  # `__next__` raises it on the caller's thread
                failure = raised
            with self._changed:
                if failure is None:
                    self._ready.append(value)  # type: ignore[arg-type]
                    self._num_prepared += 1
                    if self._size_of is not None and self._num_prepared > self._num_asked:
                        self._sizes.append(self._size_of(value))  # type: ignore[arg-type]
                self._failure = failure
                self._changed.notify_all()
