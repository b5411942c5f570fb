"""tensor. Attention of a few query groups at a time, whose keys and values are collected for that
step alone: gathered over context parallel, picked for the nodes of trees.

    for each step: own keys and values of its groups -> collected -> kernel -> output, log of sums

The backward pass collects them again, so what a layer keeps is its own queries, keys and values,
its output and the log of sums, whatever the number of ranks or nodes. Output and gradients are
those of all groups at once to the bit, as no head of one group reads keys of another.

Price: one more all-gather per layer. Memory: what is collected, its gradients and the kernel's
workspace are those of one step. The idea of going through heads in turn is that of UPipe (arXiv
2602.21196), which does so with all-to-alls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megatron.packing.model.attention.blocks import LogSumKernel, add_sinks, sink_gradient


class KeptOutputs(Protocol):
    """Outputs of attention that are kept elsewhere from the forward pass of a layer to its
    recomputation.
    """

    is_open: bool
    """True in a forward pass whose layers will be recomputed."""

    def put(self, output: Tensor, log_sum: Tensor) -> None:
        """Keeps what a layer has computed."""

    def take(self) -> tuple[Tensor, Tensor]:
        """Returns what the layer that is recomputed had computed."""


class GroupSteps(NamedTuple):
    """How a layer goes through its query groups."""

    num_groups: int
    """Groups of each step, at least 1."""
    collect: Callable[[Tensor], Tensor]
    """Function from own keys and values of some groups, [t, groups, d + d_v], to all that queries
    attend to, [T, groups, d + d_v]. It is differentiable, and may be collective.
    """
    kernel: LogSumKernel
    kept: KeptOutputs | None = None
    """Where its output is kept; None where it is not."""
    is_kept_already: bool = False
    """True in a recomputation, which then computes nothing."""


def attend_by_groups(
    query: Tensor, keys_values: Tensor, sinks: Tensor | None, steps: GroupSteps
) -> Tensor:
    """Returns [t, heads, d_v] for queries [t, heads, d].

    keys_values: own ones, [t, groups, d + d_v], keys and behind them values. sinks: [heads], or
    None for none; see `blocks.attend`.
    """
    output: Tensor = _AttendByGroups.apply(query, keys_values, sinks, steps)
    return output


def _slices(query: Tensor, keys_values: Tensor, size: int) -> Iterator[tuple[slice, slice]]:
    """Yields the heads and the groups of each step.

    6 heads in 3 groups, 2 groups a step    ->    heads 0:4, groups 0:2; heads 4:6, groups 2:3
    """
    groups = keys_values.shape[1]
    per_group = query.shape[1] // groups
    for start in range(0, groups, size):
        stop = min(start + size, groups)
        yield slice(start * per_group, stop * per_group), slice(start, stop)


def _computed(query: Tensor, keys_values: Tensor, steps: GroupSteps) -> tuple[Tensor, Tensor]:
    """Returns output and log of sums of all steps, without sinks."""
    width = query.shape[-1]
    output = query.new_empty(*query.shape[:2], keys_values.shape[-1] - width)
    log_sums = []
    for heads, groups in _slices(query, keys_values, steps.num_groups):
        key, value = steps.collect(keys_values[:, groups]).tensor_split((width,), dim=-1)
        output[:, heads], log_sum = steps.kernel.forward(query[:, heads], key, value)
        del key, value  # before the next step's are collected
        log_sums.append(log_sum)
    return output, torch.cat(log_sums)


def _joined(parts: list[Tensor]) -> Tensor:
    """Returns the heads of all steps; `parts` is emptied. Nothing is copied of one step."""
    whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    parts.clear()
    return whole


def run_forward(
    ctx: Any,
    computed: Callable[[Tensor, Tensor, Any], tuple[Tensor, Tensor]],
    query: Tensor,
    keys_values: Tensor,
    sinks: Tensor | None,
    steps: Any,
) -> Tensor:
    """Returns the output of `computed` with sinks, or the one that `steps` have kept, and saves for
    the backward pass what an attention in steps needs there.
    """
    if steps.kept is not None and steps.is_kept_already:
        output, log_sum = steps.kept.take()
    else:
        output, log_sum = add_sinks(*computed(query, keys_values, steps), sinks)
        if steps.kept is not None:
            steps.kept.put(output, log_sum)
    ctx.save_for_backward(query, keys_values, sinks, output, log_sum)
    ctx.steps = steps
    return output  # type: ignore[no-any-return]


class _AttendByGroups(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, keys_values: Tensor, sinks: Tensor | None, steps: GroupSteps
    ) -> Tensor:
        return run_forward(ctx, _computed, query, keys_values, sinks, steps)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, keys_values, sinks, output, log_sum = ctx.saved_tensors
        steps: GroupSteps = ctx.steps
        of_query, of_keys_values = list[Tensor](), list[Tensor]()
        for heads, groups in _slices(query, keys_values, steps.num_groups):
            own = keys_values[:, groups].detach().requires_grad_()
            with torch.enable_grad():
                collected = steps.collect(own)
            inputs = (
                query[:, heads],
                *collected.detach().tensor_split((query.shape[-1],), dim=-1),
            )
            of_heads, *of_collected = steps.kernel.backward(
                gradient[:, heads], inputs, output[:, heads], log_sum[heads]
            )
            of_query.append(of_heads)
            del inputs, of_heads
            # Sums over a token's places in nodes, then over ranks.
            (of_own,) = torch.autograd.grad(collected, own, torch.cat(of_collected, dim=-1))
            of_keys_values.append(of_own)
            del collected, of_collected, of_own
        of_sinks = None
        if sinks is not None and ctx.needs_input_grad[2]:
            of_sinks = sink_gradient(gradient, output, log_sum, sinks)
        return _joined(of_query), _joined(of_keys_values), of_sinks, None
