"""tensor. Exact causal attention of a pack's segments in plain torch, a block of queries at a time.

It takes everything that a layer may ask for (see `Scores`), on any device and in any precision, and
keeps no more scores in memory than one block's. `attend` adds sinks to any kernel that gives the
logarithm of the sum of exponentials, this one or a GPU's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megatron.packing.model.attention.zigzag import Lengths

_BLOCK_SCORES = 1 << 21
"""Scores of a block over all heads, at most: 8 MiB in float32, which a processor's cache holds."""
_SINK_NUMBERS = 1 << 26
"""Numbers of an output that the gradient of sinks is computed from at once: 256 MiB in float32."""
_MIN_QUERIES, _MAX_QUERIES = 16, 256


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Rules by which a layer makes scores of queries and keys."""

    scale: float
    """Factor of the products."""
    window: int | None = None
    """Tokens that a query sees, its own included; None for all before it."""
    softcap: float | None = None
    """Scaled scores x become softcap * tanh(x / softcap)."""
    is_causal: bool = True
    """False if queries see all keys of their segment; there is no window then."""


class Segments(NamedTuple):
    """Queries and keys of each segment; the last query of a segment sees its last key."""

    query_lengths: Lengths
    key_lengths: Lengths

    @classmethod
    def square(cls, lengths: Lengths) -> Segments:
        """Returns those of whole sequences."""
        return cls(lengths, lengths)


class LogSumKernel(Protocol):
    """Attention whose backward pass is a function of the output and the log of the sum of
    exponentials."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the output [t, heads, d] and the log of the sum of exponentials [heads, t]."""

    def backward(
        self, gradient: Tensor, inputs: tuple[Tensor, ...], output: Tensor, log_sum: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the gradients of query, key and value, where shares are exp(score - log_sum)."""


def attend(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, kernel: LogSumKernel
) -> Tensor:
    """Returns what `kernel` computes, where each head's `sinks` takes part in the softmax as the
    score of one more key without a value.

    sinks: [heads], or None for none.
    """
    return _Attend.apply(query, key, value, sinks, kernel)


def add_sinks(output: Tensor, log_sum: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns a kernel's output [t, heads, d] and log of sums [heads, t] with the sinks' part.

    A sink multiplies the output by exp(log_sum - with_sink). Kernels make shares of scores and
    `log_sum` again in their backward pass: given `with_sink` and the new output in place of their
    own, their formulas are those of the softmax with the sink.
    """
    if sinks is None:
        return output, log_sum
    with_sink = torch.logaddexp(log_sum, sinks.to(log_sum.dtype).unsqueeze(1))
    # In place: a product in float32 would be twice as large as the output.
    return output.mul_((log_sum - with_sink).exp().t().unsqueeze(2)), with_sink


def sink_gradient(gradient: Tensor, output: Tensor, log_sum: Tensor, sinks: Tensor) -> Tensor:
    """Returns the gradient of sinks [heads] from that of the output, of what `add_sinks` gave."""
    share = (sinks.to(log_sum.dtype).unsqueeze(1) - log_sum).exp()
    products = torch.empty_like(log_sum)
    # A few heads at a time: as float32 both would be four times as large as the output.
    size = max(_SINK_NUMBERS // max(output.shape[0] * output.shape[2], 1), 1)
    for start in range(0, output.shape[1], size):
        part = slice(start, start + size)
        of_output, own = gradient[:, part].to(log_sum.dtype), output[:, part].to(log_sum.dtype)
        products[part] = (of_output * own).sum(-1).t()
    return -(share * products).sum(1).to(sinks.dtype)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        kernel: LogSumKernel,
    ) -> Tensor:
        output, log_sum = add_sinks(*kernel.forward(query, key, value), sinks)
        ctx.save_for_backward(query, key, value, sinks, output, log_sum)
        ctx.kernel = kernel
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, output, log_sum = ctx.saved_tensors
        of_inputs = ctx.kernel.backward(gradient, (query, key, value), output, log_sum)
        of_sinks = None
        if sinks is not None and ctx.needs_input_grad[3]:
            of_sinks = sink_gradient(gradient, output, log_sum, sinks)
        return *of_inputs, of_sinks, None


class _Block(NamedTuple):
    """Queries, and the keys that any of them sees."""

    queries: slice
    keys: slice
    hidden: Tensor | None
    """bool [queries, keys]: pairs that are not seen; None where all are."""


@dataclass(frozen=True)
class BlockKernel:
    """Attention in blocks of queries, computed in at least float32."""

    segments: Segments
    scores: Scores
    num_heads: int | None = None
    """Heads of the layer, if it is called for some of them at a time: blocks are then those of all,
    and so are sums to the bit.
    """

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """See `LogSumKernel`."""
        wide = torch.promote_types(query.dtype, torch.float32)
        output = query.new_empty(*query.shape[:2], value.shape[2])
        log_sum = query.new_empty(query.shape[1], len(query), dtype=wide)
        for block in self._blocks(query):
            scores, _ = self._scores(query, key, block)
            # The largest is subtracted before `exp`, in place: a block's scores are the memory that
            # this takes.
            largest = scores.amax(-1, keepdim=True)
            total = scores.sub_(largest).exp_().sum(-1, keepdim=True)
            found = scores @ _by_group(value, block.keys, wide) / total
            output[block.queries] = _by_token(found, query.shape[1])
            log_sum[:, block.queries] = (total.log_() + largest).view(query.shape[1], -1)
        return output, log_sum

    def backward(
        self, gradient: Tensor, inputs: tuple[Tensor, ...], output: Tensor, log_sum: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `LogSumKernel`."""
        query, key, value = inputs
        wide, heads, groups = log_sum.dtype, query.shape[1], key.shape[1]
        of_query = torch.zeros_like(query)
        of_key, of_value = (torch.zeros_like(x, dtype=wide) for x in (key, value))
        for block in self._blocks(query):
            scores, slope = self._scores(query, key, block)
            keys, values = _by_group(key, block.keys, wide), _by_group(value, block.keys, wide)
            # Shares are made again from the scores, as none were kept.
            sums = log_sum[:, block.queries].reshape(groups, -1, 1)
            shares = scores.sub_(sums).exp_()
            of_output = _by_group(gradient, block.queries, wide, groups)
            # Softmax: the gradient of a score is its share times what its value gains over `delta`,
            # the mean gain of all values, which is the product of gradient and output.
            delta = (of_output * _by_group(output, block.queries, wide, groups)).sum(-1, True)
            of_value[block.keys] += (shares.mT @ of_output).transpose(0, 1)
            of_scores = shares.mul_((of_output @ values.mT).sub_(delta)).mul_(self.scores.scale)
            if slope is not None:
                of_scores.mul_(slope)
            of_query[block.queries] = _by_token(of_scores @ keys, heads)
            rows = _by_group(query, block.queries, wide, groups)
            of_key[block.keys] += (of_scores.mT @ rows).transpose(0, 1)
        return of_query, of_key.to(key.dtype), of_value.to(value.dtype)

    def _blocks(self, query: Tensor) -> Iterator[_Block]:
        """Worked example: 3 queries of 5 keys with a window of 2 see keys 1-2, 2-3 and 3-4, so a
        block of the last two queries takes keys 2-4 and hides one pair in each row.
        """
        query_end = key_end = 0
        window, num_heads = self.scores.window, self.num_heads or query.shape[1]
        for num_queries, num_keys in zip(*self.segments, strict=True):
            query_start, query_end = query_end, query_end + num_queries
            key_start, key_end = key_end, key_end + num_keys
            # As many queries as keep a block's scores in the cache; with a window a block of q
            # queries takes at most window + q keys.
            reach = min(num_keys, num_keys if window is None else window + _MAX_QUERIES)
            size = _BLOCK_SCORES // max(num_heads * reach, 1)
            size = min(max(size, _MIN_QUERIES), _MAX_QUERIES)
            for start in range(query_start, query_end, size):
                stop = min(start + size, query_end)
                # The key that stands where a query does: bottom right of both ends.
                first, last = key_end - query_end + start, key_end - query_end + stop
                low = key_start if window is None else max(key_start, first - window + 1)
                if not self.scores.is_causal:
                    yield _Block(slice(start, stop), slice(key_start, key_end), None)
                    continue
                yield _Block(
                    slice(start, stop),
                    slice(low, last),
                    _hidden(first - low, stop - start, last - low, window, query.device),
                )

    def _scores(self, query: Tensor, key: Tensor, block: _Block) -> tuple[Tensor, Tensor | None]:
        """Returns scores [groups, heads of a group * queries, keys], and with a soft cap its slope
        at each."""
        wide, groups = torch.promote_types(query.dtype, torch.float32), key.shape[1]
        rows = _by_group(query, block.queries, wide, groups) * self.scores.scale
        scores, slope = rows @ _by_group(key, block.keys, wide).mT, None
        if self.scores.softcap is not None:
            scores.div_(self.scores.softcap).tanh_()
            slope = 1 - scores.square()
            scores.mul_(self.scores.softcap)
        if block.hidden is not None:
            # Rows are heads of a group times queries; all heads hide the same pairs.
            by_head = scores.view(groups, -1, *block.hidden.shape)
            by_head.masked_fill_(block.hidden, -torch.inf)
        return scores, slope


def _hidden(
    offset: int, num_queries: int, num_keys: int, window: int | None, device: torch.device
) -> Tensor | None:
    """Returns bool [queries, keys], True where a query must not see a key; None where it sees all.

    offset: the place of the first query among the keys. 2 queries of 3 keys from offset 1 on:
    [[0, 0, 1], [0, 0, 0]], with a window of 2 [[0, 0, 1], [1, 0, 0]].
    """
    is_cut = window is not None and num_keys > window
    if num_queries == 1 and not is_cut:
        return None
    everything = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    hidden = everything.triu(offset + 1)
    return hidden | everything.tril(offset - window) if is_cut and window else hidden


def _by_group(x: Tensor, rows: slice, dtype: torch.dtype, groups: int | None = None) -> Tensor:
    """[t, heads, d] -> [groups, heads of a group * rows, d]; groups: None for as many as heads."""
    part = x[rows].to(dtype).transpose(0, 1)
    return part if groups is None else part.reshape(groups, -1, x.shape[2])


def _by_token(x: Tensor, heads: int) -> Tensor:
    """[groups, heads of a group * rows, d] -> [rows, heads, d]."""
    return x.reshape(heads, -1, x.shape[2]).transpose(0, 1)
