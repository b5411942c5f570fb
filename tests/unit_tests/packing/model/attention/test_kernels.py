"""Which kernel computes attention on a GPU, and what it is told; stand-ins that compute on the CPU
take the calls.
"""

import inspect
import sys
import warnings
from types import ModuleType

import pytest
import torch

from megatron.packing.device import CPU
from megatron.packing.model.attention import kernels
from megatron.packing.model.attention.blocks import Scores, Segments
from megatron.packing.model.attention.kernels import (
    Needs,
    _by_sequence,
    causal_attention,
    kernel_for,
)
from megatron.sft.fit.fake.described_gpu import DescribedGPU

HOPPER, AMPERE, TURING = (9, 0), (8, 0), (7, 5)


@pytest.fixture
def gpu(monkeypatch):
    """Makes one, without or with FlashAttention 4."""
    kernel_for.cache_clear()

    def stub(capability, flash_4=False):
        monkeypatch.setattr(kernels, "_flash_4_installed", lambda: flash_4)
        monkeypatch.setattr(kernels, "_flash_4", lambda: "FlashAttention 4")
        monkeypatch.setattr(kernels, "_varlen", lambda: "torch's")
        return DescribedGPU(capability=capability)

    yield stub
    kernel_for.cache_clear()


@pytest.mark.parametrize(
    ("capability", "flash_4", "width", "is_deterministic", "kernel"),
    [
        (AMPERE, False, 256, False, "torch's"),
        (AMPERE, True, 64, False, "torch's"),
        (HOPPER, True, 128, False, "FlashAttention 4"),
        (HOPPER, True, 80, False, "torch's"),
        (HOPPER, True, 136, False, "torch's"),
        (HOPPER, True, 128, True, "torch's"),
    ],
)
def test_fastest_kernel_that_takes_the_model(
    gpu, capability, flash_4, width, is_deterministic, kernel
):
    """A kernel that does not take heads of a width ends the run in its first layer."""
    device = gpu(capability, flash_4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kernel_for(device, torch.bfloat16, width, is_deterministic) == kernel


WINDOW, CAP, SINKS = Needs(window=True), Needs(softcap=True), Needs(sinks=True)


@pytest.mark.parametrize(
    ("capability", "flash_4", "needs", "kernel"),
    [
        (HOPPER, True, WINDOW, "FlashAttention 4"),
        (HOPPER, True, CAP, "FlashAttention 4"),
        (HOPPER, True, SINKS, "torch's"),
        (AMPERE, False, WINDOW, "torch's"),
        (AMPERE, False, SINKS, "torch's"),
    ],
)
def test_kernel_takes_what_the_layer_needs(gpu, capability, flash_4, needs, kernel):
    """A kernel without caps or sinks would train another model, and not tell."""
    device = gpu(capability, flash_4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kernel_for(device, torch.bfloat16, 64, False, needs) == kernel


def test_what_no_kernel_takes_is_computed_in_blocks(gpu, monkeypatch):
    """Soft caps without FlashAttention 4, and windows before torch 2.11: exact, and said."""
    device = gpu(AMPERE)
    with pytest.warns(UserWarning, match="no kernel for soft caps .*install flash-attn-4"):
        assert kernel_for(device, torch.bfloat16, 64, False, CAP) is _by_sequence
    monkeypatch.setattr(kernels, "_varlen_takes_windows", lambda: False)
    needs = Needs(sinks=True, window=True)
    with pytest.warns(UserWarning, match="windows or sinks in this torch"):
        assert kernel_for(device, torch.bfloat16, 64, False, needs) is _by_sequence


@pytest.mark.parametrize(
    ("capability", "dtype", "width", "reason"),
    [
        (HOPPER, torch.float32, 64, "no kernel for float32: it takes bfloat16; pass --bf16"),
        (HOPPER, torch.bfloat16, 264, "heads of 264 channels"),
        (TURING, torch.float16, 64, "a GPU: it takes compute capability 8.0"),
    ],
)
def test_slow_ways_are_said_once(gpu, capability, dtype, width, reason):
    """A run that takes ten times as long for a missing flag looks like a slow machine; once, and
    not in each layer.
    """
    device = gpu(capability, True)
    with pytest.warns(UserWarning, match=f"sequence by sequence, which is slow: .*{reason}"):
        assert kernel_for(device, dtype, width, False) is _by_sequence
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kernel_for(device, dtype, width, False) is _by_sequence
        assert kernel_for(CPU, dtype, width, False) is _by_sequence


def lengths_of(cu_seqlens):
    assert cu_seqlens.dtype == torch.int32
    return tuple(cu_seqlens.diff().tolist())


def attended(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size=None, softcap=None
):
    """What both kernels do, in any precision and with what they demand."""
    assert query.shape[-1] % 8 == 0
    assert all(x.stride(-1) == 1 for x in (query, key, value))
    assert (max_q, max_k) == (max(lengths_of(cu_seq_q)), max(lengths_of(cu_seq_k)))
    segments = Segments(lengths_of(cu_seq_q), lengths_of(cu_seq_k))
    before, after = window_size or (-1, 0)
    assert after == 0
    window = None if before == -1 else before + 1
    scores = Scores(scale=scale, window=window, softcap=softcap)
    return _by_sequence(query, key, value, segments, scores)


def of_2_10(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None):
    assert is_causal
    return attended(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, query.shape[-1] ** -0.5)


def of_2_11(
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    *,
    return_aux=None,
    scale=None,
    window_size=(-1, -1),
):
    return attended(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size)


def of_2_13(
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    *,
    return_aux=None,
    scale=None,
    window_size=(-1, -1),
    enable_gqa=False,
    seqused_k=None,
):
    assert enable_gqa == (query.shape[1] != key.shape[1])
    assert seqused_k is None
    return attended(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size)


def flash_4(
    q,
    k,
    v,
    qv=None,
    *,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    softmax_scale,
    causal,
    window_size=None,
    softcap=None,
):
    assert causal
    assert qv is None
    places = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    out = attended(q, k, v, *places, softmax_scale, window_size, softcap)
    return out, torch.zeros(1)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("width", [8, 12])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("stub", [of_2_10, of_2_11, of_2_13, flash_4])
def test_calls(monkeypatch, stub, window, width, heads):
    """Each release takes the scale, the mask, the window (with a query's own key or without it) and
    groups of heads in its own way; one that is left out is another model. Keys and values may be
    parts of rows; they are copied for heads of odd widths only.
    """
    if stub is flash_4:
        module = ModuleType("flash_attn.cute")
        vars(module)["flash_attn_varlen_func"] = stub
        monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
        monkeypatch.setitem(sys.modules, "flash_attn.cute", module)
        kernel = kernels._flash_4.__wrapped__()
    else:
        monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", stub)
        kernel = kernels._varlen.__wrapped__()
    generator = torch.Generator().manual_seed(1)
    query, rows = (
        torch.randn(shape, dtype=torch.float64, generator=generator, requires_grad=True)
        for shape in ((6, heads[0], width), (14, heads[1], 2 * width))
    )
    key, value = rows.chunk(2, dim=-1)
    softcap = 0.7 if stub is flash_4 else None
    scores = Scores(scale=0.3, window=None if stub is of_2_10 else window, softcap=softcap)
    given = query, key, value, Segments((2, 4), (7, 7)), scores, None
    out, expected = kernel(*given), _by_sequence(*given)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-14)
    weights = torch.randn(out.shape, dtype=torch.float64, generator=generator)
    for one, other in zip(
        *(torch.autograd.grad((x * weights).sum(), (query, rows)) for x in (out, expected))
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-14)


def test_stand_in_is_the_installed_torchs():
    """Or a new release would be called as an old one, and nobody would know before a GPU is
    there."""
    from torch.nn.attention.varlen import varlen_attn

    installed = inspect.signature(varlen_attn).parameters
    stubs = [inspect.signature(stub).parameters for stub in (of_2_10, of_2_11, of_2_13)]
    assert any(
        [name for name in installed if name in stub] == list(stub)
        and all(
            (name in installed) == (name in stub)
            for name in ("is_causal", "scale", "window_size", "enable_gqa")
        )
        for stub in stubs
    )


def by_definition(query, key, cu_seq_q, cu_seq_k, scale, window_size):
    """Scores [heads, queries, keys] of whole packs, minus infinity where nothing is seen."""
    before, _ = window_size
    seen = torch.zeros(len(query), len(key), dtype=torch.bool)
    for q0, q1, k0, k1 in zip(cu_seq_q, cu_seq_q[1:], cu_seq_k, cu_seq_k[1:]):
        own = torch.arange(int(k1 - (q1 - q0)), int(k1))[:, None]
        keys = torch.arange(len(key))
        is_near = (keys <= own) & ((before < 0) | (own - keys <= before))
        seen[q0:q1] = is_near & (keys >= k0)
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    return scores.masked_fill(~seen, -torch.inf)


def varlen_with_log_sum(
    query, key, value, cu_q, cu_k, max_q, max_k, *, return_aux, scale, window_size, enable_gqa=False
):
    """torch's forward pass with return_aux, by its documentation."""
    assert return_aux.lse
    assert enable_gqa == (query.shape[1] != key.shape[1])
    scores = by_definition(query, key, cu_q, cu_k, scale, window_size)
    values = value.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values), scores.logsumexp(-1)


def varlen_backward(
    grad_out,
    query,
    key,
    value,
    out,
    lse,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    is_causal,
    rng_state,
    scale=None,
    window_size=None,
):
    """FlashAttention's formulas, which take output and log of the sum as they are given."""
    assert is_causal == (tuple(window_size) == (-1, 0))
    assert grad_out.is_contiguous()
    times = query.shape[1] // key.shape[1]
    scores = by_definition(query, key, cu_seq_q, cu_seq_k, scale, window_size)
    shares = (scores - lse.unsqueeze(2)).exp()
    values, keys = (x.repeat_interleave(times, dim=1) for x in (value, key))
    of_shares = torch.einsum("qhd,khd->hqk", grad_out, values)
    delta = (grad_out * out).sum(-1).t().unsqueeze(2)
    of_scores = shares * (of_shares - delta) * scale
    of_key = torch.einsum("hqk,qhd->khd", of_scores, query).unflatten(1, (-1, times)).sum(2)
    of_value = torch.einsum("hqk,qhd->khd", shares, grad_out).unflatten(1, (-1, times)).sum(2)
    return torch.einsum("hqk,khd->qhd", of_scores, keys), of_key, of_value


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("width", [8, 12])
def test_sinks_on_torchs_kernel(monkeypatch, width, window):
    """Autograd through torch's log of the sum is silently wrong, since its backward pass ignores
    that gradient: the rule must give what blocks of plain torch give, for each input.
    """
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_with_log_sum)
    monkeypatch.setattr(torch.ops.torch_attn, "_varlen_attn_backward", varlen_backward)
    generator = torch.Generator().manual_seed(1)
    leaves = [
        torch.randn(shape, dtype=torch.float64, generator=generator, requires_grad=True)
        for shape in ((6, 4, width), (14, 2, width), (14, 2, width), (4,))
    ]
    segments, scores = Segments((2, 4), (7, 7)), Scores(scale=0.3, window=window)
    query, key, value, sinks = leaves
    results = [
        kernel(query, key, value, segments, scores, sinks)
        for kernel in (kernels._varlen.__wrapped__(), causal_attention)
    ]
    torch.testing.assert_close(*results, rtol=0, atol=1e-13)
    weights = torch.randn(results[0].shape, dtype=torch.float64, generator=generator)
    gradients = [torch.autograd.grad((out * weights).sum(), leaves) for out in results]
    for one, other in zip(*gradients):
        assert other.abs().max() > 0.01
        torch.testing.assert_close(one, other, rtol=0, atol=1e-13)


def test_backward_stand_in_is_the_installed_torchs():
    """Its arguments are private to torch, and another release may name them otherwise."""
    schema = torch.ops.torch_attn._varlen_attn_backward.default._schema
    named = list(inspect.signature(varlen_backward).parameters)
    assert [argument.name for argument in schema.arguments] == named
