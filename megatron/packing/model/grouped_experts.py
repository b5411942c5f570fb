"""mcore. Experts of a layer in one product each for both of their linear layers.

megatron-core without Transformer Engine runs experts one after another: 128 experts are 384 small
products per layer and microbatch. Here tokens, which stand sorted by expert, are multiplied with
the weights of all experts by `torch.nn.functional.grouped_mm`. Parameters stay one per expert, so
checkpoints, weights in and out and adapters keep their names. The price is a copy of the weights
next to each other in each pass, which is not kept for the backward pass.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor
from torch.nn.functional import grouped_mm

_ALIGNMENT = 16
"""Bytes of which a row's length must be a multiple: grouped_mm refuses others."""


def group_experts(model: torch.nn.Module) -> None:
    """Lets all experts of a layer run together, in each layer of `model` that has more than one on
    this rank; experts of Transformer Engine stay as they are.

    Raises ValueError for what only one expert after another can do.
    """
    for module in model.modules():
        if type(module) is not SequentialMLP or module.num_local_experts == 1:
            continue
        config = module.config
        for name in ("fp8", "fp4", "gradient_accumulation_fusion", "moe_apply_probs_on_input"):
            if getattr(config, name, None):
                raise ValueError(f"moe_grouped_gemm does not go with {name}; leave one out")
        module.__class__ = GroupedExperts


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
        tokens_per_expert: [experts on this rank], int.
        permuted_probs: [tokens], the router's weight of each token.
        """
        groups = Groups(tokens_per_expert.tolist(), permuted_local_hidden_states.device)
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

    def __init__(self, layers: list[Any], groups: Groups, bias_scale: Tensor | None = None) -> None:
        super().__init__()
        self._arguments = layers, groups, bias_scale

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        layers, groups, bias_scale = self._arguments
        return _multiplied(layers, x, groups, bias_scale), None


class Groups:
    """Bounds of the rows of each group, which stand in order of their group.

    sizes: rows of each group.
    ends: [groups], int32, on the rows' device: the number of rows up to the end of each.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        self.sizes = list(sizes)
        self.ends = torch.tensor(self.sizes).cumsum(0).to(device, torch.int32)


def _multiplied(
    layers: list[Any], x: Tensor, groups: Groups, bias_scale: Tensor | None = None
) -> Tensor:
    """Returns what the layers give for their rows of `x` [rows, in], their biases (times
    `bias_scale` [rows]) and adapters included: [rows, out].
    """

    _await_weights(layers)

    def of_all(x: Tensor, weight_of: Callable[[Any], Tensor]) -> Tensor:
        return grouped_linear(x, [weight_of(layer) for layer in layers], groups)

    result = of_all(x, lambda layer: layer.weight)
    if getattr(layers[0], "adapter", None) is not None:
        update = layers[0].adapter(x, lambda x, of: of_all(x, lambda layer: of(layer.adapter)))
        result = (result + update).to(result.dtype)
    if layers[0].bias is not None:
        sizes = torch.tensor(groups.sizes, device=x.device)
        biases = torch.stack([layer.bias for layer in layers]).to(result.dtype)
        rows = biases.repeat_interleave(sizes, 0, output_size=len(x))
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


def grouped_linear(x: Tensor, weights: Sequence[Tensor], groups: Groups) -> Tensor:
    """Returns `x` [rows, in] times the transpose of its group's weight [out, in]: [rows, out]."""
    return cast(Tensor, _GroupedLinear.apply(x, groups, *weights))


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: Groups, *weights: Tensor) -> Tensor:
        ctx.groups = groups
        ctx.has_x = any(ctx.needs_input_grad[2:])  # frozen weights do not need it
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
            of_weights = _weight_gradients(gradient, inputs[0], groups)
        return of_x, None, *of_weights


def _product(x: Tensor, weights: Sequence[Tensor], groups: Groups, *, transposed: bool) -> Tensor:
    """Returns [rows, in] x transposed weights [out, in], or [rows, out] x the weights."""
    if _is_for_grouped_mm(x, *weights[0].shape):
        stacked = torch.stack(list(weights))
        return grouped_mm(x, stacked.mT if transposed else stacked, offs=groups.ends)
    parts = zip(x.split(groups.sizes), weights)
    return torch.cat([rows @ (weight.mT if transposed else weight) for rows, weight in parts])


def _weight_gradients(gradient: Tensor, x: Tensor, groups: Groups) -> Sequence[Tensor]:
    """[rows, out] and [rows, in] -> for each group [out, in]."""
    if _is_for_grouped_mm(gradient, gradient.shape[-1], x.shape[-1]):
        return grouped_mm(gradient.mT, x, offs=groups.ends).unbind()
    parts = zip(gradient.split(groups.sizes), x.split(groups.sizes))
    return [left.mT @ right for left, right in parts]


def _is_for_grouped_mm(operand: Tensor, *widths: int) -> bool:
    """Returns whether `grouped_mm` takes matrices with rows of these lengths: in bfloat16 (and in
    float32 where no GPU is), and not none.
    """
    dtypes = (torch.bfloat16,) if operand.is_cuda else (torch.bfloat16, torch.float32)
    return (
        operand.dtype in dtypes
        and len(operand) > 0
        and all(width * operand.element_size() % _ALIGNMENT == 0 for width in widths)
    )
