"""tensor. Prepares what steps take, ahead of them, in a thread of its own.

What is prepared may exchange with its like on other ranks, over process groups that nobody else
uses while the thread works. Its collectives then pair up because all ranks prepare as many values
in one order, whatever their pace: how many may be prepared depends only on how many were asked for,
and that is equal on all ranks wherever they stop or pause.

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

import torch

T = TypeVar("T")


class Prefetcher(Iterator[T], Generic[T]):
    """Iterator over what `prepare` returns, call by call; up to `ahead` calls are made before they
    are asked for.

    What a call raises (the end of data, too) is raised by the `next` that it belongs to, and by all
    later ones; nothing is prepared after it. The thread starts at the first `next`. With `ahead` 0
    there is none.
    """

    def __init__(self, prepare: Callable[[], T], ahead: int, limit: int | None = None) -> None:
        """`limit`: how often `next` will be called at most; no more is prepared."""
        if ahead < 0:
            raise ValueError(f"--prefetch-global-batches must be at least 0, but is {ahead}")
        self.seconds_waited = 0.0
        """That the last `next` took."""
        self._prepare = prepare
        self._ahead = ahead
        self._limit = limit
        self._changed = threading.Condition()
        self._ready: deque[T] = deque()
        self._failure: BaseException | None = None
        self._num_asked = self._num_prepared = 0
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def __next__(self) -> T:
        start = time.perf_counter()
        try:
            return self._next() if self._ahead else self._prepare()
        finally:
            self.seconds_waited = time.perf_counter() - start

    def settle(self) -> None:
        """Wait until the thread is idle, which it stays until the next `next`: its groups may be
        used meanwhile.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._thread is None or self._is_idle())

    def close(self, timeout_seconds: float | None = None) -> bool:
        """End the thread, once it has prepared as many values as on other ranks; return whether it
        has ended.

        timeout_seconds: after an error that other ranks may not know of, when they may never
        prepare theirs. The thread is then left behind, and ends with the process.
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
        permitted = self._num_asked + self._ahead
        if self._limit is not None:
            permitted = min(permitted, self._limit)
        return self._failure is not None or self._num_prepared >= permitted

    def _run(self) -> None:
        if self._device is not None:
            torch.cuda.set_device(self._device)  # a thread begins with device 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or not self._is_idle())
                if self._is_idle():
                    return
            value, failure = None, None
            try:
                value = self._prepare()
            except BaseException as raised:  # raised again where it belongs
                failure = raised
            with self._changed:
                if failure is None:
                    self._ready.append(value)  # type: ignore[arg-type]
                    self._num_prepared += 1
                self._failure = failure
                self._changed.notify_all()
