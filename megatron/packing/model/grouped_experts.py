"""mcore. Experts of a layer in one product each for both of their linear layers.

megatron-core without Transformer Engine runs experts one after another: 128 experts are 384 small
products per layer and microbatch. Here tokens, which stand sorted by expert, are multiplied with
the weights of all experts by `torch.nn.functional.grouped_mm`. Parameters stay one per expert, so
checkpoints, weights in and out and adapters keep their names. Weights that lie side by side in
memory (`place_side_by_side`, `side_by_side_in_buffers`) are multiplied where they are. The price of
others is a copy of them in each pass, which is not kept for the backward pass.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import groupby
from typing import Any, cast

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor
from torch.nn.functional import grouped_mm

from megatron.packing.device import Device, to_device

_ALIGNMENT = 16
"""Bytes of which a row's length must be a multiple: grouped_mm refuses others."""


def group_experts(model: torch.nn.Module) -> None:
    """Lets all experts of a layer run together, in each layer of `model` that has more than one on
    this rank. Experts of Transformer Engine stay as they are.

    Raises ValueError for what only one expert after another can do.
    """
    for module in model.modules():
        if type(module) is not SequentialMLP or module.num_local_experts == 1:
            continue
        experts: Any = module.local_experts
        if not isinstance(experts[0].linear_fc1, ColumnParallelLinear):
            continue
        config = module.config
        for name in ("fp8", "fp4", "moe_apply_probs_on_input"):
            if getattr(config, name, None):
                raise ValueError(f"moe_grouped_gemm does not go with {name}; leave one out")
        module.__class__ = GroupedExperts


def place_side_by_side(model: torch.nn.Module) -> None:
    """Moves the weights of a linear layer of all experts into one allocation, in order."""
    for module in model.modules():
        if isinstance(module, GroupedExperts):
            experts = cast("list[MLP]", list(module.local_experts))
            for name in ("linear_fc1", "linear_fc2"):
                weights = [getattr(expert, name).weight for expert in experts]
                for weight, place in zip(weights, torch.stack([each.data for each in weights])):
                    weight.data = place


@contextmanager
def side_by_side_in_buffers(model: torch.nn.Module) -> Iterator[None]:
    """Lets DistributedDataParallel lay out the weights of a linear layer of all experts, and their
    gradients, as `place_side_by_side` does, where it is made of `model` in here.

    It fills its buffers from the last of the model's parameters to the first:
    [0.fc1, 0.fc2, 1.fc1, 1.fc2] -> listed as [1.fc1, 0.fc1, 1.fc2, 0.fc2]
    -> laid out as [0.fc2, 1.fc2, 0.fc1, 1.fc1].
    """
    listed = model.named_parameters
    experts = "local_experts."

    def place(named: tuple[str, torch.nn.Parameter]) -> tuple[str, int]:
        number, _, layer = named[0].rpartition(experts)[2].partition(".")
        return layer, -int(number)

    def in_order(*arguments: Any, **options: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        named = listed(*arguments, **options)
        for prefix, of_one in groupby(named, lambda each: each[0].rpartition(experts)[0]):
            parameters = list(of_one)
            yield from sorted(parameters, key=place) if prefix else parameters

    if any(isinstance(module, GroupedExperts) for module in model.modules()):
        model.named_parameters = in_order  # type: ignore[method-assign]
    yield
    vars(model).pop("named_parameters", None)


class GroupedExperts(SequentialMLP):
    """megatron-core's experts of one layer on this rank, run together."""

    def forward(
        self,
        permuted_local_hidden_states: Tensor,
        tokens_per_expert: Tensor,
        permuted_probs: Tensor,
    ) -> tuple[Tensor, None]:
        """Returns the weighted outputs [tokens, hidden], and None for a bias, which is added.

        permuted_local_hidden_states: [tokens, hidden], sorted by expert.
        tokens_per_expert: [experts on this rank], int, on the device or the host.
        permuted_probs: [tokens], the router's weight of each token.
        """
        device = Device.of(self.config, permuted_local_hidden_states)
        groups = Groups(tokens_per_expert, permuted_local_hidden_states.device, device)
        experts = cast("list[MLP]", list(self.local_experts))
        # An expert's own forward is run once for all tokens; only its linear layers are replaced.
        together = copy.copy(experts[0])
        first = [expert.linear_fc1 for expert in experts]
        second = [expert.linear_fc2 for expert in experts]
        together._modules = {
            **together._modules,
            "linear_fc1": _Layers(first, groups),
            "linear_fc2": _Layers(second, groups, permuted_probs),
        }
        return together(permuted_local_hidden_states, permuted_probs)


class _Layers(torch.nn.Module):
    """A linear layer of all experts, in the place of one expert's; parameters stay theirs."""

    is_expert = True  # as megatron-core's linear layers say it

    def __init__(self, layers: list[Any], groups: Groups, bias_scale: Tensor | None = None) -> None:
        super().__init__()
        self._arguments = layers, groups, bias_scale

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        layers, groups, bias_scale = self._arguments
        return _multiplied(layers, x, groups, bias_scale), None


class Groups:
    """Bounds of the rows of each group, which stand in order of their group.

    num_rows: [groups], int, of each.
    ends: [groups], int32: the number of rows up to the end of each.
    Both are on the rows' device.
    device: whose kernels multiply them.
    """

    def __init__(self, num_rows: Tensor, place: torch.device, device: Device | None = None) -> None:
        self._num_rows = num_rows  # may be on the host
        self.device = device or Device.at(place)
        self.num_rows = to_device(num_rows, place)
        self.ends = self.num_rows.cumsum(0, dtype=torch.int32)

    @cached_property
    def sizes(self) -> list[int]:
        """`num_rows` on the host, which waits for them."""
        return cast("list[int]", self._num_rows.tolist())


def _multiplied(
    layers: list[Any], x: Tensor, groups: Groups, bias_scale: Tensor | None = None
) -> Tensor:
    """Returns what the layers give for their rows of `x` [rows, in], their biases (times
    `bias_scale` [rows]) and adapters included: [rows, out].
    """

    _await_weights(layers)

    def of_all(
        x: Tensor, weight_of: Callable[[Any], Tensor], *, accumulates: bool = False
    ) -> Tensor:
        weights = [weight_of(layer) for layer in layers]
        return grouped_linear(x, weights, groups, accumulates=accumulates)

    fusion = layers[0].gradient_accumulation_fusion
    result = of_all(x, lambda layer: layer.weight, accumulates=fusion)
    if getattr(layers[0], "adapter", None) is not None:
        update = layers[0].adapter(x, lambda x, of: of_all(x, lambda layer: of(layer.adapter)))
        result = (result + update).to(result.dtype)
    if layers[0].bias is not None:
        biases = torch.stack([layer.bias for layer in layers]).to(result.dtype)
        rows = biases.repeat_interleave(groups.num_rows, 0, output_size=len(x))
        result = result + (rows if bias_scale is None else rows * bias_scale.unsqueeze(-1))
    return result.to(x.dtype)


def _await_weights(layers: list[Any]) -> None:
    """Runs the hooks that each module would run first: with `overlap_param_gather`
    DistributedDataParallel waits in them for weights that other ranks have updated.
    """
    for layer in layers:
        for module in layer.modules():
            for hook in module._forward_pre_hooks.values():
                hook(module, ())


def grouped_linear(
    x: Tensor, weights: Sequence[Tensor], groups: Groups, *, accumulates: bool = False
) -> Tensor:
    """Returns `x` [rows, in] times the transpose of its group's weight [out, in]: [rows, out].

    accumulates: weights under DistributedDataParallel have their gradients added to `main_grad`, as
    megatron-core's layers do with `gradient_accumulation_fusion`.
    """
    accumulates = accumulates and hasattr(weights[0], "grad_added_to_main_grad")
    return cast(Tensor, _GroupedLinear.apply(x, groups, accumulates, *weights))


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: Groups, accumulates: bool, *weights: Tensor) -> Tensor:
        ctx.groups = groups
        ctx.has_x = any(ctx.needs_input_grad[3:])  # frozen weights do not need it
        ctx.accumulated = weights if accumulates and ctx.has_x else ()
        # Not the weights side by side: that would be a second copy of all experts in each layer.
        ctx.save_for_backward(*([x] if ctx.has_x else []), *weights)
        return _product(x, weights, groups, transposed=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        groups: Groups = ctx.groups
        inputs: tuple[Tensor, ...] = ctx.saved_tensors
        gradient = gradients[0].contiguous()  # grouped_mm refuses an expanded one
        weights = inputs[1:] if ctx.has_x else inputs
        of_weights: Sequence[Tensor | None] = [None] * len(weights)
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = _product(gradient, weights, groups, transposed=False)
        if ctx.has_x:
            stacked = _weight_gradients(gradient, inputs[0], groups)
            if ctx.accumulated:
                _add_to_main_grads(ctx.accumulated, stacked)
            of_weights = stacked.unbind()
        return of_x, None, None, *of_weights


def _add_to_main_grads(weights: Sequence[Any], gradients: Tensor) -> None:
    """Adds [groups, out, in], and marks the weights: hooks of DistributedDataParallel then add
    nothing. They do count gradients, so that autograd must still be given some.
    """
    totals = [weight.main_grad for weight in weights]
    stacked = _side_by_side(totals)
    if stacked is not None:
        stacked.add_(gradients)
    else:
        torch._foreach_add_(totals, gradients.unbind())
    for weight in weights:
        weight.grad_added_to_main_grad = True


def _product(x: Tensor, weights: Sequence[Tensor], groups: Groups, *, transposed: bool) -> Tensor:
    """Returns [rows, in] x transposed weights [out, in], or [rows, out] x the weights."""
    if _is_for_grouped_mm(groups.device, x, *weights[0].shape):
        stacked = _side_by_side(weights)
        if stacked is None:
            stacked = torch.stack(list(weights))
        return grouped_mm(x, stacked.mT if transposed else stacked, offs=groups.ends)
    parts = zip(x.split(groups.sizes), weights)
    return torch.cat([rows @ (weight.mT if transposed else weight) for rows, weight in parts])


def _side_by_side(tensors: Sequence[Tensor]) -> Tensor | None:
    """Returns a view [groups, out, in] of contiguous tensors that lie behind one another in one
    storage, with equal gaps or none; None if they do not.
    """
    first, start = tensors[0], tensors[0].storage_offset()
    step = (tensors[-1].storage_offset() - start) // max(1, len(tensors) - 1)
    storage = first.untyped_storage()._cdata
    if step < first.numel() or not all(
        tensor.storage_offset() == start + number * step
        and tensor.is_contiguous()
        and tensor.untyped_storage()._cdata == storage
        for number, tensor in enumerate(tensors)
    ):
        return None
    return first.as_strided((len(tensors), *first.shape), (step, *first.stride()))


def _weight_gradients(gradient: Tensor, x: Tensor, groups: Groups) -> Tensor:
    """[rows, out] and [rows, in] -> for each group [out, in]: [groups, out, in]."""
    if _is_for_grouped_mm(groups.device, gradient, gradient.shape[-1], x.shape[-1]):
        return grouped_mm(gradient.mT, x, offs=groups.ends)
    parts = zip(gradient.split(groups.sizes), x.split(groups.sizes))
    return torch.stack([left.mT @ right for left, right in parts])


def _is_for_grouped_mm(device: Device, operand: Tensor, *widths: int) -> bool:
    """Returns whether `grouped_mm` takes matrices with rows of these lengths: in bfloat16 (and in
    float32 on a CPU), and not none.
    """
    dtypes = (torch.bfloat16,) if device.is_gpu else (torch.bfloat16, torch.float32)
    return (
        operand.dtype in dtypes
        and len(operand) > 0
        and all(width * operand.element_size() % _ALIGNMENT == 0 for width in widths)
    )
