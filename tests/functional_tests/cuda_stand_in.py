"""A stand-in for CUDA on a machine without a GPU: tensors that say they are on it, and compute on
the CPU.

It shows what a run on CPU cannot: operations on tensors of both devices, which CUDA refuses, and
reads that make the host wait for the device. Kernels, streams and their races it does not show. It
stays installed: use it in a fork.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import traceback
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import megatron.core.tensor_parallel.random
import torch
import torch.distributed as dist
import torch.nn.attention.varlen
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

DEVICE = torch.device("cuda", 0)
CPU = torch.device("cpu")

reads: list[str] = []
"""What the host waited for the device for, and where, in order."""
mixed: list[str] = []
"""Operations on tensors of both devices."""
streams: list[str] = []
"""Places in the code that made each stream."""

_fields: Any = Tensor
_FACTS = {
    _fields.device.__get__: DEVICE,
    _fields.is_cuda.__get__: True,
    _fields.is_cpu.__get__: False,
}
_READING = {
    *(
        Tensor.item,
        Tensor.tolist,
        Tensor.__bool__,
        Tensor.__int__,
        Tensor.__float__,
        Tensor.__index__,
    ),
    *(
        Tensor.nonzero,
        torch.nonzero,
        Tensor.equal,
        torch.equal,
        Tensor.unique,
        torch.unique,
        torch.masked_select,
    ),
    *(Tensor.bincount, torch.bincount, torch.repeat_interleave, Tensor.repeat_interleave),
}
_ANY_DEVICE = {Tensor.copy_, _fields.data.__set__, _fields.grad.__set__}
_pinned: set[int] = set()
"""Addresses of the storages in pinned memory; pinned ones are kept, so that none is another's
later.
"""
_kept: list[Tensor] = []


def _where() -> str:
    frames = [frame for frame in traceback.extract_stack() if "/megatron/" in frame.filename]
    return " < ".join(
        f"{frame.filename.partition('/megatron/')[2]}:{frame.lineno}" for frame in frames[:-4:-1]
    )


def _tensors_in(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _tensors_in(value)
    elif isinstance(values, dict):
        yield from _tensors_in(list(values.values()))


def _is_cuda(device: Any) -> bool:
    return device is not None and (isinstance(device, int) or torch.device(device).type == "cuda")


def _on_cpu(values: Any) -> Any:
    """Tensors in lists, as tensors of the CPU."""
    if isinstance(values, (list, tuple)):
        return type(values)(map(_on_cpu, values))
    with torch._C.DisableTorchFunctionSubclass():
        return values.as_subclass(Tensor) if isinstance(values, OnCuda) else values


def _on_cuda(values: Any) -> Any:
    """Results of an operation, as tensors of the device."""
    if isinstance(values, (list, tuple)):
        is_named = hasattr(values, "_fields")
        return (
            type(values)(*map(_on_cuda, values))
            if is_named
            else type(values)(map(_on_cuda, values))
        )
    if (
        type(values) is Tensor
    ):  # an alias would be one more node of the graph, between a weight and its hook
        values.__class__ = OnCuda
    return values


class OnCuda(Tensor):
    """A tensor of the CPU that says it is on the device."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """One operation with at least one such tensor."""
        kwargs = dict(kwargs or {})
        if function in _FACTS:
            return _FACTS[function]
        if function is Tensor.type and len(args) == 1:
            return _on_cpu(args[0]).type().replace("torch.", "torch.cuda.")
        if function in (Tensor.numpy, Tensor.__array__, Tensor.pin_memory):
            raise RuntimeError(f"{function.__name__} of a tensor on the device: {_where()}")
        if function in (Tensor.to, Tensor.cpu, Tensor.cuda):
            return _moved(function, args, kwargs)
        if function in _READING and kwargs.get("output_size") is None:
            reads.append(f"{function.__name__}: {_where()}")
        if function is Tensor.copy_ and not isinstance(args[0], OnCuda) and not _is_pinned(args[0]):
            reads.append(f"copy_ to the host: {_where()}")
        if function in (Tensor.__getitem__, Tensor.__setitem__):
            if any(index.dtype == torch.bool for index in _tensors_in(args[1])):
                reads.append(f"a mask as index: {_where()}")
        elif (
            function not in _ANY_DEVICE and torch._C._current_graph_task_id() < 0
        ):  # gradients lose their class
            others = [
                each
                for each in _tensors_in((args, kwargs))
                if not isinstance(each, OnCuda) and each.dim()
            ]
            if others and not function.__name__.startswith("__get__"):
                mixed.append(f"{function.__name__}: {_where()}")
        if kwargs.get("device") is not None:
            kwargs["device"] = CPU
        if function is torch.addmm and "out_dtype" in kwargs:  # CUDA's alone
            with torch._C.DisableTorchFunctionSubclass():
                return args[0].add_(args[1].to(args[0].dtype) @ args[2].to(args[0].dtype))
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **kwargs)
        return result if function is Tensor.copy_ else _on_cuda(result)


def _moved(function: Any, args: Any, kwargs: Any) -> Any:
    device = kwargs.get("device", args[1] if len(args) > 1 else None)
    device = device.device if isinstance(device, Tensor) else device
    names_one = isinstance(device, (str, int, torch.device)) and not isinstance(device, bool)
    to_cuda = function is Tensor.cuda or (
        function is Tensor.to and (not names_one or _is_cuda(device))
    )
    if not to_cuda:
        reads.append(f"to the host: {_where()}")
    if function is not Tensor.to:
        return args[0] if to_cuda else _on_cpu(args[0]).clone()
    if isinstance(args[1:2] and args[1], Tensor):
        args = (args[0], CPU, args[1].dtype, *args[2:])
    elif names_one:
        args, kwargs = (
            (args[0], CPU, *args[2 if "device" not in kwargs else 1 :]),
            kwargs | {"device": CPU},
        )
        del kwargs["device"]
    with torch._C.DisableTorchFunctionSubclass():
        moved = args[0].to(*args[1:], **kwargs)
    return _on_cuda(moved) if to_cuda else _on_cpu(moved)


def _is_pinned(tensor: Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() in _pinned


def _pin(tensor: Tensor) -> Tensor:
    _kept.append(tensor)
    _pinned.add(tensor.untyped_storage().data_ptr())
    return tensor


class OnCudaParameter(OnCuda, torch.nn.Parameter):
    """A weight on the device."""


class Mode(TorchFunctionMode):
    """What makes tensors of the device out of others."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """One operation of any."""
        kwargs = dict(kwargs or {})
        if function in (torch.tensor, torch.as_tensor) and isinstance(args[0], (list, tuple)):
            reads.extend(
                f"{function.__name__} of a list: {_where()}"
                for each in _tensors_in(args[0])
                if each.is_cuda
            )
            args = (_on_cpu(args[0]), *args[1:])
        if any(isinstance(each, OnCuda) for each in _tensors_in((args, kwargs))):
            return OnCuda.__torch_function__(function, types, args, kwargs)
        if function is Tensor.pin_memory:
            return _pin(args[0].clone())
        if function is Tensor.is_pinned:
            return _is_pinned(args[0])
        names_one = (
            len(args) > 1
            and isinstance(args[1], (str, int, torch.device))
            and not isinstance(args[1], bool)
        )
        if function is Tensor.cuda or (function is Tensor.to and names_one and _is_cuda(args[1])):
            if args[0].dim() and not (kwargs.get("non_blocking") and _is_pinned(args[0])):
                reads.append(f"pageable memory to the device: {_where()}")
            return _on_cuda(args[0].to(CPU, *args[2:], **kwargs).view_as(args[0]))
        if kwargs.pop("pin_memory", False):
            return _pin(function(*args, **kwargs))
        if not _is_cuda(kwargs.get("device")):
            return function(*args, **kwargs)
        if function in (torch.tensor, torch.as_tensor):
            reads.append(f"{function.__name__} on the device: {_where()}")
        return _on_cuda(function(*args, **kwargs | {"device": CPU}))


class Stream:
    """All work is done when it is asked for."""

    device = DEVICE

    def __init__(self, *_: Any, **__: Any) -> None:
        streams.append(_where())

    def record_event(self) -> Event:
        """One that is over."""
        return Event()

    wait_stream = wait_event = synchronize = lambda self, *_: None


class Event:
    """A point in time; that of its making, until it is recorded."""

    def __init__(self, **_: Any) -> None:
        self.record()

    def record(self, stream: Stream | None = None) -> None:
        """Now."""
        self.time = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds."""
        return 1000 * (end.time - self.time)

    wait = synchronize = lambda self, *_: None


def install() -> None:
    """Let this process find one GPU, which no other has."""
    stream = Stream()
    of_cuda = {
        "_lazy_init": None,
        "is_available": True,
        "is_initialized": True,
        "device_count": 1,
        "current_device": 0,
        "set_device": None,
        "get_device_capability": (9, 0),
        "get_device_name": "a stand-in",
        "get_device_properties": SimpleNamespace(
            name="a stand-in", total_memory=2**37, major=9, minor=0, uuid=str(os.getpid())
        ),
        "current_stream": stream,
        "default_stream": stream,
        "stream": contextlib.nullcontext(),
        "synchronize": None,
        "empty_cache": None,
        "memory_allocated": 2**20,
        "max_memory_allocated": 2**20,
        "is_current_stream_capturing": False,
    }
    cuda: Any = torch.cuda
    for name, value in of_cuda.items():
        setattr(cuda, name, lambda *_, value=value, **__: value)
    cuda.Stream, cuda.Event, cuda.default_generators = Stream, Event, (torch.default_generator,)
    cuda.manual_seed = cuda.manual_seed_all = torch.default_generator.manual_seed
    cuda.get_rng_state, cuda.set_rng_state = (
        lambda *_: torch.get_rng_state(),
        lambda state, *_: torch.set_rng_state(state),
    )
    cuda.nccl.version = lambda: (2, 27, 3)  # torch's checkpoints log it
    tracked: Any = megatron.core.tensor_parallel.random
    tracked._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    tracked._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    for name in ("Float", "BFloat16", "Half", "Byte"):
        setattr(cuda, f"{name}Tensor", _maker_of(getattr(torch, f"{name}Tensor").dtype))
    library: Any = torch
    library.nn.Module.to = _module_to
    library.Tensor.record_stream = lambda *_: None
    library.optim.Optimizer._accelerator_graph_capture_health_check = lambda self: None
    library.optim.Optimizer._cuda_graph_capture_health_check = lambda self: None
    library.nn.attention.varlen.varlen_attn = _attention
    make_all: Any = dist.init_process_group
    make_group: Any = dist.new_group
    backends: dict[Any, str] = {}

    def new_group(*ranks: Any, backend: str | None = None, **named: Any) -> Any:
        group = make_group(*ranks, backend="gloo", **named)
        backends[group] = backend or "nccl"
        return group

    library.distributed.init_process_group = lambda backend, **named: make_all("gloo", **named)
    library.distributed.new_group = new_group
    library.distributed.get_backend = lambda group=None: backends.get(group, "nccl")
    run: Any = threading.Thread.run
    threading.Thread.run = lambda self: _in_mode(run, self)  # type: ignore[method-assign]
    Mode().__enter__()


def _in_mode(run: Any, thread: threading.Thread) -> None:
    with Mode():
        run(thread)


def _maker_of(dtype: torch.dtype) -> Any:
    return lambda values: torch.tensor(values, dtype=dtype, device=DEVICE)


def _module_to(module: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """In place: a weight keeps the attributes that tell how it is cut."""
    for part in module.modules():
        for tensor in (*part._parameters.values(), *part._buffers.values()):
            if tensor is not None:
                tensor.__class__ = (
                    OnCudaParameter if isinstance(tensor, torch.nn.Parameter) else OnCuda
                )
    return module


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_query: Tensor,
    cu_key: Tensor,
    *_: int,
    scale: float,
    **__: Any,
) -> Tensor:
    """What torch's kernel computes, with its demands."""
    assert query.dtype in (torch.bfloat16, torch.float16)
    assert cu_query.dtype == cu_key.dtype == torch.int32
    assert {each.device for each in (query, key, value, cu_query, cu_key)} == {DEVICE}
    out = []
    bounds = [_on_cpu(cu_seqlens).diff().tolist() for cu_seqlens in (cu_query, cu_key)]
    parts = [
        x.split(lengths)
        for x, lengths in zip((query, key, value), (bounds[0], bounds[1], bounds[1]))
    ]
    for q, k, v in zip(*parts, strict=True):
        mask = torch.ones(len(q), len(k), dtype=torch.bool, device=DEVICE).tril(len(k) - len(q))
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        out.append(
            scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True).transpose(
                0, 1
            )
        )
    return torch.cat(out)
