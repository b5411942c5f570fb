"""Mechanisms of a layer, cut over tensor and context parallel: what one process computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron.packing.batch.layout import Alignment, PackLayout
from megatron.packing.batch.microbatches import layout_microbatches
from megatron.packing.model.attention.rotary import LayerRotary
from megatron.packing.model.attention.zigzag import shard_index
from megatron.packing.model.get_batch import packed_seq_params
from megatron.packing.model.layers.norms import WholeWidthNorm
from megatron.packing.model.parts.delta_net_module import GatedDeltaNet
from megatron.packing.model.parts.latent_attention import LatentAttention
from megatron.packing.model.parts.latent_attention_module import LatentSelfAttention
from megatron.sft.model import cpu_support
from megatron.sft.model.rope import plain_frequencies
from tests.functional_tests.ranks import run_ranks

LENGTHS = (24, 8, 40)
HIDDEN, HEADS, WIDTH = 24, 4, 8


def random(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def initialize(tensor: int, context: int) -> TransformerConfig:
    cpu_support.install()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor, context_parallel_size=context
    )
    return TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        use_cpu_initialization=True,
        params_dtype=torch.float64,
        normalization="RMSNorm",
        tensor_model_parallel_size=tensor,
        context_parallel_size=context,
        sequence_parallel=tensor > 1,
        attention_dropout=0.0,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=8,
        linear_value_head_dim=6,
    )


def whole_of(sections: list[int], part: Tensor, dim: int = 0) -> Tensor:
    """The full tensor of tensor-parallel parts, each section of which is cut on its own."""
    group = parallel_state.get_tensor_model_parallel_group()
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part.contiguous(), group=group)
    by_rank = [x.split(sections, dim) for x in parts]
    return torch.cat([torch.cat(section, dim) for section in zip(*by_rank)], dim)


def delta_net(tensor: int, context: int) -> dict[str, Tensor]:
    """Output and gradients, whole, of random whole parameters."""
    config = initialize(tensor, context)
    net = GatedDeltaNet(config, 1)
    rank, cp = parallel_state.get_tensor_model_parallel_rank(), net.cp_group
    qkv = list(net.sections.values())[:3]
    cuts: dict[str, tuple[list[int], int]] = {
        "in_proj.weight": (list(net.sections.values()), 0),
        "conv1d.weight": (qkv, 0),
        "A_log": ([net.value_heads], 0),
        "dt_bias": ([net.value_heads], 0),
        "out_proj.weight": ([net.out_proj.weight.shape[1]], 1),
    }
    for number, (name, parameter) in enumerate(net.named_parameters()):
        sections, dim = cuts.get(name, ([len(parameter)], 0))
        shape, times = list(parameter.shape), tensor if name in cuts else 1
        shape[dim] *= times
        whole = random(*shape, seed=number).split([size * times for size in sections], dim)
        mine = torch.cat([part.chunk(times, dim)[rank % times] for part in whole], dim)
        parameter.data.copy_(mine)
    index = shard_index(LENGTHS, context, cp.rank())
    tokens = torch.arange(sum(LENGTHS)) if index is None else index
    mine = tokens.chunk(tensor)[rank]  # sequence parallel
    hidden = random(sum(LENGTHS), 1, HIDDEN, seed=100)[mine].requires_grad_()
    layout = PackLayout.of(LENGTHS, Alignment())
    params = packed_seq_params(layout_microbatches([layout])[0], torch.device("cpu"))
    out, _ = net(hidden, None, packed_seq_params=params)
    (out * random(sum(LENGTHS), 1, HIDDEN, seed=101)[mine]).sum().backward()
    found = {}
    assert hidden.grad is not None
    for name, part in (("output", out.detach()), ("hidden", hidden.grad)):
        whole = torch.zeros(sum(LENGTHS), 1, HIDDEN, dtype=torch.float64)
        whole[mine] = part
        dist.all_reduce(whole)
        found[name] = whole
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad, group=cp)
        is_cut = name in cuts
        found[name] = whole_of(*_cut(cuts[name], parameter)) if is_cut else parameter.grad
    parallel_state.destroy_model_parallel()
    return found


def _cut(cut: tuple[list[int], int], parameter: nn.Parameter) -> tuple[list[int], Tensor, int]:
    assert parameter.grad is not None
    return cut[0], parameter.grad, cut[1]


def whole_width_norm(tensor: int, context: int) -> dict[str, Tensor]:
    """The same of a norm over all heads."""
    config = initialize(tensor, context)
    norm = WholeWidthNorm(config, WIDTH, 1e-5, HEADS)
    norm.weight.data.copy_(random(HEADS * WIDTH, seed=1))
    group = ProcessGroupCollection.use_mpu_process_groups(["tp"]).tp
    heads = slice(group.rank() * HEADS // tensor, (group.rank() + 1) * HEADS // tensor)
    x = random(7, 1, HEADS, WIDTH, seed=2).requires_grad_()
    out = norm(x[:, :, heads])
    (out * random(7, 1, HEADS, WIDTH, seed=3)[:, :, heads]).sum().backward()
    whole = torch.zeros_like(x)
    whole.data[:, :, heads] = out.detach()
    found = {"output": whole.detach(), "x": x.grad, "weight": norm.weight.grad}
    for part in found.values():
        dist.all_reduce(part, group=group)  # of the weight, as megatron-core's finalize step does
    parallel_state.destroy_model_parallel()
    return {name: part for name, part in found.items() if part is not None}


def latent_attention(tensor: int, context: int) -> dict[str, Tensor]:
    """The same of latent attention."""
    config = initialize(tensor, context)
    part = LatentAttention(
        num_attention_heads=HEADS,
        q_lora_rank=10,
        kv_lora_rank=8,
        qk_head_dim=6,
        qk_pos_emb_head_dim=4,
        v_head_dim=5,
    )
    rotary = LayerRotary(plain_frequencies(4, 100.0), is_interleaved=True)
    layer = LatentSelfAttention(config, 1, part, 1e-6, rotary)
    rank, cp = parallel_state.get_tensor_model_parallel_rank(), layer.cp_group
    dims = {name: 0 for name, _ in layer.named_parameters() if "layernorm" not in name}
    dims["linear_proj.weight"] = 1
    for number, (name, parameter) in enumerate(layer.named_parameters()):
        shape, dim = list(parameter.shape), dims.get(name)
        if dim is None:
            parameter.data.copy_(random(*shape, seed=number))
            continue
        shape[dim] *= tensor
        parameter.data.copy_(random(*shape, seed=number).chunk(tensor, dim)[rank] / 4)
    index = shard_index(LENGTHS, context, cp.rank())
    tokens = torch.arange(sum(LENGTHS)) if index is None else index
    mine = tokens.chunk(tensor)[rank]  # sequence parallel
    hidden = random(sum(LENGTHS), 1, HIDDEN, seed=100)[mine].requires_grad_()
    layout = PackLayout.of(LENGTHS, Alignment())
    params = packed_seq_params(layout_microbatches([layout])[0], torch.device("cpu"))
    out, _ = layer(hidden, None, packed_seq_params=params)
    (out * random(sum(LENGTHS), 1, HIDDEN, seed=101)[mine]).sum().backward()
    assert hidden.grad is not None
    found = {}
    for name, part_of_it in (("output", out.detach()), ("hidden", hidden.grad)):
        whole = torch.zeros(sum(LENGTHS), 1, HIDDEN, dtype=torch.float64)
        whole[mine] = part_of_it
        dist.all_reduce(whole)
        found[name] = whole
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad, group=cp)
        dim = dims.get(name)
        found[name] = (
            parameter.grad if dim is None else whole_of([parameter.shape[dim]], parameter.grad, dim)
        )
    parallel_state.destroy_model_parallel()
    return found


MECHANISMS: dict[str, Any] = {
    "latent attention": latent_attention,
    "delta net": delta_net,
    "norm over all heads": whole_width_norm,
}


@pytest.mark.parametrize(
    ("mechanism", "tensor", "context"),
    [
        ("delta net", 2, 1),
        ("delta net", 1, 2),
        ("delta net", 2, 2),
        ("norm over all heads", 2, 1),
        ("latent attention", 2, 2),
    ],
)
def test_parts_are_the_whole(mechanism: str, tensor: int, context: int) -> None:
    """Heads cut in the wrong sections, a zigzag that is not undone, or a gradient that is not
    summed, train another model in silence.
    """
    function = MECHANISMS[mechanism]
    (expected,) = run_ranks(function, 1, 1, 1)
    for found in run_ranks(function, tensor * context, tensor, context):
        assert list(found) == list(expected)
        for name, value in expected.items():
            unit = value.abs().max()
            assert unit > 1e-3
            torch.testing.assert_close(found[name] / unit, value / unit, rtol=0, atol=1e-12)
