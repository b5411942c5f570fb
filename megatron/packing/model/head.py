"""mcore. The output layer and the cross entropy of a GPTModel for the tokens that count, in chunks.

In fine-tuning half of the tokens or more are masked, and logits are the largest tensor of a step:
[tokens, vocabulary]. Here hidden states of masked tokens are left out before the output layer, and
the others go through it and the cross entropy a chunk at a time, forward and again backward. Losses
and gradients are exactly those of all tokens at once.

    hidden [t, h] -> gather over tensor parallel where it is split -> rows that count [n, h]
    for each chunk of them: logits [c, v / tensor-parallel size]
        -> log of the sum of exponentials, logit of the label
    -> losses [n] -> [b, s]
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from megatron.packing.model.multipliers import PLAIN, LogitRule

MASKED_LABEL = -100
"""The label of a token that has no loss, as HuggingFace's."""
_CHUNK_LOGITS = 1 << 28
"""Logits of a chunk, at most: 2,048 tokens' of 131,072 words, 1 GiB. The gradient of the weight is
added up from chunk to chunk, which for fewer tokens at a time would cost as much as their products.
"""


def skip_masked_tokens(
    gpt: GPTModel, num_words: int | None = None, rule: LogitRule = PLAIN
) -> bool:
    """Lets `gpt` compute logits and losses of unmasked tokens alone, wherever it is given labels;
    returns False where it can't.

    Its forward pass must be given `loss_mask` beside `labels`, by name; the losses that it returns,
    [b, s], are zero where tokens are masked. Layers that predict further tokens still have logits
    for all. num_words: logits from that one on are minus infinity (padding of the vocabulary); None
    for no such rows. rule: see `multipliers`. It can't where loss or output layer are not
    megatron-core's plain ones: fused losses, weights whose gradients are deferred, classes of your
    own.
    """
    if not gpt.post_process or hasattr(gpt, "masked_tokens_head"):
        return gpt.post_process
    is_plain = (
        type(gpt).compute_language_model_loss is LanguageModule.compute_language_model_loss
        and type(gpt.output_layer).forward is ColumnParallelLinear.forward
        and gpt.output_layer.bias is None
        and not gpt.output_layer.gather_output
        and not gpt.config.cross_entropy_loss_fusion
        and not gpt.config.defer_embedding_wgrad_compute
    )
    if is_plain:
        gpt.masked_tokens_head = _Head(gpt, num_words, rule)
    return is_plain


class Hidden(NamedTuple):
    """Stands for the logits between output layer and loss: what they are computed from."""

    states: Tensor
    """[s, b, h]; with sequence parallel this rank's part."""
    weight: Tensor
    """[v / tensor-parallel size, h]."""


class Words(NamedTuple):
    """Rules by which products of hidden states and weights become logits of words."""

    num_words: int | None
    """Rows of the weight from that one on are no words; None where all are."""
    rule: LogitRule

    def num_here(self, first: int, num_rows: int) -> int:
        """Returns how many of `num_rows` rows of the weight, from `first` on, are words."""
        return num_rows if self.num_words is None else min(max(self.num_words - first, 0), num_rows)


class _Head:
    """Takes the place of a model's output layer and loss, in calls with labels."""

    def __init__(self, gpt: GPTModel, num_words: int | None, rule: LogitRule) -> None:
        self._layer, self._words = gpt.output_layer, Words(num_words, rule)
        self._plain_layer = gpt.output_layer.forward
        self._plain_loss = gpt.compute_language_model_loss
        self._num_further = gpt.config.mtp_num_layers or 0
        self._plain_calls: float = math.inf
        """Of the output layer, before the one whose losses are computed here."""
        self._rows: Tensor | None = None
        self.num_right: Tensor | None = None
        """Tokens of the last losses whose label has the largest logit, each as often as it counts
        (see `Batch.num_paths`); a scalar on the device.
        """
        self.likeliest: list[Tensor] | None = None
        """Where it is a list: of each call, the likeliest word behind each token that counts, in
        order, int64.
        """
        self._num_paths: Tensor | None = None
        gpt.register_forward_pre_hook(self._begin, with_kwargs=True)
        gpt.output_layer.forward = self._output_layer
        gpt.compute_language_model_loss = self._loss

    def _begin(
        self, gpt: GPTModel, arguments: Any, options: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        labels, loss_mask = options.get("labels"), options.get("loss_mask")
        self._plain_calls = math.inf if labels is None else self._num_further
        self._rows = getattr(options.get("packed_seq_params"), "loss_rows", None)
        self._num_paths = getattr(options.get("packed_seq_params"), "num_paths", None)
        if labels is not None and loss_mask is not None:
            options = {**options, "labels": labels.masked_fill(loss_mask == 0, MASKED_LABEL)}
        return arguments, options

    def _output_layer(
        self, states: Tensor, weight: Tensor | None = None, **options: Any
    ) -> tuple[Any, Tensor | None]:
        if self._plain_calls:
            self._plain_calls -= 1
            return self._plain_layer(states, weight, **options)
        return Hidden(states, self._layer.weight if weight is None else weight), None

    def _loss(self, labels: Tensor, logits: Any) -> Tensor:
        if not isinstance(logits, Hidden):
            return self._plain_loss(labels, logits)
        group, states = self._layer.tp_group, logits.states
        of_tokens = labels.t().flatten()
        rows = (
            self._rows
            if self._rows is not None
            else (of_tokens != MASKED_LABEL).nonzero().squeeze(1)
        )
        if self._layer.sequence_parallel:
            states = gather_from_sequence_parallel_region(states, group=group)
        states = states.flatten(0, 1).index_select(0, rows)
        if not self._layer.sequence_parallel:
            states = copy_to_tensor_model_parallel_region(states, group=group)
        losses, is_right = _CrossEntropy.apply(
            states, logits.weight, of_tokens[rows], self._words, group
        )
        if self._num_paths is not None:
            is_right = is_right * self._num_paths.flatten()[rows]
        self.num_right = is_right.sum()
        if self.likeliest is not None:
            self.likeliest.append(likeliest_words(states, logits.weight, self._words, group))
        whole = losses.new_zeros(of_tokens.shape).index_copy(0, rows, losses)
        return whole.view(labels.shape[1], labels.shape[0]).t().contiguous()


def likeliest_words(
    states: Tensor, weight: Tensor, words: Words, group: dist.ProcessGroup
) -> Tensor:
    """Returns the word with the largest logit for each row of hidden states, int64 [n]; of equal
    ones the first. Collective over tensor parallel.
    """
    first = group.rank() * weight.shape[0]
    chunks = _Chunks(states, weight, words.num_here(first, weight.shape[0]), words.rule)
    best = states.new_full((len(states),), -torch.inf, dtype=chunks.dtype)
    found = torch.zeros(len(states), dtype=torch.int64, device=states.device)
    for part in chunks.parts:
        best[part], found[part] = chunks.logits(states, weight, part).max(1)
    found += first
    if group.size() == 1 or not len(states):
        return found
    all_best, all_found = (
        [torch.empty_like(own) for _ in range(group.size())] for own in (best, found)
    )
    dist.all_gather(all_best, best, group=group)
    dist.all_gather(all_found, found, group=group)
    rank = torch.stack(all_best).argmax(0, keepdim=True)
    return torch.stack(all_found).gather(0, rank).squeeze(0)


class _CrossEntropy(torch.autograd.Function):
    """Cross entropy of rows of hidden states, whose logits exist for one chunk at a time.

    The gradient of the hidden states is this rank's part, of its words. Where there is one chunk,
    its exponentials are kept for the backward pass; of several, logits are computed again. What is
    as large as logits is changed in place: on CPU, new memory costs as much as the arithmetic.
    """

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        labels: Tensor,
        words: Words,
        group: dist.ProcessGroup,
    ) -> tuple[Tensor, Tensor]:
        first = group.rank() * weight.shape[0]
        num_here = words.num_here(first, weight.shape[0])
        is_here = (labels >= first) & (labels < first + num_here)
        labels_here = (labels - first).where(is_here, 0).unsqueeze(1)
        ctx.chunks = chunks = _Chunks(states, weight, num_here, words.rule)
        log_sum, largest, of_label = torch.empty(
            3, len(labels), dtype=chunks.dtype, device=states.device
        )
        for part in chunks.parts:
            logits = chunks.logits(states, weight, part)
            of_label[part] = logits.gather(1, labels_here[part]).squeeze(1)
            # A rank without words of its own has a maximum of -inf.
            largest[part] = logits.amax(1).clamp_(min=torch.finfo(logits.dtype).min)
            log_sum[part] = (
                logits.sub_(largest[part].unsqueeze(1)).exp_().sum(1).log_() + largest[part]
            )
        # exponentials, of which the slope of a cap is not to be had
        is_kept = len(chunks.parts) == 1 and words.rule.softcap is None
        ctx.kept = logits if is_kept else None
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
        states, weight, labels_here, is_here, log_sum, largest = ctx.saved_tensors
        chunks, kept = ctx.chunks, ctx.kept
        ctx.kept = None  # written over below
        of_states, of_weight = torch.empty_like(states), None
        if ctx.needs_input_grad[1]:
            of_weight = torch.zeros_like(
                weight, dtype=weight.dtype if kept is not None else chunks.dtype
            )
        for part in chunks.parts:
            # The gradient of a logit is its probability, less one for the label, times that of the
            # loss.
            capped = None
            if kept is not None:
                of_logits = kept.mul_((gradient * (largest - log_sum).exp()).unsqueeze(1))
            else:
                of_logits = chunks.logits(states, weight, part)
                capped = of_logits.clone() if chunks.rule.softcap is not None else None
                of_logits.sub_(log_sum[part].unsqueeze(1)).exp_()
                of_logits.mul_(gradient[part].unsqueeze(1))
            of_logits.scatter_add_(1, labels_here[part], -(gradient * is_here)[part].unsqueeze(1))
            if not chunks.rule.is_plain:
                chunks.rule.chain_(of_logits, of_logits if capped is None else capped)
            of_logits = of_logits.to(weight.dtype)
            torch.mm(of_logits, weight, out=of_states[part])
            if of_weight is not None and of_weight.dtype == weight.dtype:
                of_weight.addmm_(of_logits.t(), states[part])
            elif of_weight is not None:
                of_weight += of_logits.t() @ states[part]
        return (
            of_states,
            None if of_weight is None else of_weight.to(weight.dtype),
            None,
            None,
            None,
        )


class _Chunks:
    """The rows of each chunk, and how their logits are computed."""

    def __init__(self, states: Tensor, weight: Tensor, num_here: int, rule: LogitRule) -> None:
        size = max(1, _CHUNK_LOGITS // weight.shape[0])
        self.parts = [slice(start, start + size) for start in range(0, len(states), size)]
        self.dtype = torch.promote_types(states.dtype, torch.float32)
        self.rule, self._num_here = rule, num_here

    def logits(self, states: Tensor, weight: Tensor, part: slice) -> Tensor:
        """[rows of the chunk, words of this rank] in at least float32; those that are no words are
        minus infinity.
        """
        logits = self.rule.apply_((states[part] @ weight.t()).to(self.dtype))
        logits[:, self._num_here :] = -torch.inf
        return logits
