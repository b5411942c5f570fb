"""Which kernel computes attention on a GPU, and what it is told; stand-ins that compute on the CPU
take the calls.
"""

import inspect
import sys
import warnings
from types import ModuleType

import pytest
import torch

from megatron.packing.model import attention_kernels as kernels
from megatron.packing.model.attention_kernels import _by_sequence, kernel_for

GPU = torch.device("cuda", 0)
HOPPER, AMPERE, TURING = (9, 0), (8, 0), (7, 5)


@pytest.fixture
def gpu(monkeypatch):
    """Lets the process believe in one, without or with FlashAttention 4."""
    kernel_for.cache_clear()

    def stub(capability, flash_4=False):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
        monkeypatch.setattr(kernels, "_flash_4_installed", lambda: flash_4)
        monkeypatch.setattr(kernels, "_flash_4", lambda: "FlashAttention 4")
        monkeypatch.setattr(kernels, "_varlen", lambda: "torch's")

    yield stub
    kernel_for.cache_clear()


@pytest.mark.parametrize(
    ("capability", "flash_4", "width", "is_deterministic", "kernel"),
    [
        (AMPERE, False, 256, False, "torch's"),
        (AMPERE, True, 64, False, "torch's"),
        (HOPPER, True, 128, False, "FlashAttention 4"),
        (HOPPER, True, 136, False, "torch's"),
        (HOPPER, True, 128, True, "torch's"),
    ],
)
def test_fastest_kernel_that_takes_the_model(
    gpu, capability, flash_4, width, is_deterministic, kernel
):
    """A kernel that does not take heads of a width ends the run in its first layer."""
    gpu(capability, flash_4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kernel_for(GPU, torch.bfloat16, width, is_deterministic) == kernel


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
    gpu(capability, True)
    with pytest.warns(UserWarning, match=f"sequence by sequence, which is slow: .*{reason}"):
        assert kernel_for(GPU, dtype, width, False) is _by_sequence
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kernel_for(GPU, dtype, width, False) is _by_sequence
        assert kernel_for(torch.device("cpu"), dtype, width, False) is _by_sequence


def lengths_of(cu_seqlens):
    assert cu_seqlens.dtype == torch.int32
    return tuple(cu_seqlens.diff().tolist())


def attended(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale):
    """What both kernels do, in any precision and with what they demand."""
    assert query.shape[-1] % 8 == 0
    assert all(x.stride(-1) == 1 for x in (query, key, value))
    assert (max_q, max_k) == (max(lengths_of(cu_seq_q)), max(lengths_of(cu_seq_k)))
    return _by_sequence(query, key, value, lengths_of(cu_seq_q), lengths_of(cu_seq_k), scale)


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
    assert window_size == (-1, 0)
    return attended(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale)


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
    assert window_size == (-1, 0)
    assert enable_gqa == (query.shape[1] != key.shape[1])
    assert seqused_k is None
    return attended(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale)


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
):
    assert causal
    assert qv is None
    return attended(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale
    ), torch.zeros(1)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("width", [8, 12])
@pytest.mark.parametrize("stub", [of_2_10, of_2_11, of_2_13, flash_4])
def test_calls(monkeypatch, stub, width, heads):
    """Each release takes the scale, the mask and groups of heads in its own way; one that is left
    out is another model. Keys and values may be parts of rows; they are copied for heads of odd
    widths only.
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
    given = query, key, value, (2, 4), (7, 7), 0.3
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
