"""Products with the weights of several experts, beside each expert's own."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from megatron.packing.model import grouped_experts
from megatron.packing.model.grouped_experts import Groups, group_experts, grouped_linear

CPU = torch.device("cpu")


def one_by_one(x: Tensor, weights: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    return torch.cat(
        [torch.nn.functional.linear(rows, weight) for rows, weight in zip(x.split(sizes), weights)]
    )


@pytest.mark.parametrize(
    ("dtype", "width", "is_grouped"),
    [
        (torch.float32, 8, True),
        (torch.float32, 6, False),  # rows of 24 bytes
        (torch.bfloat16, 8, True),
        (torch.bfloat16, 12, False),  # of 24 bytes, too
        (torch.float64, 8, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("sizes", [(5, 0, 3), (0, 0, 8), (1, 1, 1), (0, 0, 0)], ids=str)
def test_it_is_each_groups_own_product(monkeypatch, dtype, width, is_grouped, sizes):
    """Values and gradients; a group without rows has a gradient of zeros."""
    calls = []
    product = grouped_experts.grouped_mm

    def counted(*args: Tensor, offs: Tensor) -> Tensor:
        calls.append(offs)
        return product(*args, offs=offs)

    monkeypatch.setattr(grouped_experts, "grouped_mm", counted)
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_()

    x, weights = random(sum(sizes), width), [random(16, width) for _ in sizes]
    found = grouped_linear(x, weights, Groups(torch.tensor(sizes), CPU))
    wanted = one_by_one(x, weights, sizes)
    torch.testing.assert_close(found, wanted)
    # A sum's gradient is an expanded one, which grouped_mm refuses.
    ours = torch.autograd.grad(found.sum(), [x, *weights])
    torch.testing.assert_close(ours, torch.autograd.grad(wanted.sum(), [x, *weights]))
    assert bool(calls) == (is_grouped and sum(sizes) > 0)


def test_frozen_weights_keep_no_inputs():
    """With adapters alone trained, the inputs of all experts would be kept for nothing."""
    x = torch.randn(8, 16, requires_grad=True)
    weights = [torch.randn(16, 16) for _ in range(2)]
    kept: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        found = grouped_linear(x, weights, Groups(torch.tensor((3, 5)), CPU))
    assert kept == [(16, 16)] * 2
    (gradient,) = torch.autograd.grad(found.sum(), [x])
    wanted = [weight.sum(0).expand(size, -1) for weight, size in zip(weights, (3, 5))]
    torch.testing.assert_close(gradient, torch.cat(wanted))


@pytest.mark.parametrize(
    ("starts", "is_one"),
    [
        ((0, 6, 12), True),
        ((4, 12, 20), True),  # gaps of 2
        ((12, 6, 0), False),
        ((0, 6, 13), False),
        ((0, 4, 8), False),
        ((0, 0, 0), False),
        ((5,), False),
    ],
    ids=str,
)
def test_tensors_side_by_side_are_found(starts: tuple[int, ...], is_one: bool):
    """A view that is wrong by one number multiplies with a neighbour's weights."""
    storage = torch.arange(30.0)
    tensors = [storage[start : start + 6].view(2, 3) for start in starts]
    found = grouped_experts._side_by_side(tensors)
    assert (found is not None) == is_one
    if found is not None:
        assert torch.equal(found, torch.stack(tensors))
        assert found.data_ptr() == tensors[0].data_ptr()
    others = [*tensors[:-1], storage.clone()[starts[-1] :][:6].view(2, 3)]
    assert grouped_experts._side_by_side(others) is None
    turned = [storage[start : start + 6].view(3, 2).t() for start in starts]
    assert grouped_experts._side_by_side(turned) is None


@pytest.mark.parametrize("is_side_by_side", [True, False])
@pytest.mark.parametrize("sizes", [(5, 0, 3), (0, 0, 0)], ids=str)
def test_gradients_are_added_to_those_before(is_side_by_side: bool, sizes: tuple[int, ...]):
    """Once: autograd still gives gradients, which hooks must leave alone where weights say so."""
    x = torch.randn(sum(sizes), 8, dtype=torch.bfloat16)
    weights = [torch.randn(16, 8, dtype=torch.bfloat16).requires_grad_() for _ in sizes]
    totals = torch.ones(len(sizes), 16, 8)
    for weight, total in zip(weights, totals):
        weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        weight.main_grad = total if is_side_by_side else total.clone()  # type: ignore[attr-defined]
    groups = Groups(torch.tensor(sizes), CPU)
    alone = torch.autograd.grad(grouped_linear(x, weights, groups).sum(), weights)
    assert not any(weight.grad_added_to_main_grad for weight in weights)  # type: ignore[attr-defined]
    found = torch.autograd.grad(grouped_linear(x, weights, groups, accumulates=True).sum(), weights)
    for weight, one, other in zip(weights, alone, found):
        assert weight.grad_added_to_main_grad  # type: ignore[attr-defined]
        assert torch.equal(weight.main_grad, 1 + one.float())  # type: ignore[attr-defined]
        assert one.shape == other.shape


def test_what_needs_one_after_another_is_refused():
    """Linear layers of others (Transformer Engine) stay as they are."""
    from types import SimpleNamespace

    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer.moe.experts import SequentialMLP

    experts = SequentialMLP.__new__(SequentialMLP)
    torch.nn.Module.__init__(experts)
    experts.num_local_experts = 2
    experts.config = SimpleNamespace(moe_apply_probs_on_input=True)
    expert = SimpleNamespace(linear_fc1=ColumnParallelLinear.__new__(ColumnParallelLinear))
    experts.local_experts = [expert] * 2
    with pytest.raises(ValueError, match="moe_grouped_gemm does not go with moe_apply_probs"):
        group_experts(torch.nn.Sequential(experts))
    expert.linear_fc1 = torch.nn.Linear(2, 2)
    group_experts(torch.nn.Sequential(experts))
    assert type(experts) is SequentialMLP
