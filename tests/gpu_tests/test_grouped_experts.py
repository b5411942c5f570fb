"""Products with the weights of several experts on this device, beside each expert's own."""

import pytest
import torch
from megatron.core.transformer.moe import moe_utils

from megatron.packing.model import grouped_experts
from megatron.packing.model.dispatcher import Order, permute, unpermute
from megatron.packing.model.grouped_experts import Groups, grouped_linear
from tests.gpu_tests.test_step import set_sync_debug_mode


@pytest.mark.parametrize("gap", [None, 0, 64], ids=str)
@pytest.mark.parametrize(
    "sizes", [(7, 0, 130, 1), (0, 0, 0, 64), (33, 65, 3, 27)], ids=["mixed", "one", "odd"]
)
def test_they_are_each_experts_own(sizes, gap, device, monkeypatch):
    """Weights lie apart, or behind one another with a gap of so many numbers, and so do the float32
    gradients to which those of a pass are added.

    Numbers of tokens are odd, and some experts have none: kernels read in blocks of 8 and more, and
    must neither read a neighbour's tokens nor leave the gradient of an idle expert unwritten.
    """
    generator = torch.Generator(device).manual_seed(1)

    def random(*shape):
        options = {"device": device, "dtype": torch.bfloat16, "generator": generator}
        return torch.randn(*shape, **options).requires_grad_()

    x, weights = random(sum(sizes), 64), [random(128, 64) for _ in sizes]
    totals = [torch.ones(128, 64, device=device) for _ in sizes]
    if gap is not None:
        for tensors in (weights, totals):
            whole = tensors[0].new_empty(len(sizes), 128 * 64 + gap)
            for tensor, place in zip(tensors, whole):
                place[: 128 * 64] = tensor.detach().flatten()
                tensor.data = place[: 128 * 64].view(128, 64)
    assert (grouped_experts._side_by_side(weights) is None) == (gap is None)
    for weight, total in zip(weights, totals):
        weight.main_grad, weight.grad_added_to_main_grad = total, False
    gradient = torch.randn(
        sum(sizes), 128, device=device, dtype=torch.bfloat16, generator=generator
    )
    groups = Groups(torch.tensor(sizes), device)
    found = grouped_linear(x, weights, groups, accumulates=True)
    gradients = torch.autograd.grad(found, [x, *weights], gradient)
    monkeypatch.setattr(grouped_experts, "_is_for_grouped_mm", lambda *_: False)
    wanted = grouped_linear(x, weights, groups)
    torch.testing.assert_close(found, wanted)
    for one, other in zip(gradients, torch.autograd.grad(wanted, [x, *weights], gradient)):
        torch.testing.assert_close(one, other)
    for total, one in zip(totals, gradients[1:]):
        torch.testing.assert_close(total, 1 + one.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("num_tokens", "topk"), [(300, 4), (1, 1), (0, 2)])
def test_rows_and_sums_are_megatron_cores_and_wait_for_nothing(num_tokens, topk, dtype, device):
    """In both directions; megatron-core adds in the rows' dtype, so it computes in float64 here.
    Sums are to the bit those of deterministic algorithms.
    """
    torch.manual_seed(1)
    chosen = torch.rand(num_tokens, 16, device=device).topk(topk).indices
    routing_map = torch.zeros(num_tokens, 16, dtype=torch.bool, device=device)
    routing_map.scatter_(1, chosen, True)
    x = torch.randn(num_tokens, 64, device=device, dtype=dtype).requires_grad_()
    probs = torch.rand(num_tokens, 16, device=device).requires_grad_()
    gradient = torch.randn(num_tokens, 64, device=device, dtype=dtype)

    def ours():
        order = Order.of(routing_map, topk)
        rows, weights = permute(x, probs, order)
        sums = unpermute(rows, order)
        gradients = torch.autograd.grad([sums, weights.sum()], [x, probs], [gradient, None])
        return order.tokens, rows, weights, sums, *gradients

    set_sync_debug_mode("error", device)
    try:
        found = ours()
    finally:
        set_sync_debug_mode("default", device)
    torch.use_deterministic_algorithms(True)
    try:
        again = ours()
    finally:
        torch.use_deterministic_algorithms(False)
    wide = x.detach().double().requires_grad_()
    rows, weights, tokens, *_ = moe_utils.permute(
        wide, routing_map, probs=probs, num_out_tokens=num_tokens * topk
    )
    sums = moe_utils.unpermute(rows, tokens, x.shape)
    gradients = torch.autograd.grad([sums, weights.sum()], [wide, probs], [gradient.double(), None])
    wanted = tokens, rows, weights, sums, *gradients
    for one, other, right in zip(found, again, wanted, strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, right.to(one.dtype))
