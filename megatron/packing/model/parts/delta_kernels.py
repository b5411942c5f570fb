"""tensor. What flash-linear-attention's kernels of a gated delta net keep and make, as tensors
without values: stand-ins for them in a fake world.

Described after its sources (0.3 to 0.5): the rule keeps its inputs with queries and keys of unit
length, the sums of decays, and a triangular matrix per chunk of 64 tokens. Backward it makes the
states of all chunks again, and their gradients. Without these kernels plain torch computes chunk by
chunk, and keeps several times more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK = 64


class _Rule(torch.autograd.Function):
    """Tensors in the order in which the kernels make them."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        beta: Tensor,
        chunks: int,
    ) -> Tensor:
        query, query_length = _unit(query)
        key, key_length = _unit(key)
        sums = _float32(decay)
        products = decay.new_empty((*decay.shape, CHUNK), dtype=torch.float32)
        solved = torch.empty_like(products, dtype=key.dtype)
        del products
        made = _states(key, value, chunks)
        output = torch.empty_like(value)
        del made
        ctx.save_for_backward(query, query_length, key, key_length, value, sums, beta, solved)
        ctx.chunks, ctx.decay_dtype = chunks, decay.dtype
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, _, key, _, value, sums, beta, _ = ctx.saved_tensors
        made = _states(key, value, ctx.chunks)
        local, of_states = torch.empty_like(value), torch.empty_like(made[0])
        of_written = torch.empty_like(value)
        del local
        of_query, of_key, of_reads = (torch.empty_like(x) for x in (query, key, key))
        of_decay = _float32(sums)
        more_of_key, of_value = torch.empty_like(key), torch.empty_like(value)
        of_beta, more_of_decay = torch.empty_like(beta), _float32(sums)
        del made, of_states, of_written, of_reads, more_of_key, more_of_decay
        summed = _float32(of_decay)
        found = torch.empty_like(of_query), torch.empty_like(of_key)
        return *found, of_value, summed.to(ctx.decay_dtype), of_beta, None


def _unit(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)


def _float32(x: Tensor) -> Tensor:
    return torch.empty_like(x, dtype=torch.float32)


def _states(key: Tensor, value: Tensor, chunks: int) -> tuple[Tensor, ...]:
    """States before each chunk; what tokens read of them and write, and what is new of it."""
    states = key.new_empty(1, chunks, *key.shape[2:], value.shape[-1])
    return states, torch.empty_like(key), torch.empty_like(value), torch.empty_like(value)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        before_silu, of_x = torch.empty_like(x), torch.empty_like(x)
        parts = weight.new_empty(-(-x.shape[1] // CHUNK), *weight.shape, dtype=torch.float32)
        del before_silu
        return of_x, parts.sum(0).to(weight.dtype)


def rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, cu_seqlens: Tensor, **others: Any
) -> tuple[Tensor, None]:
    """Takes the place of `chunk_gated_delta_rule`."""
    # Each sequence's last chunk may be a part of one.
    chunks = v.shape[1] // CHUNK + len(cu_seqlens) - 1
    return _Rule.apply(q, k, v, g, beta, chunks), None


def convolution(x: Tensor, weight: Tensor, **others: Any) -> tuple[Tensor, None]:
    """Takes the place of `causal_conv1d`."""
    return _Convolution.apply(x, weight), None
