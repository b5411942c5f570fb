"""tensor. Cross entropy of hidden states, of which rows and logits exist for a chunk at a time.

for each chunk: rows [c, h], gathered where tensor-parallel ranks share tokens
    -> logits [c, v / tensor-parallel size]
    -> log of the sum of exponentials, logit of the label
-> losses [n]
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.packing.device import Device
from megatron.packing.model.multipliers import LogitRule

FUSED = "megatron.packing.model.loss.fused_cross_entropy"
"""Name of the module of kernels."""
_CHUNK_LOGITS = 1 << 28
"""Logits of a chunk, at most: 2,048 tokens' of 131,072 words. The gradient of the weight is added
up from chunk to chunk, which for fewer tokens at a time would cost as much as their products.

In bfloat16 they are 0.5 GiB as products and 1 GiB in float32, at once. Kernels keep the products
alone, and take twice as many: 1 GiB, and half the passes over the gradient of the weight.
"""


class Words(NamedTuple):
    """Rules by which products of hidden states and weights become logits of words."""

    num_words: int | None
    """Rows of the weight from that one on are no words; None where all are."""
    rule: LogitRule
    is_fused: bool = False
    """True if kernels of `fused_cross_entropy` compute losses from logits. The rule must be plain:
    the kernels know no factor and no cap.
    """
    keeps_logits: bool = False
    """True if logits of all chunks are kept for the backward pass, as far as they can be."""
    device: Device | None = None
    """Whose kernels compute losses and gradients; None for that of the hidden states."""

    def num_here(self, first: int, num_rows: int) -> int:
        """Returns how many of `num_rows` rows of the weight, from `first` on, are words."""
        return num_rows if self.num_words is None else min(max(self.num_words - first, 0), num_rows)


class Rows(NamedTuple):
    """Rows of hidden states that have losses, and where tensor-parallel ranks hold them."""

    places: Tensor
    """int64 [n]: places among the tokens of all ranks, each at most once."""
    group: dist.ProcessGroup
    """Tensor-parallel ranks. Each has logits of its words, so that gradients are summed."""
    is_split: bool
    """True if ranks hold equal shares of the tokens, one after the other (sequence parallel)."""

    def take(self, states: Tensor, part: slice) -> Tensor:
        """Returns a chunk [c, h] of the rows, of this rank's tokens [t, h]; collective where they
        are split: other ranks' rows are zeros here, and ranks are summed.
        """
        index = self.places[part]
        if not self.is_split:
            return states.index_select(0, index)
        # 8 tokens on 2 ranks: row 5 is row 1 of rank 1; rank 0 adds zeros in the place of its own
        rows = states.index_select(0, index % len(states))
        rows.masked_fill_(~self._is_here(index, len(states)), 0.0)
        if len(index):
            dist.all_reduce(rows, group=self.group)
        return rows

    def add_(self, of_states: Tensor, of_rows: Tensor, part: slice) -> None:
        """Adds the gradient of a chunk, summed over ranks, to that of this rank's tokens;
        `of_rows` is written over.
        """
        index = self.places[part]
        if self.group.size() > 1 and len(index):
            dist.all_reduce(of_rows, group=self.group)
        if self.is_split:
            of_rows.masked_fill_(~self._is_here(index, len(of_states)), 0.0)
            index = index % len(of_states)
        of_states.index_add_(0, index, of_rows)

    def _is_here(self, index: Tensor, num_tokens: int) -> Tensor:
        """Returns bool [c, 1]: whether a row is of this rank's tokens."""
        return (index // num_tokens == self.group.rank()).unsqueeze(1)


def likeliest_words(
    states: Tensor,
    weight: Tensor,
    words: Words,
    group: dist.ProcessGroup,
    rows: Rows | None = None,
) -> Tensor:
    """Returns the word with the largest logit for each row of hidden states, int64 [n]; of equal
    ones the first. Collective over tensor parallel.

    rows: those that are wanted; None for all.
    """
    first = group.rank() * weight.shape[0]
    plain = words._replace(is_fused=False)
    num_rows = len(states) if rows is None else len(rows.places)
    chunks = _Chunks(num_rows, states, weight, words.num_here(first, weight.shape[0]), plain)
    best = states.new_full((num_rows,), -torch.inf, dtype=chunks.dtype)
    found = torch.zeros(num_rows, dtype=torch.int64, device=states.device)
    for part in chunks.parts:
        chunk = states[part] if rows is None else rows.take(states, part)
        best[part], found[part] = chunks.logits(chunk, weight).max(1)
    found += first
    if group.size() == 1 or not num_rows:
        return found
    all_best, all_found = (
        [torch.empty_like(own) for _ in range(group.size())] for own in (best, found)
    )
    dist.all_gather(all_best, best, group=group)
    dist.all_gather(all_found, found, group=group)
    rank = torch.stack(all_best).argmax(0, keepdim=True)
    return torch.stack(all_found).gather(0, rank).squeeze(0)


class CrossEntropy(torch.autograd.Function):
    """Cross entropy of rows of hidden states, whose logits exist for one chunk at a time.

    With `rows` hidden states are all tokens of this rank, and a chunk's rows are taken when it is
    computed, in both passes; the gradient is that of these tokens. Without, hidden states are the
    rows, and the gradient is this rank's part, of its words. Where there is one chunk,
    its exponentials (fused: logits) are kept for the backward pass; of several, logits are computed
    again, which is a quarter of all products, or kept on demand. What is as large as logits is
    changed in place: on CPU, new memory costs as much as the arithmetic.
    """

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        labels: Tensor,
        words: Words,
        group: dist.ProcessGroup,
        rows: Rows | None = None,
    ) -> tuple[Tensor, Tensor]:
        first = group.rank() * weight.shape[0]
        num_here = words.num_here(first, weight.shape[0])
        is_here = (labels >= first) & (labels < first + num_here)
        labels_here = (labels - first).where(is_here, 0).unsqueeze(1)
        ctx.chunks = chunks = _Chunks(len(labels), states, weight, num_here, words)
        ctx.rows = rows
        ctx.device = words.device or Device.at(states.device)
        log_sum, largest, of_label = torch.empty(
            3, len(labels), dtype=chunks.dtype, device=states.device
        )
        # Of exponentials the slope of a cap is not to be had.
        is_kept = (words.keeps_logits or len(chunks.parts) == 1) and words.rule.softcap is None
        ctx.kept = []
        for part in chunks.parts:
            chunk = states[part] if rows is None else rows.take(states, part)
            logits = (chunks.products if words.is_fused else chunks.logits)(chunk, weight)
            del chunk
            if is_kept:
                ctx.kept.append(logits)
            if words.is_fused:
                own = _labels_or_none(labels_here[part], is_here[part])
                log_sum[part], largest[part], of_label[part] = _fused(ctx.device).row_statistics(
                    logits, own, num_here
                )
            else:
                of_label[part] = logits.gather(1, labels_here[part]).squeeze(1)
                # A rank without words of its own has a maximum of -inf.
                largest[part] = logits.amax(1).clamp_(min=torch.finfo(logits.dtype).min)
                log_sum[part] = (
                    logits.sub_(largest[part].unsqueeze(1)).exp_().sum(1).log_() + largest[part]
                )
            del logits  # before the next chunk's are made
        ctx.is_fused = words.is_fused
        of_label = of_label.where(is_here, 0.0)
        largest_of_all = largest
        if group.size() > 1 and len(labels):
            most = torch.stack((log_sum, largest))
            dist.all_reduce(most, dist.ReduceOp.MAX, group)
            of_all, largest_of_all = most
            both = torch.stack(((log_sum - of_all).exp(), of_label))
            dist.all_reduce(both, group=group)
            log_sum, of_label = both[0].log() + of_all, both[1]
        ctx.save_for_backward(states, weight, labels_here, is_here, log_sum, largest)
        is_right = of_label >= largest_of_all
        ctx.mark_non_differentiable(is_right)
        return log_sum - of_label, is_right

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        states, weight = ctx.saved_tensors[:2]
        chunks, kept, rows = ctx.chunks, ctx.kept, ctx.rows
        ctx.kept = []  # written over below, and each freed behind its chunk
        of_states = (torch.empty_like if rows is None else torch.zeros_like)(states)
        of_weight: Tensor | None = None
        dtype = weight.dtype if len(chunks.parts) == 1 else chunks.dtype
        for part in chunks.parts:
            chunk = states[part] if rows is None else rows.take(states, part)
            of_logits = (_fused_gradients if ctx.is_fused else _gradients)(
                ctx, gradient, kept.pop(0) if kept else None, chunk, part
            )
            of_logits = of_logits.to(weight.dtype)
            if ctx.needs_input_grad[1]:
                of_weight = _add_product(of_weight, of_logits.t(), chunk, dtype, ctx.device)
            if rows is None:
                torch.mm(of_logits, weight, out=of_states[part])
            else:
                rows.add_(of_states, torch.mm(of_logits, weight, out=chunk), part)
            del of_logits, chunk  # before the next chunk's are made
        of_weight = None if of_weight is None else of_weight.to(weight.dtype)
        return of_states, of_weight, *[None] * 4


def _add_product(
    total: Tensor | None, left: Tensor, right: Tensor, dtype: torch.dtype, device: Device
) -> Tensor:
    """Returns `total + left @ right` in `dtype`, written over `total`; None stands for zeros.

    Where factors are in half precision and `dtype` is float32, CUDA adds within the product:
    nothing is rounded to half precision, and no product of as many numbers as `total` is written
    and read again. A CPU has no such product.
    """
    if left.dtype == dtype:
        return left @ right if total is None else total.addmm_(left, right)
    if device.is_gpu:
        if total is None:
            return torch.mm(left, right, out_dtype=dtype)
        return torch.addmm(total, left, right, out_dtype=dtype, out=total)
    product = left @ right
    return product.to(dtype) if total is None else total.add_(product)


def _gradients(
    ctx: Any, gradient: Tensor, kept: Tensor | None, chunk: Tensor, part: slice
) -> Tensor:
    """Returns the gradients of a chunk's logits; written over `kept` where that is not None."""
    _, weight, labels_here, is_here, log_sum, largest = ctx.saved_tensors
    chunks = ctx.chunks
    # The gradient of a logit is its probability, less one for the label, times that of the loss.
    capped = None
    if kept is not None:
        of_logits = kept.mul_((gradient * (largest - log_sum).exp())[part].unsqueeze(1))
    else:
        of_logits = chunks.logits(chunk, weight)
        capped = of_logits.clone() if chunks.rule.softcap is not None else None
        of_logits.sub_(log_sum[part].unsqueeze(1)).exp_()
        of_logits.mul_(gradient[part].unsqueeze(1))
    of_logits.scatter_add_(1, labels_here[part], -(gradient * is_here)[part].unsqueeze(1))
    if not chunks.rule.is_plain:
        chunks.rule.chain_(of_logits, of_logits if capped is None else capped)
    return of_logits


def _fused_gradients(
    ctx: Any, gradient: Tensor, kept: Tensor | None, chunk: Tensor, part: slice
) -> Tensor:
    """Does as `_gradients`, in the precision of the states."""
    _, weight, labels_here, is_here, log_sum, _ = ctx.saved_tensors
    of_logits: Tensor = ctx.chunks.products(chunk, weight) if kept is None else kept
    own = _labels_or_none(labels_here[part], is_here[part])
    of_loss = gradient[part].contiguous()
    _fused(ctx.device).write_gradients(of_logits, own, log_sum[part], of_loss, ctx.chunks.num_here)
    return of_logits


def _labels_or_none(labels: Tensor, is_here: Tensor) -> Tensor:
    """Returns labels as `fused_cross_entropy` wants them: -1 for words of other ranks."""
    return labels.squeeze(1).masked_fill(~is_here, -1)


def _fused(device: Device) -> Any:
    """Returns the module of kernels, which needs `triton`."""
    return device.kernels(FUSED)


class _Chunks:
    """The rows of each chunk, and how their logits are computed."""

    def __init__(
        self, num_rows: int, states: Tensor, weight: Tensor, num_here: int, words: Words
    ) -> None:
        self.dtype = torch.promote_types(states.dtype, torch.float32)
        most = _CHUNK_LOGITS * (2 if words.is_fused and states.dtype != self.dtype else 1)
        size = max(1, most // weight.shape[0])
        # Of no rows there is one chunk, whose sums are zeros.
        self.parts = [slice(start, start + size) for start in range(0, max(1, num_rows), size)]
        self.rule, self.num_here = words.rule, num_here

    def logits(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Returns [rows of a chunk, words of this rank] in at least float32; those that are no
        words are minus infinity.
        """
        logits = self.rule.apply_(self.products(rows, weight).to(self.dtype))
        logits[:, self.num_here :] = -torch.inf
        return logits

    def products(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Returns [rows of a chunk, rows of the weight] in the precision of both."""
        return rows @ weight.t()
