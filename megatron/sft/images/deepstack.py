"""mcore. DeepStack (arXiv 2406.04334): features of a vision tower are added to the output of the
language model's first layers, at the tokens of images.

A layer may be recomputed, in a backward pass of its own that begins and ends at its borders. A
feature from outside would be walked through by several of them. So layers add *leaves*, copies
without a history, whose gradients gather there; and what the first layer reads passes `_Collect`,
whose backward pass comes after that of all layers and hands the gradients of the leaves on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

_LEAVES = "deepstack_leaves"
"""Attribute of a microbatch's PackedSeqParams: each layer finds the leaves of its microbatch there,
also when it is recomputed while later microbatches are under way.
"""


def add_deepstack(gpt: GPTModel, num_layers: int) -> None:
    """Lets the first `num_layers` layers of the model add the features of a microbatch."""
    for layer in gpt.decoder.layers:
        if layer.layer_number <= num_layers:
            layer.register_forward_hook(_add, with_kwargs=True)


def with_features(hidden: Tensor, features: Sequence[Tensor], packed_seq_params: Any) -> Tensor:
    """Returns what the first layer reads, `hidden`, and gives `features` to the layers.

    Args:
        features: of the shape of `hidden`, one for each of the layers.
        packed_seq_params: of the microbatch, as the model is called with it.
    """
    leaves: list[Tensor] = []
    collected: Tensor = _Collect.apply(hidden, leaves, *features)
    setattr(packed_seq_params, _LEAVES, tuple(leaves))
    return collected


def _add(layer: Any, _: object, options: Mapping[str, Any], output: Any) -> Any:
    leaves = getattr(options.get("packed_seq_params"), _LEAVES, None)
    if leaves is None:  # a pack without images
        return output
    hidden, context = output
    return hidden + leaves[layer.layer_number - 1], context


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, leaves: list[Tensor], *features: Tensor) -> Tensor:
        for feature, needs_grad in zip(features, ctx.needs_input_grad[2:], strict=True):
            leaves.append(feature.detach().requires_grad_(needs_grad))
        ctx.leaves = leaves
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        of_features = [leaf.grad for leaf in ctx.leaves]
        for leaf in ctx.leaves:
            leaf.grad = None
        return gradients[0], None, *of_features
