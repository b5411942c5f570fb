"""mcore. Routers of experts see which tokens are padding, in every layer that is given a pack.

A router counts its tokens for the experts' biases, for the load-balancing loss and for the z-loss,
and padding must not count. megatron-core passes a mask from GPTModel.forward down to each layer,
but not in every case:

- the caller must give it, and on each pipeline stage after the first give it already cut for
  sequence parallel;
- layers of multi-token prediction get none in 0.16.1. In 0.19 they get one that was moved by a
  token as their input is, though it is still the same tokens that are padding;
- a layer that is recomputed needs the mask of its own microbatch, not of the latest one.

So the mask travels in `PackedSeqParams`, which each layer gets anyway, recomputed or not.

And what a dispatcher keeps of a layer does not keep the layer (`FreeShares`).
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe import moe_utils, router
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megatron.packing.model.replaced_method import ReplacedMethod


def define_te_general_gemm() -> None:
    """Defines `te_general_gemm` as None: the router of 0.16.1 asks for it, but the name exists only
    with Transformer Engine.
    """
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # type: ignore[attr-defined]


def mask_padding(model: torch.nn.Module) -> None:
    """Gives each layer of experts in `model` the `padding_mask` of the packs it is called with.

    Layers that are called without packs are left alone. A mask that the model is called with
    beside packs is dropped. Idempotent.
    """
    for module in model.modules():
        hook: Any = None
        if isinstance(module, GPTModel):
            hook = _drop_mask
        elif isinstance(module, TransformerLayer) and isinstance(module.mlp, BaseMoELayer):
            hook = _pass_mask
        if hook is not None and hook not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(hook, with_kwargs=True)


def _drop_mask(
    gpt: object, arguments: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if getattr(options.get("packed_seq_params"), "padding_mask", None) is None:
        return None
    return arguments, {**options, "padding_mask": None}


def _pass_mask(
    layer: Any, arguments: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    mask = getattr(options.get("packed_seq_params"), "padding_mask", None)
    if mask is None:
        return None
    hidden_states: Tensor = arguments[0] if arguments else options["hidden_states"]
    # Under sequence parallel this rank has a part of the tokens:
    # mask [1, 8], hidden_states [4, 1, h], rank 1 of 2    ->    mask[:, 4:]
    length, num_tokens = hidden_states.shape[0], mask.shape[1]
    if length != num_tokens:
        if length * layer.tp_group.size() != num_tokens:
            raise ValueError(
                f"a layer of experts has {length} tokens of a pack whose padding is known for "
                f"{num_tokens}; call the model with the batch's own packed_seq_params"
            )
        mask = mask.narrow(1, layer.tp_group.rank() * length, length)
    return arguments, {**options, "padding_mask": mask}


class FreeShares(ReplacedMethod):
    """A dispatcher's method that keeps the tokens' shares, of which later only the dtype is asked.

    The graph behind them would live until the next microbatch. Of a layer that is recomputed it
    holds the layer's input and that input's gradient: twice [tokens, hidden] for each layer with
    experts, at the end of the backward pass.
    """

    def __call__(self, dispatcher: Any, *arguments: Any, **options: Any) -> Any:
        """See megatron-core."""
        dispatched = self.plain(dispatcher, *arguments, **options)
        for name in ("probs", "local_probs"):
            shares = vars(dispatcher).get(name)
            if shares is not None:
                setattr(dispatcher, name, shares.detach())
        return dispatched


class BiasCounts(ReplacedMethod):
    """`TopKRouter._apply_expert_bias`, which counts tokens by expert, without padding.

    megatron-core's combines [tokens, experts] with a mask [tokens]: it raises RuntimeError, or
    masks experts in place of tokens where there are as many of both. It is compiled when it is
    first called, which on a CPU takes longer than a step, for a sum of a few numbers.
    """

    def __call__(
        self, topk_router: Any, routing_map: Tensor, padding_mask: Tensor | None = None
    ) -> None:
        """See megatron-core; `padding_mask` is bool [tokens]."""
        # Neither evaluation counts, nor the first of two passes of layers that are recomputed.
        if not topk_router.enable_expert_bias or not torch.is_grad_enabled():
            return
        if padding_mask is not None:
            routing_map = routing_map & ~padding_mask.unsqueeze(-1)
        topk_router.local_tokens_per_expert += routing_map.sum(dim=0)


class ZLoss(ReplacedMethod):
    """`TopKRouter.apply_z_loss` as a sum over the tokens of all ranks.

    0.16.1 divides it by the size of the tensor and context parallel group, whose ranks hold
    different tokens: the gradients of a sequence would depend on that size.
    """

    def __call__(
        self, topk_router: Any, logits: Tensor, padding_mask: Tensor | None = None
    ) -> Tensor:
        """See megatron-core."""
        if multiplies_by_ranks() or not topk_router.calculate_per_token_loss:
            return self.plain(topk_router, logits, padding_mask=padding_mask)
        names = self.plain.__globals__
        scaler, size = names["MoEAuxLossAutoScaler"], topk_router.tp_cp_group.size()

        class OfSum:
            @staticmethod
            def apply(activation: Tensor, loss: Tensor) -> Tensor:
                return scaler.apply(activation, loss * size)

        run = FunctionType(self.plain.__code__, {**names, "MoEAuxLossAutoScaler": OfSum})
        run.__defaults__ = self.plain.__defaults__
        return run(topk_router, logits, padding_mask=padding_mask)


def multiplies_by_ranks() -> bool:
    """Returns whether megatron-core's router multiplies its losses by the number of ranks that
    share a pack, to have them divided by all of their tokens; 0.16.1 does not.
    """
    attach = router.TopKRouter.attach_and_log_load_balancing_loss
    return "size" in attach.__code__.co_names
