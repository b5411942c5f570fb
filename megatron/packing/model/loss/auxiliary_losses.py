"""mcore. The auxiliary losses of megatron-core, load balancing of experts and multi-token
prediction, are made sums over tokens, which do not depend on the packs and ranks that hold the
tokens.

Two things stand in the way, and each is mended where it is there:

- The load-balancing loss of an empty pack is 0 / 0, whose NaN would reach every gradient; a
  data-parallel rank with fewer sequences than others runs empty packs. And its weight is the number
  of the pack's tokens on all ranks together, which 0.19 multiplies by the number of these ranks
  once more.
- 0.19 multiplies the loss of multi-token prediction by the tokens of a pack, over those that have a
  target further on. That ratio is another one for each pack, and for each context-parallel rank,
  where it may be zero.

What multi-token prediction does by sequence is done for whole packs besides (see `packed_roll`),
and its layers can be recomputed, or stand beside images (see `prediction_layers`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from functools import update_wrapper
from types import FunctionType
from typing import Any

import torch
from megatron.core.models.gpt import gpt_model
from megatron.core.transformer import multi_token_prediction
from megatron.core.transformer.moe import router, token_dispatcher
from torch import Tensor

from megatron.packing.model.layers.routers import (
    BiasCounts,
    FreeShares,
    ZLoss,
    multiplies_by_ranks,
)
from megatron.packing.model.loss.packed_roll import PackedRoll
from megatron.packing.model.loss.prediction_layers import PredictionInput, PredictionRecompute


class TokenCounts:
    """megatron-core's count of a pack's tokens (per expert, of this rank, of all), where all are at
    least one.

    What it calls tokens of this rank is the weight of the load-balancing loss. It is the number of
    all, since that of this rank was summed in place; the router of 0.19 takes it for this rank's
    and multiplies by the number of ranks.
    """

    def __init__(self, plain: Callable[..., Any]) -> None:
        update_wrapper(self, plain)
        self.plain = plain
        self.is_multiplied_by_ranks = multiplies_by_ranks()

    def __call__(
        self, routing_map: Tensor, reduce_group: Any, **options: object
    ) -> tuple[Any, Any, Any]:
        """See megatron-core; the number of all is a divisor only. Ints, which no padding mask
        gives, stay ints.
        """
        per_expert, weight, num_all = self.plain(
            routing_map=routing_map, reduce_group=reduce_group, **options
        )
        if isinstance(num_all, int):
            return per_expert, weight, max(num_all, 1)
        weight = num_all / reduce_group.size() if self.is_multiplied_by_ranks else weight
        return per_expert, weight, num_all.clamp(min=1)


class PredictionLoss:
    """megatron-core's loss of multi-token prediction as a sum over tokens, as its main loss is.

    A copy of the function takes the mean over the tokens that have a target further on; it is
    multiplied by their number before it is attached. megatron-core's own sum is multiplied by the
    tokens that have any target, of which a context-parallel rank may have none while others'
    targets roll in: nothing would bring that loss back.
    """

    def __init__(self, plain: Any) -> None:
        update_wrapper(self, plain)
        self.plain = plain

    def __call__(self, *, config: Any, **options: object) -> Tensor:
        """See megatron-core; where each microbatch is a mean anyway, it is left alone."""
        if not config.calculate_per_token_loss:
            return self.plain(config=config, **options)
        names = self.plain.__globals__
        roll, scaler = names["roll_tensor"], names["MTPLossAutoScaler"]
        num_predicted = torch.zeros(())

        def counted_roll(*arguments: object, **settings: object) -> tuple[Tensor, Tensor]:
            nonlocal num_predicted  # of the mask in the end, which is rolled last
            rolled, num_predicted = roll(*arguments, **settings)
            return rolled, num_predicted

        class OfSum:
            @staticmethod
            def apply(hidden_states: Tensor, mean: Tensor) -> Tensor:
                return scaler.apply(hidden_states, mean * num_predicted.clamp(min=1))

        names = {**names, "roll_tensor": counted_roll, "MTPLossAutoScaler": OfSum}
        run = FunctionType(self.plain.__code__, names, argdefs=self.plain.__defaults__)
        means = copy(config)
        means.calculate_per_token_loss = False
        return run(config=means, **options)


_FURTHER_LAYER = multi_token_prediction.MultiTokenPredictionLayer
_MENDED: tuple[tuple[Any, str, type], ...] = (
    (router, "get_tokens_per_expert_and_token_count", TokenCounts),
    (router.TopKRouter, "_apply_expert_bias", BiasCounts),
    (router.TopKRouter, "apply_z_loss", ZLoss),
    (token_dispatcher.MoEAlltoAllTokenDispatcher, "dispatch_preprocess", FreeShares),
    (token_dispatcher.MoEAllGatherTokenDispatcher, "dispatch_postprocess", FreeShares),
    (gpt_model, "process_mtp_loss", PredictionLoss),  # inline in 0.16.1, and a sum
    (multi_token_prediction, "_roll_tensor_packed_seq", PackedRoll),
    (_FURTHER_LAYER, "_checkpointed_forward", PredictionRecompute),
    (_FURTHER_LAYER, "_concat_embeddings", PredictionInput),
)


def install() -> None:
    """Lets megatron-core count so, where its version has what is mended. Idempotent."""
    for module, name, mended in _MENDED:
        plain = getattr(module, name, None)
        if plain is not None and not isinstance(plain, mended):
            setattr(module, name, mended(plain))


@contextmanager
def installed() -> Iterator[None]:
    """Lets megatron-core count so, and leaves it as it was."""
    before = [
        (module, name, getattr(module, name))
        for module, name, _ in _MENDED
        if hasattr(module, name)
    ]
    install()
    try:
        yield
    finally:
        for module, name, plain in before:
            setattr(module, name, plain)
