"""Results on fake tensors are those of FakeTensorMode, found in less time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.sft.fit.counter import ByteCounter
from megatron.sft.fit.fake.results import Results, kind_of

aten = torch.ops.aten


class _Fast(TorchDispatchMode):
    def __init__(self, results: Results) -> None:
        super().__init__()
        self.results = results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.results.of(func, args, kwargs or {})


@contextmanager
def _world(is_fast: bool) -> Iterator[ByteCounter]:
    mode = FakeTensorMode()
    with mode:
        if not is_fast:
            with ByteCounter(keeps_storages=True) as counter:
                yield counter
            return
        with _Fast(Results(mode)), ByteCounter(keeps_storages=True) as counter:
            yield counter


def _of_views() -> list[Tensor]:
    x = torch.empty(6, 4, 8)
    rows = x.transpose(0, 1).reshape(24, 8)
    return [x[1:, ::2], x.view(24, 8).t(), rows.unsqueeze(0), *x.split((1, 5)), x.detach()[0]]


def _of_products() -> list[Tensor]:
    x = torch.empty(6, 8, requires_grad=True)
    weight = torch.empty(8, 5, dtype=torch.float64)
    batched = torch.empty(2, 3, 8) @ x.t()  # ends in a view that its schema calls none
    wide = x.double() @ weight
    (gradient,) = torch.autograd.grad((wide.sin().sum() + batched.sum()), x)
    return [wide, gradient, batched, torch.cat((x, x)), torch.where(x > 0, x, 1.0)]


def _of_changes() -> list[Tensor]:
    x, y = torch.empty(4, 3), torch.empty(3)
    x.add_(y).mul_(2).copy_(y)
    found = torch._foreach_mul([x, y], 2.0)
    torch._foreach_add_([x, y], 1.0)
    return [x, *found, x.new_zeros(2), x * 2, x * 2.0, x.bool(), y.add(1, alpha=2), y.expand(4, 3)]


@pytest.mark.parametrize("of", [_of_views, _of_products, _of_changes])
def test_results_are_those_of_the_mode(of: Callable[[], list[Tensor]]) -> None:
    """A stride, type or shared storage that differs would make other bytes from there on."""

    def described(is_fast: bool) -> tuple[list[Any], Any]:
        with _world(is_fast) as counter, counter.phase("all"):
            found: list[Any] = []
            for _ in range(3):  # first found, then remembered
                tensors = of()
                found += [
                    (x.shape, x.stride(), x.dtype, x.storage_offset(), x.device, x.requires_grad)
                    for x in tensors
                ]
                storages = [x.untyped_storage()._cdata for x in tree_leaves(tensors)]
                found += [[storages.index(one) for one in storages]]
        return found, (counter.phases[0].made, counter.phases[0].peak)

    assert described(is_fast=True) == described(is_fast=False)


def test_kinds_of_operations() -> None:
    """What depends on values, or takes memory from elsewhere, is the mode's."""
    views = aten.view.default, aten._unsafe_view.default, aten.split.Tensor, aten.detach.default
    assert {kind_of(func) for func in views} == {"view"}
    assert kind_of(aten.mm.default) == kind_of(aten._to_copy.default) == "function"
    assert kind_of(aten.add_.Tensor) == kind_of(aten.copy_.default) == "in place"
    left = aten.nonzero.default, aten.mm.out, aten.t_.default, aten.lift_fresh.default
    assert {kind_of(func) for func in left} == {"other"}
    assert kind_of(torch.ops.prim.device.default) == "other"


def test_most_calls_are_remembered() -> None:
    """Else an estimate of a deep model takes minutes."""
    mode = FakeTensorMode()
    with mode, _Fast(Results(mode)):
        calls: list[Any] = []
        dispatch = mode.dispatch
        mode.dispatch = lambda *args: calls.append(args[0]) or dispatch(*args)  # type: ignore[func-returns-value, method-assign]
        x = torch.empty(4, 4)
        for _ in range(5):
            x = (x @ x).t() + 1
    assert calls.count(aten.mm.default) == 2  # the first is of other strides
    assert calls.count(aten.add.Tensor) == 1
    assert aten.t.default not in calls
