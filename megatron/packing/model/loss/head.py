"""mcore. The output layer and the cross entropy of a GPTModel for the tokens that count, in chunks.

In fine-tuning half of the tokens or more are masked, and logits are the largest tensor of a step:
[tokens, vocabulary]. Here hidden states of masked tokens are left out before the output layer, and
the others go through it and the cross entropy a chunk at a time, forward and again backward. Losses
and gradients are exactly those of all tokens at once.

    for each chunk of the rows of hidden [t, h] that count:
        rows [c, h], gathered over tensor parallel where it is split
        -> logits [c, v / tensor-parallel size]
        -> log of the sum of exponentials, logit of the label
    -> losses [n] -> [b, s]
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear
from torch import Tensor

from megatron.packing.device import Device
from megatron.packing.model.loss.cross_entropy import CrossEntropy, Rows, Words, likeliest_words
from megatron.packing.model.multipliers import PLAIN, LogitRule

MASKED_LABEL = -100
"""The label of a token that has no loss, as HuggingFace's."""


def skip_masked_tokens(
    gpt: GPTModel,
    num_words: int | None = None,
    rule: LogitRule = PLAIN,
    *,
    is_fused: bool = False,
    keeps_logits: bool = False,
) -> bool:
    """Lets `gpt` compute logits and losses of unmasked tokens alone, wherever it is given labels;
    returns False where it can't.

    Its forward pass must be given `loss_mask` beside `labels`, by name; the losses that it returns,
    [b, s], are zero where tokens are masked. Layers that predict further tokens still have logits
    for all. num_words: logits from that one on are minus infinity (padding of the vocabulary); None
    for no such rows. rule: see `multipliers`. is_fused: losses are computed by Triton's kernels
    (`fused_cross_entropy`); the rule must be plain. keeps_logits: logits are kept for the backward
    pass, not computed again. It can't where loss or output layer are not megatron-core's plain
    ones: fused losses, weights whose gradients are deferred, classes of your own.
    """
    keep_other_gradients(gpt)
    if not gpt.post_process or hasattr(gpt, "masked_tokens_head"):
        return gpt.post_process
    is_plain = (
        type(gpt).compute_language_model_loss is LanguageModule.compute_language_model_loss
        and type(gpt.output_layer).forward is ColumnParallelLinear.forward
        and gpt.output_layer.bias is None
        and not gpt.output_layer.gather_output
        and not gpt.config.cross_entropy_loss_fusion
        and not gpt.config.defer_embedding_wgrad_compute
        and not getattr(gpt.config, "use_mup", False)  # scales logits behind the output layer
    )
    if is_plain:
        gpt.masked_tokens_head = _Head(gpt, Words(num_words, rule, is_fused, keeps_logits))
    return is_plain


def has_unused_output_weight(model: torch.nn.Module) -> bool:
    """Returns whether `model` is a GPTModel whose output layer has a weight of its own, but
    computes with a copy of the embedding.

    That is so where weights are tied and the last of several stages predicts further tokens.
    """
    return (
        isinstance(model, GPTModel)
        and model.post_process
        and model.share_embeddings_and_output_weights
        and model.mtp_process
        and not model.pre_process
        and model.output_layer.weight is not None
    )


def drop_unused_output_weight(gpt: GPTModel) -> None:
    """Removes that weight: it never has a gradient, checkpoints refuse it, and overlapped reduction
    waits for it for ever. Call it before the model is wrapped.
    """
    if has_unused_output_weight(gpt):
        gpt.output_layer.weight = None


def keep_other_gradients(gpt: GPTModel) -> None:
    """Marks the weights of `gpt` that get gradients from linear layers and from elsewhere.

    Multi-token prediction uses the embedding and the output layer again, and losses of unmasked
    tokens have a gradient of their own for the latter. With `gradient_accumulation_fusion`
    DistributedDataParallel leaves out what autograd gives for a weight to which a layer has added,
    unless it is marked. megatron-core marks only embeddings, and only without pipeline parallel.
    """
    if gpt.mtp_process:
        for name, weight in gpt.named_parameters():
            if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
                weight.zero_out_wgrad = True  # type: ignore[attr-defined]


class Hidden(NamedTuple):
    """Stands for the logits between output layer and loss: what they are computed from."""

    states: Tensor
    """[s, b, h]; with sequence parallel this rank's part."""
    weight: Tensor
    """[v / tensor-parallel size, h]."""


class _Head:
    """Takes the place of a model's output layer and loss, in calls with labels."""

    def __init__(self, gpt: GPTModel, words: Words) -> None:
        self._layer, self._words = gpt.output_layer, words
        self._plain_layer = gpt.output_layer.forward
        self._plain_loss = gpt.compute_language_model_loss
        self._num_further = gpt.config.mtp_num_layers or 0
        self._plain_calls: float = math.inf
        """Calls of the output layer that still give logits. Multi-token prediction makes one for
        each further token before the model's own call, whose losses are computed here.
        """
        self._rows: Tensor | None = None
        self.num_right: Tensor | None = None
        """Tokens of the last losses whose label has the largest logit, each as often as it counts
        (see `Batch.num_paths`); a scalar on the device.
        """
        self.likeliest: list[Tensor] | None = None
        """Likeliest word behind each token that counts, int64, an entry a call; None: not kept."""
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
        states = states.flatten(0, 1)
        taken = Rows(rows, group, is_split=self._layer.sequence_parallel and group.size() > 1)
        # Nothing is kept for a backward pass that does not come.
        keeps = self._words.keeps_logits and torch.is_grad_enabled()
        device = Device.of(self._layer.config, states)
        words = self._words._replace(keeps_logits=keeps, device=device)
        losses, is_right = CrossEntropy.apply(
            states, logits.weight, of_tokens[rows], words, group, taken
        )
        if self._num_paths is not None:
            is_right = is_right * self._num_paths.flatten()[rows]
        self.num_right = is_right.sum()
        if self.likeliest is not None:
            self.likeliest.append(likeliest_words(states, logits.weight, self._words, group, taken))
        whole = losses.new_zeros(of_tokens.shape).index_copy(0, rows, losses)
        return whole.view(labels.shape[1], labels.shape[0]).t().contiguous()
