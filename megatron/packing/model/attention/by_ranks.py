"""collective. Attention to the keys and values of one context-parallel rank at a time.

    own queries, keys and values                            -> output, log of sums
    for each rank: its keys and values, sent to all ranks   -> merged into them

It is for layers with one group of keys and values on a rank, which `by_groups` cannot go through in
steps. Of another rank's tokens, or of its own other pieces, a piece of queries sees some keys, all
of them whole: only a piece's own keys are behind some of its queries, and these come first. Outputs
are merged by their logs of sums of exponentials, in at least float32, as in ring attention (arXiv
2310.01889).

Zigzag order gives each rank two pieces of work with each other rank's keys. Price: as many bytes as
one all-gather in the forward pass, and in the backward pass as one more and a reduce-scatter.
Memory: keys, values and their gradients are those of one rank, and what a kernel makes is one
head's.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.packing.batch.columns import expand_ranges
from megatron.packing.device import to_device
from megatron.packing.model.attention.blocks import (
    LogSumKernel,
    Segments,
    sink_gradient,
)
from megatron.packing.model.attention.by_groups import KeptOutputs, run_forward
from megatron.packing.model.attention.tree_keys import PackTree, tree_places
from megatron.packing.model.attention.zigzag import Lengths, places_seen


class Source(NamedTuple):
    """Tokens of one rank that this rank's queries attend to, besides those of their own piece."""

    segments: Segments
    """Lengths of the queries and keys below, piece by piece; empty where no query sees any."""
    queries: Tensor | None
    """int64: this rank's tokens that see any; None for all."""
    keys: Tensor
    """int64: their places among that rank's tokens."""


@lru_cache(maxsize=32)
def sources_of(
    lengths: Lengths, tree: PackTree | None, size: int, rank: int, device: torch.device
) -> tuple[Source, ...]:
    """Returns a source for each of `size` ranks, for the queries of `rank`.

    One sequence of 4 on 2 ranks, which hold 0 3 and 1 2: token 3 of rank 0 sees 0 there, and 1 2 of
    rank 1.
    """
    seen = places_seen(lengths, size, rank) if tree is None else tree_places(tree, size, rank)
    num_queries, num_keys = np.array(seen.query_lengths), np.array(seen.key_lengths)
    segment = np.arange(len(num_keys)).repeat(num_keys)
    place = np.arange(len(segment)) - (num_keys.cumsum() - num_keys)[segment]
    is_whole = place < (num_keys - num_queries)[segment]  # behind these stand the piece's own
    starts = num_queries.cumsum() - num_queries
    num_tokens = int(num_queries.sum())
    found = []
    for source in range(size):
        is_here = is_whole & (seen.key_index // num_tokens == source)
        counts = np.bincount(segment[is_here], minlength=len(num_keys))
        takes = counts > 0
        rows = expand_ranges(starts[takes], num_queries[takes])
        queries = None if takes.all() else to_device(torch.from_numpy(rows), device)
        keys = to_device(torch.from_numpy(seen.key_index[is_here] % num_tokens), device)
        pairs = Segments(tuple(num_queries[takes].tolist()), tuple(counts[takes].tolist()))
        found.append(Source(pairs, queries, keys))
    return tuple(found)


class RankSteps(NamedTuple):
    """Kernels and places with which a layer goes through the ranks."""

    group: dist.ProcessGroup
    own: LogSumKernel
    """Kernel of each piece of this rank and that piece's own keys."""
    sources: tuple[tuple[Source, LogSumKernel | None], ...]
    """Tokens of each rank that are seen, and their kernel; None for it where there are none."""
    kept: KeptOutputs | None = None
    """See `GroupSteps`."""
    is_kept_already: bool = False


def attend_by_ranks(
    query: Tensor, keys_values: Tensor, sinks: Tensor | None, steps: RankSteps
) -> Tensor:
    """Returns [t, heads, d_v] for queries [t, heads, d]; collective.

    keys_values: own ones, [t, 1, d + d_v], keys and behind them values. sinks: [heads], or None.
    """
    output: Tensor = _AttendByRanks.apply(query, keys_values, sinks, steps)
    return output


def _sent(own: Tensor, source: int, group: dist.ProcessGroup) -> Tensor:
    """Returns a rank's tensor on all of them; each has one of that shape."""
    sent = own if source == group.rank() else torch.empty_like(own)
    dist.broadcast(sent, dist.get_global_rank(group, source), group=group)
    return sent


def _rows(x: Tensor, index: Tensor | None, dim: int = 0) -> Tensor:
    return x if index is None else x.index_select(dim, index)


def _computed(query: Tensor, keys_values: Tensor, steps: RankSteps) -> tuple[Tensor, Tensor]:
    """Returns output and log of sums of all ranks' keys, without sinks."""
    width, heads = query.shape[-1], query.shape[1]
    output, log_sum = steps.own.forward(query, *keys_values.tensor_split((width,), dim=-1))
    output = output.to(log_sum.dtype)
    for number, (source, kernel) in enumerate(steps.sources):
        theirs = _sent(keys_values, number, steps.group)
        if kernel is None:
            continue
        picked = theirs.index_select(0, source.keys)
        del theirs
        key, value = picked.tensor_split((width,), dim=-1)
        for head in range(heads):
            rows = _rows(query[:, head : head + 1], source.queries)
            found, sums = kernel.forward(rows, key, value)
            before = _rows(log_sum[head], source.queries)
            total = torch.logaddexp(before, sums[0])
            merged = _rows(output[:, head], source.queries) * (before - total).exp().unsqueeze(1)
            merged += found.squeeze(1) * (sums[0] - total).exp().unsqueeze(1)
            place = slice(None) if source.queries is None else source.queries
            log_sum[head, place], output[place, head] = total, merged
            del rows, found, merged  # before the next head's are made
        del picked, key, value
    return output.to(query.dtype), log_sum


class _AttendByRanks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, keys_values: Tensor, sinks: Tensor | None, steps: RankSteps
    ) -> Tensor:
        return run_forward(ctx, _computed, query, keys_values, sinks, steps)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, keys_values, sinks, output, log_sum = ctx.saved_tensors
        steps: RankSteps = ctx.steps
        width, rank = query.shape[-1], steps.group.rank()
        of_query = torch.zeros_like(query, dtype=log_sum.dtype)
        of_own = torch.zeros_like(keys_values, dtype=log_sum.dtype)

        def add(kernel: LogSumKernel, queries: Tensor | None, theirs: Tensor, sums: Tensor) -> None:
            """Adds gradients of queries, and of the keys and values that they see to `sums`."""
            key, value = theirs.tensor_split((width,), dim=-1)
            for head in range(query.shape[1]):
                one = slice(head, head + 1)
                of_rows, of_key, of_value = kernel.backward(
                    _rows(gradient[:, one], queries),
                    (_rows(query[:, one], queries), key, value),
                    _rows(output[:, one], queries),
                    _rows(log_sum[one], queries, 1),
                )
                if queries is None:
                    of_query[:, one] += of_rows
                else:
                    of_query[:, one].index_add_(0, queries, of_rows.to(of_query.dtype))
                sums[..., :width] += of_key
                sums[..., width:] += of_value
                del of_rows, of_key, of_value  # before the next head's are made

        add(steps.own, None, keys_values, of_own)
        for number, (source, kernel) in enumerate(steps.sources):
            theirs = _sent(keys_values, number, steps.group)
            of_theirs = torch.zeros_like(of_own)
            if kernel is not None:
                picked = theirs.index_select(0, source.keys)
                of_picked = torch.zeros_like(picked, dtype=of_own.dtype)
                add(kernel, source.queries, picked, of_picked)
                of_theirs.index_add_(0, source.keys, of_picked)
                del picked, of_picked
            del theirs
            sent = of_theirs.to(keys_values.dtype)
            del of_theirs
            dist.reduce(sent, dist.get_global_rank(steps.group, number), group=steps.group)
            if number == rank:
                of_own += sent
            del sent
        of_sinks = None
        if sinks is not None and ctx.needs_input_grad[2]:
            of_sinks = sink_gradient(gradient, output, log_sum, sinks)
        return of_query.to(query.dtype), of_own.to(keys_values.dtype), of_sinks, None
