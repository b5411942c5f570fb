"""tensor. Results of operations on fake tensors, at a third of the price of `FakeTensorMode`.

FakeTensorMode takes 100 to 200 microseconds for an operation, most of it for cases that a training
step does not have: symbolic shapes, sparse tensors, several devices. A step of a deep model is
some hundred thousand operations, so the estimate's time is theirs.

    views, detach              run as they are, on tensors without memory
    functions, in-place        remembered: shapes, strides and types by those of the arguments
    everything else            left to FakeTensorMode

A result is remembered from what FakeTensorMode returned for the first such call.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)

CPU = torch.device("cpu")
_PLAIN = {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout}
_PLAIN |= {torch.memory_format, torch.Size}
Kind = Literal["view", "function", "in place", "other"]


class _Shape(NamedTuple):
    """A tensor with a storage of its own."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class _Unknown(Exception):
    """An argument or a result of another kind than those of this module."""


class Results:
    """Results for one mode. Call it in place of an operation, outside of the mode's own call."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._known: dict[Hashable, Any] = {}

    def of(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Returns what `func(*args, **kwargs)` returns under the mode."""
        kind = kind_of(func)
        if kind == "other":
            return func(*args, **kwargs)
        try:
            key = (func, *_described(args), *_described(kwargs.values()), *kwargs)
        except _Unknown:
            return func(*args, **kwargs)
        if kind == "view":
            return self._viewed(func, args, kwargs)
        if key not in self._known:
            out = func(*args, **kwargs)
            self._known[key] = _remembered(out, kind, args)
            return out
        known = self._known[key]
        if known is None:
            return func(*args, **kwargs)
        return args[0] if kind == "in place" else self._made(known)

    def _viewed(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        with in_kernel_invocation_manager(self._mode):
            out = func(*args, **kwargs)
        if isinstance(out, Tensor):
            return FakeTensor(self._mode, out, CPU)
        return type(out)(FakeTensor(self._mode, one, CPU) for one in out)

    def _made(self, known: _Shape | list[_Shape] | tuple[_Shape, ...]) -> Any:
        if not isinstance(known, _Shape):
            return type(known)(self._made(one) for one in known)
        size, stride, dtype = known
        with in_kernel_invocation_manager(self._mode):
            empty = torch.empty_strided(size, stride, dtype=dtype, device="meta")
        return FakeTensor(self._mode, empty, CPU)


@cache
def kind_of(func: Any) -> Kind:
    """Returns how the operation's results are found."""
    if func is torch.ops.aten._unsafe_view.default:  # a view, though its schema does not say so
        return "view"
    data_dependent = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    if func.namespace != "aten" or {torch.Tag.inplace_view, *data_dependent} & set(func.tags):
        return "other"
    schema = func._schema
    arguments = [value.alias_info for value in schema.arguments if value.alias_info is not None]
    returns = [value.alias_info for value in schema.returns if value.alias_info is not None]
    if not arguments and not returns:
        return "function" if schema.returns else "other"
    if not any(alias.is_write for alias in (*arguments, *returns)):
        return "other" if "lift" in schema.name else "view"
    is_first = len(arguments) == len(returns) == 1 and schema.arguments[0].alias_info is not None
    keeps_shape = torch.Tag.pointwise in func.tags or func is torch.ops.aten.copy_.default
    return "in place" if is_first and keeps_shape else "other"


def _described(values: Iterable[Any]) -> list[Hashable]:
    found: list[Hashable] = []
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if value.constant is not None or value.fake_device != CPU:
                raise _Unknown
            found.append((value.dtype, value.shape, value.stride()))
        elif kind in _PLAIN:
            found.append((kind, value))  # 1, 1.0 and True are equal
        elif kind is list or kind is tuple:
            found.append((kind, *_described(value)))
        else:
            raise _Unknown
    return found


def _remembered(out: Any, kind: Kind, args: tuple[Any, ...]) -> Any:
    """Returns shapes from which the result can be made again; None where it cannot."""
    if kind == "in place":
        return True if out is args[0] else None
    if isinstance(out, list | tuple):
        found = [_remembered(one, kind, args) for one in out]
        return None if None in found else type(out)(found)
    if type(out) is not FakeTensor or out.constant is not None or out.fake_device != CPU:
        return None
    size, stride = tuple(out.shape), out.stride()
    last = 1 + sum((n - 1) * step for n, step in zip(size, stride)) if out.numel() else 0
    storage = out.untyped_storage()
    shares = any(
        isinstance(x, Tensor) and x.untyped_storage()._cdata == storage._cdata for x in args
    )
    if shares or storage.nbytes() != last * out.element_size():
        return None
    return _Shape(size, stride, out.dtype)
