"""mcore. Tokens to their experts and back by gathers, in both directions.

megatron-core sums the outputs of a token's experts, and the gradients of its copies, by adding row
by row into the tokens' places: on a GPU with atomic operations, in the rows' dtype. No tokens are
dropped here, so each has as many rows as experts. Both sums are over known rows, in float32 for
bfloat16 and always in one order.

Where this rank has all experts, nothing is exchanged, rows are not sorted a second time, and the
host reads no number of tokens.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple, cast

import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor
from torch.nn.functional import embedding_bag

from megatron.packing.device import takes_triton
from megatron.packing.model.layers.branches import ScaledRouter


def gather_tokens(model: torch.nn.Module) -> None:
    """Lets the dispatcher of each layer of experts in `model` move tokens by gathers. Others than
    megatron-core's all-to-all one stay as they are, and so does one that drops or pads tokens, has
    a fused permutation, runs shared experts meanwhile or is captured in CUDA graphs. So does one
    behind another router than megatron-core's, which gives each token as many experts.
    """
    for module in model.modules():
        if _may_gather(module):
            module.token_dispatcher.__class__ = GatheringDispatcher  # type: ignore[union-attr]


def _may_gather(layer: Any) -> bool:
    dispatcher: Any = getattr(layer, "token_dispatcher", None)
    if type(dispatcher) is not MoEAlltoAllTokenDispatcher:
        return False
    config = layer.config
    return (
        type(layer.router) in (TopKRouter, ScaledRouter)
        and not getattr(config, "moe_enable_routing_replay", False)
        and config.moe_expert_capacity_factor is None
        and not config.moe_router_padding_for_quantization
        and not config.moe_permute_fusion
        and config.cuda_graph_impl == "none"
        and dispatcher.shared_experts is None
    )


class Order(NamedTuple):
    """Rows of tokens, sorted by expert, then token."""

    pairs: Tensor
    """[rows], int64: expert * number of tokens + token."""
    tokens: Tensor
    """[rows], int64."""
    places: Tensor
    """[tokens, experts of each], int64: the rows of each token."""

    @classmethod
    def of(cls, routing_map: Tensor, topk: int) -> Order:
        """Returns the order of the rows of `routing_map` [tokens, experts], bool, in which each
        token has `topk` experts. The host waits for nothing, as all shapes are known.

        Three tokens to experts 0, 1 and 0:
        pairs [0, 2, 4], tokens [0, 2, 1], places [[0], [2], [1]].
        """
        num_tokens, device = len(routing_map), routing_map.device
        # Pair r is the first one up to which r + 1 are chosen: 101 010 -> 112 233 -> 0, 2, 4.
        counts = routing_map.T.reshape(-1).cumsum(0, dtype=torch.int32)
        numbers = torch.arange(1, num_tokens * topk + 1, dtype=torch.int32, device=device)
        pairs = torch.searchsorted(counts, numbers)
        tokens = pairs % num_tokens
        return cls(pairs, tokens, tokens.argsort(stable=True).view(num_tokens, topk))


def permute(x: Tensor, probs: Tensor, order: Order) -> tuple[Tensor, Tensor]:
    """Returns a row of `x` [tokens, hidden] for each expert of each token, and its weight out of
    `probs` [tokens, experts]: [rows, hidden] and [rows].
    """
    rows = cast(Tensor, _Gathered.apply(x, order.tokens, order.places))
    return rows, probs.T.reshape(-1).index_select(0, order.pairs)


def unpermute(rows: Tensor, order: Order) -> Tensor:
    """Returns the sum of each token's rows: [rows, hidden] -> [tokens, hidden]."""
    return cast(Tensor, _Gathered.apply(rows, order.places, order.tokens))


class _Gathered(torch.autograd.Function):
    """Rows at `index` [rows], or sums of the rows at `index` [sums, rows of each]; `back` is the
    index of the opposite direction.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(index, back)
        if index.dim() == 1:
            return x.index_select(0, index)
        if _is_fused(x):
            fused = import_module("megatron.packing.model.fused_sums")
            return cast(Tensor, fused.row_sums(x, index))
        return embedding_bag(index, x, mode="sum")  # no copy of the rows

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        index, back = ctx.saved_tensors
        return cast(Tensor, _Gathered.apply(gradients[0], back, index)), None, None


def _is_fused(x: Tensor) -> bool:
    return x.dtype != torch.float64 and takes_triton(x)


class GatheringDispatcher(MoEAlltoAllTokenDispatcher):
    """megatron-core's dispatcher with another permutation. It gives experts their numbers of tokens
    on the device.
    """

    def dispatch_preprocess(
        self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns rows of this rank's tokens, sorted by expert of all ranks, and their weights."""
        self.hidden_shape = hidden_states.shape
        self._tokens_per_expert = self.preprocess(routing_map)
        self.tokens_per_expert = None  # would be copied to the host
        if self._exchanges:
            self.probs = probs.detach()
            self._maybe_dtoh_and_synchronize("before_permutation_1")
        self._order = Order.of(routing_map, self.config.moe_router_topk)
        return permute(hidden_states.view(-1, self.hidden_shape[-1]), probs, self._order)

    def dispatch_postprocess(self, rows: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns rows of all ranks for this rank's experts, how many each has, and weights."""
        if self._exchanges:
            rows, _, probs = super().dispatch_postprocess(rows, probs)
        return rows, self._tokens_per_expert, probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Returns the experts' outputs in order of the ranks from which their rows came."""
        if self._exchanges:
            return cast(Tensor, super().combine_preprocess(hidden_states))
        return hidden_states

    def combine_postprocess(self, permutated_local_input_tokens: Tensor) -> Tensor:
        """Returns the sum over each token's experts, in the shape of the layer's input."""
        return unpermute(permutated_local_input_tokens, self._order).view(self.hidden_shape)

    @property
    def _exchanges(self) -> bool:
        return bool(self.ep_size * self.tp_size > 1)
