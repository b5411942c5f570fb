"""Norms of queries and keys over all heads, and additions with a norm or a factor, beside
transformers' definitions.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from megatron.packing.model.layers.norms import WholeWidthNorm
from megatron.packing.model.layers.residual import ResidualAdd
from tests.unit_tests.packing.stubs import Ranks

assert_exact = partial(torch.testing.assert_close, rtol=0, atol=1e-12)
HEADS, WIDTH, HIDDEN = 4, 8, 16


def config_of(**options: Any) -> TransformerConfig:
    return TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        params_dtype=torch.float64,
        normalization="RMSNorm",
        **options,
    )


def in_float64(norm: nn.Module, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """transformers' norms compute in float32 by name."""
    monkeypatch.setattr(Tensor, "float", lambda self: self)
    monkeypatch.setattr(torch, "float32", torch.float64)
    return norm.double()


def randomised(*modules: nn.Module) -> None:
    """Gives all modules the same random weights."""
    torch.manual_seed(3)
    weight = torch.randn_like(next(modules[0].parameters()))
    with torch.no_grad():
        for module in modules:
            next(module.parameters()).copy_(weight)


@pytest.mark.parametrize(
    ("is_zero_centered", "kind"), [(False, Olmo2RMSNorm), (True, Gemma2RMSNorm)]
)
def test_norm_over_all_heads(is_zero_centered, kind, monkeypatch):
    """A norm of each head has other sums, and its weight is one head's."""
    config: Any = SimpleNamespace(
        layernorm_zero_centered_gamma=is_zero_centered, params_dtype=torch.float64
    )
    group: Any = Ranks()
    norm = WholeWidthNorm(config, WIDTH, 1e-5, HEADS, group)
    other = in_float64(kind(HEADS * WIDTH, 1e-5), monkeypatch)
    randomised(norm, other)
    x = torch.randn(7, 1, HEADS, WIDTH, dtype=torch.float64, requires_grad=True)
    results = norm(x).flatten(2), other(x.flatten(2))
    assert_exact(*results)
    weights = torch.randn_like(results[0])
    gradients = [
        torch.autograd.grad((out * weights).sum(), (x, *module.parameters()))
        for out, module in zip(results, (norm, other))
    ]
    for pair in zip(*gradients):
        assert_exact(*pair)


def test_heads_that_ranks_would_share_are_refused():
    """Two ranks with the same keys would both add to their squares."""
    config: Any = SimpleNamespace(layernorm_zero_centered_gamma=False, params_dtype=torch.float64)
    group: Any = Ranks(4, 1)
    with pytest.raises(ValueError, match=r"2 heads .* it is 4; lower --tensor-model-parallel-size"):
        WholeWidthNorm(config, WIDTH, 1e-5, 2, group)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("factor", [1.0, 0.22])
@pytest.mark.parametrize("is_zero_centered", [None, False, True])
def test_addition(is_zero_centered, factor, has_bias, monkeypatch):
    """residual + factor * norm(branch + bias); without a norm or a factor it is plain addition."""
    config = config_of(layernorm_zero_centered_gamma=bool(is_zero_centered))
    add = ResidualAdd(config, has_norm=is_zero_centered is not None, factor=factor)
    branch, residual = (torch.randn(5, 1, HIDDEN, dtype=torch.float64) for _ in range(2))
    bias = torch.randn(HIDDEN, dtype=torch.float64) if has_bias else None
    normed = branch if bias is None else branch + bias
    if is_zero_centered is not None:
        other = in_float64(
            (Gemma2RMSNorm if is_zero_centered else Olmo2RMSNorm)(HIDDEN, 1e-5), monkeypatch
        )
        randomised(add, other)
        normed = other(normed)
    assert_exact(add(True, False)((branch, bias), residual, 0.0), residual + factor * normed)


def test_dropout_is_of_the_branch_and_of_training_only():
    """The residual is never dropped."""
    add, zeros = ResidualAdd(config_of()), torch.zeros(100, HIDDEN, dtype=torch.float64)
    out = add(True, False)((zeros + 1, None), zeros + 5, 0.5)
    assert set(out.flatten().tolist()) == {5.0, 7.0}
    assert (add(False, False)((zeros + 1, None), zeros + 5, 0.5) == 6).all()


@pytest.mark.parametrize("is_parallel", [False, True])
def test_norm_behind_a_branch_is_summed_under_sequence_parallel(is_parallel):
    """Each rank's norm sees its tokens alone; unmarked weights would drift apart."""
    config = config_of(sequence_parallel=is_parallel, tensor_model_parallel_size=1 + is_parallel)
    (weight,) = ResidualAdd(config, has_norm=True).parameters()
    assert weight.sequence_parallel == is_parallel  # type: ignore[attr-defined]
