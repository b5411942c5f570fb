"""tensor. The device that a rank computes on, as a value.

It is made once: by `sft.distributed` for a rank of a run, by `sft.fit` for a GPU that is described
and not there, and by `Device.here` for a script that trains with the plug-in. Whoever builds a
model, fills batches or chooses a kernel is given it, or finds it in the config, and asks torch
nothing.

    device = Device.of(config)
    tensor = torch.zeros(8, device=device.place)
    if device.is_gpu and device.capability >= (9, 0): ...

This module also has what is asked of single tensors: the copy from host to device, and whether
kernels in Triton take them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Device:
    """The CPU, or a GPU of this process."""

    kind: str
    """"cuda" or "cpu"."""
    index: int | None = None
    """Number of a GPU; None stands for the one that is current when it is asked for."""

    @classmethod
    def here(cls) -> Device:
        """Returns the current GPU of this process, the CPU if it has none. CUDA is not started."""
        return Device("cuda") if torch.cuda.is_available() else CPU

    @classmethod
    def at(cls, place: torch.device) -> Device:
        """Returns the device of tensors."""
        return Device(place.type, place.index)

    @classmethod
    def of(cls, config: object, x: Tensor | None = None) -> Device:
        """Returns the device that models of `config` are built for: its attribute `device`, which
        the trainer sets. Without one it is the device of `x`, or `here` if no tensor is given.
        """
        device = getattr(config, "device", None)
        if isinstance(device, Device):
            return device
        return cls.here() if x is None else cls.at(x.device)

    @property
    def is_gpu(self) -> bool:
        """True if code takes the ways of CUDA, False for those of a CPU."""
        return self.kind == "cuda"

    @property
    def place(self) -> torch.device:
        """torch's device of its tensors."""
        index = torch.cuda.current_device() if self.is_gpu and self.index is None else self.index
        return torch.device(self.kind) if index is None else torch.device(self.kind, index)

    @property
    def name(self) -> str:
        """Name of a GPU's model."""
        return torch.cuda.get_device_name(self.place)

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability of a GPU."""
        return torch.cuda.get_device_capability(self.place)

    @property
    def triton_fault(self) -> str | None:
        """Why kernels in Triton do not run on it; None if they do."""
        return triton_fault() if self.is_gpu else "no GPU"

    def has_package(self, name: str) -> bool:
        """Returns whether a package of kernels is installed."""
        return find_spec(name) is not None

    def kernels(self, module: str) -> Any:
        """Returns a module of kernels by its name; imported late, as it may not be installed."""
        return import_module(module)

    def initial_place(self, config: Any) -> torch.device:
        """Returns where weights are made: on the host where the config of megatron-core says so."""
        return CPU.place if config.use_cpu_initialization else self.place

    def entry(self) -> Callable[[], None]:
        """Returns the function by which another thread begins to work on this thread's GPU."""
        return partial(torch.cuda.set_device, self.place) if self.is_gpu else lambda: None


CPU = Device("cpu")
_thread = threading.local()


@contextmanager
def host_memory() -> Iterator[None]:
    """Says that tensors made inside, on this thread, are to lie in the host's memory beside a GPU:
    whoever counts the GPU's bytes leaves them out. It moves nothing.
    """
    before, _thread.is_host = is_host_memory(), True
    try:
        yield
    finally:
        _thread.is_host = before


def is_host_memory() -> bool:
    """Returns whether this is within `host_memory`."""
    return getattr(_thread, "is_host", False)


def pinned(tensor: Tensor) -> Tensor:
    """Returns a tensor of the host in pinned memory, from which copies to a GPU need no wait, where
    this process has a GPU.
    """
    return tensor.pin_memory() if torch.cuda.is_available() else tensor


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Returns `values` on `device`, copied by way of pinned memory: from pageable memory the host
    would wait for the copy.
    """
    if device.type == "cuda" and values.device.type == "cpu" and not values.is_pinned():
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


def takes_triton(x: Tensor) -> bool:
    """Returns whether kernels in Triton run where `x` is."""
    return x.is_cuda and triton_fault() is None


@cache
def triton_fault() -> str | None:
    """Returns why kernels in Triton do not run on this GPU; None if they do.

    One is tried: images for running alone lack a C compiler or headers of Python, and homes may
    refuse to be written to, in more ways than could be asked for.
    """
    try:
        rotary = import_module("megatron.packing.model.attention.fused_rotary")
        x = torch.zeros(1, 1, 2, 64, dtype=torch.bfloat16, device="cuda")
        turns = torch.ones(1, 1, 1, 64, device="cuda")
        rotary.turned(x, turns, turns[..., :32].contiguous(), is_interleaved=False)
    except Exception as error:  # of Triton, of the compiler's process, of files
        return next(iter(f"{type(error).__name__}: {error}".splitlines()))
    return None


def memory_of_gpu(index: int) -> int | None:
    """Returns the bytes of the GPU of that number on this host; None without one."""
    if not torch.cuda.is_available():
        return None
    return int(torch.cuda.get_device_properties(index).total_memory)
