"""The gated delta net of a pack: transformers' module on each sequence alone, exactly."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

from megatron.packing.batch.layout import Alignment, PackLayout
from megatron.packing.batch.microbatches import layout_microbatches
from megatron.packing.device import Device
from megatron.packing.model.get_batch import packed_seq_params
from megatron.packing.model.parts import delta_rule
from megatron.packing.model.parts.delta_net import DeltaNet
from megatron.packing.model.parts.delta_net_module import GatedDeltaNet
from megatron.packing.model.parts.delta_rule import Inputs, causal_convolution, gated_delta_rule
from megatron.planner.calibrate import one_process

CPU = torch.device("cpu")
HIDDEN = 24
SHAPE: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
}


def token_by_token(inputs: Inputs, lengths: tuple[int, ...]) -> Tensor:
    """The definition: one state per sequence and head, from token to token."""
    query, key, value, decay, beta = inputs
    times = value.shape[1] // key.shape[1]
    query, key = (
        (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)).repeat_interleave(times, 1)
        for x in (query, key)
    )
    outputs, end = [], 0
    for length in lengths:
        state = value.new_zeros(value.shape[1], key.shape[2], value.shape[2])
        for token in range(end, end + length):
            state = state * decay[token].exp()[:, None, None]
            known = torch.einsum("hk,hkv->hv", key[token], state)
            written = beta[token, :, None] * (value[token] - known)
            state = state + torch.einsum("hk,hv->hkv", key[token], written)
            outputs.append(torch.einsum("hk,hkv->hv", query[token], state))
        end += length
    return torch.stack(outputs) * query.shape[-1] ** -0.5


def random_inputs(num_tokens: int) -> list[Tensor]:
    """Heads as in SHAPE; decays that are strong and weak."""
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(num_tokens, *shape, dtype=torch.float64, generator=generator)

    leaves = [random(2, 8), random(2, 8), random(4, 6), -random(4).exp(), random(4).sigmoid()]
    return [leaf.requires_grad_() for leaf in leaves]


def assert_same(out: Tensor, expected: Tensor, leaves: list[Tensor]) -> None:
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    weights = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(2))
    for one, other in zip(
        torch.autograd.grad((out * weights).sum(), leaves),
        torch.autograd.grad((expected * weights).sum(), leaves),
    ):
        assert other.abs().max() > 1e-3
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("lengths", [(9, 40, 1, 23), (5,), (130, 3, 64, 1)])
def test_chunks_are_the_recurrence(lengths):
    """A state that leaks from sequence to sequence, or from chunk to chunk undecayed, still trains.
    130 tokens are three chunks, of which the last has two tokens.
    """
    leaves = random_inputs(sum(lengths))
    inputs = Inputs(*leaves)
    assert_same(gated_delta_rule(inputs, lengths), token_by_token(inputs, lengths), leaves)


@pytest.mark.parametrize("lengths", [(9, 2, 1, 23), (2, 1)])
def test_convolution_is_of_each_sequence(lengths):
    """The first tokens of a sequence see zeros before them, not the sequence before."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(sum(lengths), 6, dtype=torch.float64, generator=generator, requires_grad=True)
    weight = torch.randn(6, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    alone = []
    for part in x.split(lengths):
        padded = torch.nn.functional.pad(part.t()[None], (3, 0))
        alone.append(torch.nn.functional.conv1d(padded, weight[:, None], groups=6)[0].t())
    expected = torch.nn.functional.silu(torch.cat(alone))
    assert_same(causal_convolution(x, weight, lengths), expected, [x, weight])


def test_kernels_are_given_each_sequence(monkeypatch):
    """On CUDA both steps take `cu_seqlens`, or states and windows leak over the borders; here
    stand-ins with flash-linear-attention's arguments take the calls.
    """

    def lengths_of(cu_seqlens: Tensor) -> tuple[int, ...]:
        assert cu_seqlens.dtype == torch.int64
        return tuple(cu_seqlens.diff().tolist())

    def causal_conv1d(x, weight=None, bias=None, residual=None, *, activation, cu_seqlens):
        assert (activation, bias, residual) == ("silu", None, None)
        monkeypatch.setattr(delta_rule, "has_kernels", lambda *_: False)
        out = causal_convolution(x.squeeze(0), weight, lengths_of(cu_seqlens))
        monkeypatch.setattr(delta_rule, "has_kernels", lambda *_: True)
        return out.unsqueeze(0), None

    def chunk_gated_delta_rule(q, k, v, g, beta, *, use_qk_l2norm_in_kernel, cu_seqlens):
        assert use_qk_l2norm_in_kernel
        assert q.shape[:3] == k.shape[:3] == v.shape[:3] == (*g.shape, *v.shape[3:])[:3]
        inputs = Inputs(*(x.squeeze(0) for x in (q, k, v, g, beta)))
        return token_by_token(inputs, lengths_of(cu_seqlens)).unsqueeze(0), None

    modules: dict[str, dict[str, Any]] = {
        "fla": {},
        "fla.modules": {},
        "fla.ops": {},
        "fla.modules.convolution": {"causal_conv1d": causal_conv1d},
        "fla.ops.gated_delta_rule": {"chunk_gated_delta_rule": chunk_gated_delta_rule},
    }
    for name, contents in modules.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    lengths, leaves = (9, 0, 40), random_inputs(49)
    inputs = Inputs(*leaves)
    x, weight = leaves[2].flatten(1), torch.randn(24, 4, dtype=torch.float64)
    # Patched both times: the stand-ins have no spec, for which a test that runs first would look.
    monkeypatch.setattr(delta_rule, "has_kernels", lambda *_: False)
    expected = gated_delta_rule(inputs, lengths), causal_convolution(x, weight, lengths)
    monkeypatch.setattr(delta_rule, "has_kernels", lambda *_: True)
    found = gated_delta_rule(inputs, lengths), causal_convolution(x, weight, lengths)
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.fixture
def single_process():
    with one_process(Device.at(CPU)):
        yield


def net_and_transformers(monkeypatch: pytest.MonkeyPatch) -> tuple[GatedDeltaNet, Any]:
    """Ours and transformers', with the same random parameters in float64."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        use_cpu_initialization=True,
        params_dtype=torch.float64,
        normalization="RMSNorm",
        layernorm_zero_centered_gamma=True,
        **SHAPE,
    )
    ours = GatedDeltaNet(config, 1)
    theirs: Any = modeling_qwen3_5.Qwen3_5GatedDeltaNet(
        Qwen3_5TextConfig(  # type: ignore[arg-type]
            hidden_size=HIDDEN, num_hidden_layers=4, rms_norm_eps=config.layernorm_epsilon, **SHAPE
        ),
        0,
    ).double()
    monkeypatch.setattr(Tensor, "float", lambda self: self)
    monkeypatch.setattr(torch, "float32", torch.float64)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_()
        projections = (theirs.in_proj_qkv, theirs.in_proj_z, theirs.in_proj_b, theirs.in_proj_a)
        ours.in_proj.weight.copy_(torch.cat([x.weight for x in projections]))
        ours.conv1d.weight.copy_(theirs.conv1d.weight)
        ours.A_log.copy_(theirs.A_log)
        ours.dt_bias.copy_(theirs.dt_bias)
        ours.out_norm.weight.copy_(theirs.norm.weight)
        ours.out_proj.weight.copy_(theirs.out_proj.weight)
    return ours, theirs


@pytest.mark.usefixtures("single_process")
def test_module_is_that_of_transformers(monkeypatch):
    """Of each sequence alone, in output and in every gradient; the inner norm is plain also where
    the model's norms are zero-centred.
    """
    ours, theirs = net_and_transformers(monkeypatch)
    lengths = (9, 40, 1, 23)
    layout = PackLayout.of(lengths, Alignment())
    params = packed_seq_params(layout_microbatches([layout])[0], CPU)
    hidden = torch.randn(sum(lengths), 1, HIDDEN, dtype=torch.float64)
    out, bias = ours(hidden, None, packed_seq_params=params)
    assert bias is None
    alone = [theirs(part.transpose(0, 1)).transpose(0, 1) for part in hidden.split(lengths)]
    expected = torch.cat(alone)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    weights = torch.randn_like(out)
    (out * weights).sum().backward()
    (expected * weights).sum().backward()
    projections = (theirs.in_proj_qkv, theirs.in_proj_z, theirs.in_proj_b, theirs.in_proj_a)
    pairs = [
        (ours.in_proj.weight.grad, torch.cat([x.weight.grad for x in projections])),
        (ours.conv1d.weight.grad, theirs.conv1d.weight.grad),
        (ours.A_log.grad, theirs.A_log.grad),
        (ours.dt_bias.grad, theirs.dt_bias.grad),
        (ours.out_norm.weight.grad, theirs.norm.weight.grad),
        (ours.out_proj.weight.grad, theirs.out_proj.weight.grad),
    ]
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-11)


@pytest.mark.usefixtures("single_process")
def test_its_parameters_are_declared(monkeypatch):
    """Weights in and out, checkpoints and adapters see those that are."""
    net, _ = net_and_transformers(monkeypatch)
    sizes = DeltaNet(**SHAPE).sizes() | {"one": 1, "hidden": HIDDEN}
    declared = {
        parameter.path: tuple(
            sum(sizes[one] for one in size.split(",")) for size in parameter.shape
        )
        for parameter in DeltaNet.parameters
    }
    built = {f"self_attention.{name}": tuple(x.shape) for name, x in net.named_parameters()}
    assert declared == built


@pytest.mark.usefixtures("single_process")
def test_rows_of_a_batch_are_sequences():
    """Runs without packing give [s, b]."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        use_cpu_initialization=True,
        params_dtype=torch.float64,
        **SHAPE,
    )
    net, hidden = GatedDeltaNet(config, 1), torch.randn(7, 3, HIDDEN, dtype=torch.float64)
    whole = net(hidden)[0]
    for row in range(3):
        alone = net(hidden[:, row : row + 1])[0]
        torch.testing.assert_close(whole[:, row : row + 1], alone, rtol=0, atol=1e-13)


def test_the_module_refuses_heads_that_do_not_divide(monkeypatch):
    """A script of its own may build it under options that nobody has checked."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        use_cpu_initialization=True,
        **SHAPE,
    )
    ranks: Any = SimpleNamespace(size=lambda: 2)
    groups: Any = SimpleNamespace(tp=ranks, cp=ranks)
    with pytest.raises(ValueError, match=r"--linear-num-key-heads 2 must be .* whose ranks share"):
        GatedDeltaNet(config, 1, groups)
