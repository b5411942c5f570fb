"""Rows of tokens for their experts, and their sums, beside megatron-core's own."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor

from megatron.packing.model.dispatcher import (
    GatheringDispatcher,
    Order,
    gather_tokens,
    permute,
    unpermute,
)


def routed(num_tokens: int, num_experts: int, topk: int) -> Tensor:
    chosen = torch.rand(num_tokens, num_experts).topk(topk).indices
    return torch.zeros(num_tokens, num_experts, dtype=torch.bool).scatter(1, chosen, True)


@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "topk"),
    [(37, 16, 4), (5, 3, 1), (6, 4, 4), (1, 8, 2), (0, 4, 2)],
    ids=str,
)
def test_rows_and_sums_are_megatron_cores(
    num_tokens: int, num_experts: int, topk: int, is_deterministic: bool
):
    """Rows in another order go through other experts; a gradient in another place trains on."""
    torch.manual_seed(1)
    routing_map = routed(num_tokens, num_experts, topk)
    x = torch.randn(num_tokens, 3, dtype=torch.float64).requires_grad_()
    probs = torch.rand(num_tokens, num_experts, dtype=torch.float64).requires_grad_()
    wanted_rows, wanted_probs, tokens, *_ = moe_utils.permute(
        x, routing_map, probs=probs, num_out_tokens=num_tokens * topk
    )
    torch.use_deterministic_algorithms(is_deterministic)
    try:
        order = Order.of(routing_map, topk)
        rows, weights = permute(x, probs, order)
        found = unpermute(rows.square() * weights.unsqueeze(1), order)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(order.tokens, tokens)
    assert torch.equal(rows, wanted_rows)
    assert torch.equal(weights, wanted_probs)
    assert found.shape == x.shape
    weighted = wanted_rows.square() * wanted_probs.unsqueeze(1)
    wanted = moe_utils.unpermute(weighted, tokens, x.shape)
    torch.testing.assert_close(found, wanted)
    gradient = torch.randn_like(wanted)
    ours = torch.autograd.grad(found, [x, probs], gradient)
    torch.testing.assert_close(ours, torch.autograd.grad(wanted, [x, probs], gradient))


def test_gradients_are_those_of_differences():
    torch.manual_seed(1)
    order = Order.of(routed(5, 4, 2), 2)
    x, probs = (torch.rand(5, n, dtype=torch.float64).requires_grad_() for n in (3, 4))
    assert torch.autograd.gradcheck(lambda x, probs: permute(x, probs, order), (x, probs))
    rows = torch.rand(10, 3, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda rows: unpermute(rows, order), (rows,))
    assert torch.autograd.gradgradcheck(lambda rows: unpermute(rows, order), (rows,))


def test_sums_in_bfloat16_are_rounded_once():
    """Ones that are added to 256 one by one are lost: 257 is rounded to 256."""
    order = Order.of(torch.ones(2, 7, dtype=torch.bool), 7)
    rows = torch.ones(14, 8, dtype=torch.bfloat16)
    rows[:2] = 256
    assert torch.equal(unpermute(rows, order), torch.full((2, 8), 262, dtype=torch.bfloat16))
    x = torch.zeros(2, 8, dtype=torch.bfloat16).requires_grad_()
    (gradient,) = torch.autograd.grad(permute(x, torch.ones(2, 7), order)[0], [x], rows)
    assert torch.equal(gradient, torch.full((2, 8), 262, dtype=torch.bfloat16))


class Own(TopKRouter):
    """Of a script."""


@pytest.mark.parametrize(
    ("changes", "overlaps"),
    [
        ({}, False),
        ({"moe_expert_capacity_factor": 1.0}, False),
        ({"moe_router_padding_for_quantization": True}, False),
        ({"moe_permute_fusion": True}, False),
        ({"cuda_graph_impl": "local"}, False),
        ({"moe_enable_routing_replay": True}, False),
        ({}, True),
    ],
    ids=str,
)
def test_what_drops_or_does_more_stays_megatron_cores(changes: dict[str, Any], overlaps: bool):
    """A token with fewer rows than experts would take others' rows, as a router of one's own may
    choose.
    """
    plain = {
        "moe_expert_capacity_factor": None,
        "moe_router_padding_for_quantization": False,
        "moe_permute_fusion": False,
        "cuda_graph_impl": "none",
    }
    dispatcher = MoEAlltoAllTokenDispatcher.__new__(MoEAlltoAllTokenDispatcher)
    dispatcher.config = SimpleNamespace(**plain | changes)  # type: ignore[assignment]
    dispatcher.shared_experts = object() if overlaps else None
    layer = SimpleNamespace(token_dispatcher=dispatcher, config=dispatcher.config)
    for router in (Own.__new__(Own), TopKRouter.__new__(TopKRouter)):
        layer.router = router
        gather_tokens(SimpleNamespace(modules=lambda: [layer]))  # type: ignore[arg-type]
        is_known = type(router) is TopKRouter and not changes and not overlaps
        assert isinstance(dispatcher, GatheringDispatcher) == is_known
