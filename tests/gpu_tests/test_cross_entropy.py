"""The loss by Triton's kernels on this device, beside torch's operations."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.packing.device import Device
from megatron.packing.model.loss import cross_entropy
from megatron.packing.model.loss.cross_entropy import CrossEntropy, Words
from megatron.packing.model.multipliers import LogitRule
from tests.unit_tests.packing.stubs import Ranks

NUM_ROWS, WIDTH, NUM_ROWS_OF_WEIGHT = 300, 64, 50_304


def states_weight_labels(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(1)
    options: dict[str, Any] = {"device": device, "generator": generator}
    states, weight = (
        torch.randn(rows, WIDTH, dtype=torch.bfloat16, **options).requires_grad_()
        for rows in (NUM_ROWS, NUM_ROWS_OF_WEIGHT)
    )
    return states, weight, torch.randint(50_000, (NUM_ROWS,), **options)


@pytest.mark.parametrize("num_words", [None, 50_257], ids=["all words", "padding"])
@pytest.mark.parametrize("rows_at_a_time", [NUM_ROWS, 128], ids=["one chunk", "chunks"])
def test_losses_and_gradients_are_torchs(num_words, rows_at_a_time, device, monkeypatch):
    """Where there is no GPU the kernels are interpreted, elsewhere (make kernels)."""
    if device.type == "cpu":
        pytest.skip("Triton's kernels need a GPU: make kernels interprets them")
    monkeypatch.setattr(cross_entropy, "_CHUNK_LOGITS", rows_at_a_time * NUM_ROWS_OF_WEIGHT)
    states, weight, labels = states_weight_labels(device)
    found = []
    for is_fused in (False, True):
        words = Words(num_words, LogitRule(), is_fused)
        losses, is_right = CrossEntropy.apply(states, weight, labels, words, Ranks())
        gradients = torch.autograd.grad(losses.square().mean(), (states, weight))
        found.append((losses, is_right, gradients))
    plain, fused = found
    torch.testing.assert_close(fused[0], plain[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(fused[1], plain[1])
    torch.testing.assert_close(fused[2], plain[2])


@pytest.mark.parametrize("is_fused", [False, True], ids=["plain", "kernels"])
def test_the_weights_gradient_is_rounded_once(is_fused, device, monkeypatch):
    """Several chunks' products are added up in float32: of each rounded to bfloat16, the sum would
    be off by more than its own rounding.
    """
    if device.type == "cpu":
        pytest.skip("a CPU rounds each product")
    monkeypatch.setattr(cross_entropy, "_CHUNK_LOGITS", 64 * NUM_ROWS_OF_WEIGHT)
    add, factors = cross_entropy._add_product, list[tuple[Tensor, Tensor]]()

    def noting(total: Tensor | None, left: Tensor, right: Tensor, *how: Any) -> Tensor:
        factors.append((left.double(), right.double()))
        return add(total, left, right, *how)

    monkeypatch.setattr(cross_entropy, "_add_product", noting)
    states, weight, labels = states_weight_labels(device)
    words = Words(None, LogitRule(), is_fused)
    losses, _ = CrossEntropy.apply(states, weight, labels, words, Ranks())
    (found,) = torch.autograd.grad(losses.sum(), weight)
    assert len(factors) == (3 if is_fused else 5)
    expected = torch.stack([left @ right for left, right in factors]).sum(0)
    # Half of bfloat16's spacing, and float32's rounding of sums in which terms cancel.
    bound = 2**-8 * expected.abs() + 1e-6 * expected.abs().max()
    assert ((found.double() - expected).abs() <= bound).all()


def test_kept_logits_change_no_bit(device, monkeypatch):
    """Each chunk's gradients are written over its logits, which another chunk must not share."""
    if device.type == "cpu":
        pytest.skip("Triton's kernels need a GPU: make kernels interprets them")
    monkeypatch.setattr(cross_entropy, "_CHUNK_LOGITS", 64 * NUM_ROWS_OF_WEIGHT)
    states, weight, labels = states_weight_labels(device)
    found = []
    for keeps_logits in (False, True):
        words = Words(50_257, LogitRule(), is_fused=True, keeps_logits=keeps_logits)
        losses, _ = CrossEntropy.apply(states, weight, labels, words, Ranks())
        found.append([losses, *torch.autograd.grad(losses.sum(), (states, weight))])
    assert all(map(torch.equal, *found))


def test_a_product_is_added_in_place(device):
    """A copy of the sum for each chunk would cost what adding within the product saves."""
    if device.type == "cpu":
        pytest.skip("a CPU writes each product")
    left, right = (torch.ones(64, n, dtype=torch.bfloat16, device=device) for n in (4096, 512))
    total, how = None, (torch.float32, Device.at(device))
    for _ in range(2):  # cuBLAS's workspace, once
        total = cross_entropy._add_product(total, left.t(), right, *how)
    torch.cuda.reset_peak_memory_stats(device)
    held = torch.cuda.memory_allocated(device)
    again = cross_entropy._add_product(total, left.t(), right, *how)
    assert again is total
    assert torch.cuda.max_memory_allocated(device) == held
    assert again.unique().tolist() == [3 * 64.0]
