"""tensor. Bytes of the tensor storages that are alive, counted as operations make them.

    counter = ByteCounter()
    with counter, counter.phase("forward"):
        losses = model(tokens)
    counter.phases[0]    Phase(name="forward", start=..., end=..., peak=..., at_peak={...})

A dispatch mode sees the results of every operation, of autograd and of optimizers too. A storage
counts from the operation that returns it until it is freed, whatever views of it there are. The
same mode counts real tensors and fake ones, so one can be compared with the other. It does not see
what a kernel allocates and frees inside of one operation, or arrays of numpy.

Price: about 10 microseconds for each operation.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.packing.device import is_host_memory

HOST = "host"
"""The part of storages that are made within `host_memory`; they count for no sum."""
DEVICE = torch.ops.prim.device.default
"""`tensor.device` of fake tensors is an operation."""


class Made(NamedTuple):
    """One storage: the operation that made it, and the tensor that it made."""

    operation: str
    num_bytes: int
    shape: tuple[int, ...]
    dtype: str
    part: str = ""
    """The part of the run that it counts for."""

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)} ({self.num_bytes:,} bytes) by {self.operation}"


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Bytes alive in one phase of a step."""

    name: str
    start: int
    end: int
    peak: int
    at_peak: Mapping[str, int]
    """Bytes by part when most were alive."""
    host_start: int = 0
    """Bytes in the host's memory, see `packing.device.host_memory`, before the phase."""
    host_peak: int = 0
    """The same at most."""
    alive: tuple[Made, ...] = ()
    """The storages at the end, where the counter keeps them apart."""
    made: tuple[Made, ...] = ()
    """Storages in the order in which they were made, where the counter keeps them apart."""


@cache
def _is_view(func: Any) -> bool:
    """Returns whether an operation returns its argument's memory.

    A storage that is first seen so was made by no operation: it was there before, as batches are,
    or it is a copy that gloo makes for itself.
    """
    if func is torch.ops.aten.lift_fresh.default:  # what `torch.tensor` has just made
        return False
    aliases = [value.alias_info for value in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


class ByteCounter(TorchDispatchMode):
    """Counts while it is entered, on this thread.

    unit: sizes are rounded up to multiples of it, as an allocator does. keeps_storages: `Phase`s
    say which storages there were; otherwise only sums are kept. workspaces: by operation, the bytes
    that its kernel has meanwhile, as a function of its arguments.
    """

    def __init__(
        self,
        *,
        unit: int = 1,
        keeps_storages: bool = False,
        workspaces: Mapping[Any, Callable[..., int]] = MappingProxyType({}),
    ) -> None:
        super().__init__()
        self._workspaces = workspaces
        self.current = 0
        self.peak = 0
        self.host_peak = 0
        self.part = "other"
        """The part that new storages count for."""
        self.phases: list[Phase] = []
        self.by_part: Counter[str] = Counter()
        self._at_peak: dict[str, int] = {}
        self._alive: dict[int, tuple[weakref.ref[Any], Made]] = {}
        self._after_collective = False
        self._patches: list[Any] = []
        self._unit = unit
        self._made: list[Made] | None = [] if keeps_storages else None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # it wraps each call for nothing: nothing is compiled under this mode

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is DEVICE:  # more than half of all calls; only fake tensors make them
            return args[0].fake_device
        if self._after_collective:
            self._settle()
        out = func(*args, **(kwargs or {}))
        self._after_collective = func.namespace == "c10d"
        if isinstance(out, Tensor):
            self._see(out, func)
        elif isinstance(out, (tuple, list)):
            for value in tree_leaves(out):
                if isinstance(value, Tensor):
                    self._see(value, func)
        if func in self._workspaces:
            self._reach(self._workspaces[func](*args), "workspaces of kernels")
        return out

    def __enter__(self) -> ByteCounter:
        # megatron-core empties storages that it will fill again; no operation says so
        resize, counter = torch.UntypedStorage.resize_, self

        def counted(storage: torch.UntypedStorage, size: int) -> Any:
            out = resize(storage, size)
            counter._resized(storage)
            return out

        self._patches.append(mock.patch.object(torch.UntypedStorage, "resize_", counted))
        self._patches[-1].start()
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._patches.pop().stop()

    def count_as(self, part: str, tensors: Iterable[Tensor]) -> None:
        """Moves storages that are alive to another part."""
        for tensor in tensors:
            key = tensor.untyped_storage()._cdata
            if key in self._alive and self._alive[key][1].part != HOST:
                reference, made = self._alive[key]
                self.by_part[made.part] -= made.num_bytes
                self.by_part[part] += made.num_bytes
                self._alive[key] = reference, made._replace(part=part)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Appends to `phases` what was alive meanwhile."""
        self._settle()
        start = self.peak = self.current
        self._at_peak = self._parts()
        host_start = self.host_peak = self.by_part[HOST]
        first = 0 if self._made is None else len(self._made)
        yield
        self._settle()
        keeps = self._made is not None
        self.phases.append(
            Phase(
                name=name,
                start=start,
                end=self.current,
                peak=self.peak,
                at_peak={part: size for part, size in self._at_peak.items() if size},
                host_start=host_start,
                host_peak=self.host_peak,
                alive=tuple(sorted(made for _, made in self._alive.values())) if keeps else (),
                made=tuple(self._made[first:]) if self._made is not None else (),
            )
        )

    def _see(self, tensor: Tensor, func: Any) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive:
            if self._alive[key][0]() is storage:
                return
            self._freed(key)  # by another thread, which has not said so yet; the address is reused
        elif _is_view(func):
            return
        num_bytes, part = self._rounded(storage), HOST if is_host_memory() else self.part
        made = Made(str(func), num_bytes, tuple(tensor.shape), str(tensor.dtype)[6:], part)
        self._alive[key] = weakref.ref(storage, lambda gone: self._freed(key, gone)), made
        self.by_part[part] += num_bytes
        if part == HOST:
            self.host_peak = max(self.host_peak, self.by_part[HOST])
        else:
            self.current += num_bytes
            self._reach(0, part)
        if self._made is not None:
            self._made.append(made._replace(part=""))

    def _rounded(self, storage: torch.UntypedStorage) -> int:
        return -(-storage.nbytes() // self._unit) * self._unit

    def _resized(self, storage: torch.UntypedStorage) -> None:
        if (found := self._alive.get(storage._cdata)) is None:
            return
        reference, made = found
        resized = made._replace(num_bytes=self._rounded(storage))
        self._alive[storage._cdata] = reference, resized
        self.current += (resized.num_bytes - made.num_bytes) * (made.part != HOST)
        self.by_part[made.part] += resized.num_bytes - made.num_bytes
        self._reach(0, made.part)

    def _reach(self, more: int, part: str) -> None:
        """Notes a peak of what is alive and `more`."""
        if self.current + more > self.peak:
            self.peak = self.current + more
            self._at_peak = {**self._parts(), part: self.by_part[part] + more}

    def _parts(self) -> dict[str, int]:
        return {part: size for part, size in self.by_part.items() if part != HOST}

    def _settle(self) -> None:
        """Waits for what other threads hold; see `SettledCounter`."""

    def _freed(self, key: int, reference: object = None) -> None:
        if reference is not None and self._alive.get(key, (None,))[0] is not reference:
            return
        _, made = self._alive.pop(key)
        self.current -= made.num_bytes * (made.part != HOST)
        self.by_part[made.part] -= made.num_bytes


class SettledCounter(ByteCounter):
    """Counts real tensors of ranks that talk over gloo.

    gloo's threads hold the tensors of a collective for a moment after it is over. Without a short
    wait behind each, it would be chance whether they count for the peak.
    """

    def __init__(self, *, keeps_storages: bool = False) -> None:
        super().__init__(keeps_storages=keeps_storages)
        self._kept: list[Any] = []
        """Storages that live to the end of the run."""

    _held: Any = None
    """The last collective's tensors: their last reference must not be another thread's."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if func.namespace == "c10d":
            self._held = [
                value.untyped_storage() for value in tree_leaves(args) if isinstance(value, Tensor)
            ]
        return out

    def count_as(self, part: str, tensors: Iterable[Tensor]) -> None:
        tensors = list(tensors)
        super().count_as(part, tensors)
        self._kept += [tensor.untyped_storage() for tensor in tensors]

    def _settle(self) -> None:
        time.sleep(0.0005)
        self._after_collective, self._held = False, None
