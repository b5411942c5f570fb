"""A product that is added where it is made, and who makes it."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.tensor_parallel import layers

from megatron.sft.model import weight_gradients

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.mark.parametrize(
    ("dtype", "of_total"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
    ],
    ids=str,
)
def test_it_is_added_to_what_is_there(dtype: torch.dtype, of_total: torch.dtype) -> None:
    """Instead of it, or transposed, the gradients of all microbatches but the last were lost."""
    generator = torch.Generator().manual_seed(1)
    x, gradient = (
        torch.randn(7, width, generator=generator, dtype=torch.float64).to(dtype)
        for width in (5, 3)
    )
    total = torch.ones(3, 5, dtype=of_total)
    weight_gradients.add_product(x, gradient, total)
    expected = 1 + gradient.double().t() @ x.double()
    rounding = 4 * torch.finfo(torch.promote_types(dtype, of_total)).eps
    rounding = max(rounding, 4 * torch.finfo(dtype).eps)  # on CPU the product is rounded, too
    torch.testing.assert_close(total.double(), expected, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("has_apex", [False, True])
def test_apex_comes_first(has_apex: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user who has installed it has measured it."""
    apex = SimpleNamespace()
    monkeypatch.setattr(layers, "_grad_accum_fusion_available", has_apex)
    monkeypatch.setattr(layers, "fused_weight_gradient_mlp_cuda", apex, raising=False)
    for _ in range(2):
        weight_gradients.install()
        assert layers._grad_accum_fusion_available
        found = layers.fused_weight_gradient_mlp_cuda
        if has_apex:
            assert found is apex
        else:
            assert found.wgrad_gemm_accum_fp32 is weight_gradients.add_product
            assert found.wgrad_gemm_accum_fp16 is weight_gradients.add_product
