"""tensor. Attention of a few heads at a time, whose keys and values are made from narrow vectors
for that step alone, as latent attention makes them.

    own vectors -> gathered, once                                   one for all heads
    for each step: gathered -> keys and values of its heads -> kernel -> output, log of sums

The backward pass gathers again, and makes them again. What a layer keeps is its queries, its own
vectors, its output and the log of sums. Price: the making once more, and one more gather. Gradients
of vectors and parameters are summed over steps in at least float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.packing.model.attention.blocks import LogSumKernel
from megatron.packing.model.attention.by_groups import KeptOutputs


class HeadSteps(NamedTuple):
    """How a layer goes through its heads."""

    num_heads: int
    """Heads of each step, at least 1."""
    gather: Callable[[Tensor], Tensor]
    """Function from own vectors [t, c] to those of all tokens [T, c]; may be collective."""
    make: Callable[[Tensor, slice], Tensor]
    """Function from these and the step's heads to keys and behind them values that own queries
    attend to, [K, heads, d + d_v]. Both functions are differentiable.
    """
    kernel: LogSumKernel
    kept: KeptOutputs | None = None
    """See `GroupSteps`."""
    is_kept_already: bool = False


def attend_by_heads(
    query: Tensor, vectors: Tensor, parameters: Sequence[Tensor], steps: HeadSteps
) -> Tensor:
    """Returns [t, heads, d_v] for queries [t, heads, d] and own vectors [t, c].

    parameters: those that `make` computes with.
    """
    output: Tensor = _AttendByHeads.apply(steps, query, vectors, *parameters)
    return output


def _heads(query: Tensor, size: int) -> Iterator[slice]:
    for start in range(0, query.shape[1], size):
        yield slice(start, min(start + size, query.shape[1]))


def _computed(query: Tensor, vectors: Tensor, steps: HeadSteps) -> tuple[Tensor, Tensor]:
    gathered, outputs, log_sums = steps.gather(vectors), [], []
    for heads in _heads(query, steps.num_heads):
        made = steps.make(gathered, heads)
        key, value = made.tensor_split((query.shape[-1],), dim=-1)
        output, log_sum = steps.kernel.forward(query[:, heads], key, value)
        outputs.append(output)
        log_sums.append(log_sum)
        del made, key, value  # before the next step's are made
    return torch.cat(outputs, dim=1), torch.cat(log_sums)


class _AttendByHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, steps: HeadSteps, query: Tensor, vectors: Tensor, *parameters: Tensor
    ) -> Tensor:
        if steps.kept is not None and steps.is_kept_already:
            output, log_sum = steps.kept.take()
        else:
            output, log_sum = _computed(query, vectors, steps)
            if steps.kept is not None:
                steps.kept.put(output, log_sum)
        ctx.save_for_backward(query, vectors, output, log_sum)
        ctx.steps, ctx.parameters = steps, parameters
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, vectors, output, log_sum = ctx.saved_tensors
        steps: HeadSteps = ctx.steps
        own = vectors.detach().requires_grad_()
        with torch.enable_grad():
            gathered = steps.gather(own)
        leaf = gathered.detach().requires_grad_()
        wanted = [leaf, *(p for p in ctx.parameters if p.requires_grad)]
        sums = [torch.zeros_like(x, dtype=log_sum.dtype) for x in wanted]
        of_query = torch.empty_like(query)
        for heads in _heads(query, steps.num_heads):
            with torch.enable_grad():
                made = steps.make(leaf, heads)
            inputs = (query[:, heads], *made.detach().tensor_split((query.shape[-1],), dim=-1))
            of_query[:, heads], *of_made = steps.kernel.backward(
                gradient[:, heads], inputs, output[:, heads], log_sum[heads]
            )
            del inputs
            found = torch.autograd.grad(made, wanted, torch.cat(of_made, dim=-1))
            for total, part in zip(sums, found, strict=True):
                total.add_(part)
            del made, of_made, found, part  # before the next step's are made
        of_gathered, *of_wanted = (total.to(x.dtype) for total, x in zip(sums, wanted))
        (of_vectors,) = torch.autograd.grad(gathered, own, of_gathered)
        of_parameters = [of_wanted.pop(0) if p.requires_grad else None for p in ctx.parameters]
        return None, of_query, of_vectors, *of_parameters
