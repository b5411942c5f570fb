"""The loss by Triton's kernels on this device, beside torch's operations."""

import pytest
import torch

from megatron.packing.model.loss import cross_entropy
from megatron.packing.model.loss.cross_entropy import CrossEntropy, Words
from megatron.packing.model.multipliers import LogitRule
from tests.unit_tests.packing.stubs import Ranks

NUM_ROWS, WIDTH, NUM_ROWS_OF_WEIGHT = 300, 64, 50_304


@pytest.mark.parametrize("num_words", [None, 50_257], ids=["all words", "padding"])
@pytest.mark.parametrize("rows_at_a_time", [NUM_ROWS, 128], ids=["one chunk", "chunks"])
def test_losses_and_gradients_are_torchs(num_words, rows_at_a_time, device, monkeypatch):
    """The kernels have been interpreted and compiled, and never run, where there is no GPU."""
    if device.type == "cpu":
        pytest.skip("Triton's kernels need a GPU: make kernels interprets them")
    monkeypatch.setattr(cross_entropy, "_CHUNK_LOGITS", rows_at_a_time * NUM_ROWS_OF_WEIGHT)
    generator = torch.Generator(device).manual_seed(1)
    options = {"device": device, "generator": generator}
    states, weight = (
        torch.randn(rows, WIDTH, dtype=torch.bfloat16, **options).requires_grad_()
        for rows in (NUM_ROWS, NUM_ROWS_OF_WEIGHT)
    )
    labels = torch.randint(50_000, (NUM_ROWS,), **options)
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
