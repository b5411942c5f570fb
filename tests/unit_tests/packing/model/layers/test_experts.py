"""Experts, and the shares of the tokens that they get."""

from types import SimpleNamespace

import torch

from megatron.packing.model.layers.experts import _whole_shares


def test_one_expert_has_the_whole_share():
    """megatron-core would multiply the one expert of a token by its sigmoid, transformers by one,
    through which no gradient reaches the router.
    """
    sigmoids = torch.tensor([[0.3], [0.8]], dtype=torch.float64, requires_grad=True)

    def routing(experts):
        shares = torch.zeros(2, 2, dtype=torch.float64).scatter(1, experts, sigmoids)
        return shares, shares > 0

    config = SimpleNamespace(moe_router_topk_scaling_factor=2.5)
    shares, routing_map = _whole_shares(routing, config, torch.tensor([[1], [0]]))
    assert shares.tolist() == [[0.0, 2.5], [2.5, 0.0]]
    assert routing_map.tolist() == [[False, True], [True, False]]
    (shares * torch.tensor([[1.0, 3.0], [5.0, 1.0]])).sum().backward()
    torch.testing.assert_close(sigmoids.grad, torch.zeros_like(sigmoids))
