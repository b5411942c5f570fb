"""A Transformer Engine that computes on the CPU what megatron-core asks of it, and looks at what
packs tell it.

Run as a program it stands in for the real one, before megatron-core is imported: a model of its
modules takes packs, and its loss is that of the same model of torch's. The test of it is in
`test_transformer_engine_stand_in`.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm

CALLS: list[dict[str, Any]] = []
"""What attention was told, call by call."""
GROUPS: list[list[int]] = []
"""Rows of each expert, product by product."""


class Linear(nn.Module):
    """[..., in] -> ([..., out], bias); on one rank both kinds of parallel are none."""

    def __init__(self, in_features: int, out_features: int, **options: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        options["init_method"](self.weight)
        assert not options["bias"]

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        return linear(x, self.weight)


class LayerNormLinear(Linear):
    def __init__(self, in_features: int, out_features: int, **options: Any) -> None:
        super().__init__(in_features, out_features, **options)
        assert options["normalization"] == "RMSNorm"
        self.layer_norm_weight = nn.Parameter(torch.ones(in_features))
        self.eps = options["eps"]

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        return linear(rms_norm(x, x.shape[-1:], self.layer_norm_weight, self.eps), self.weight)


class RMSNorm(nn.RMSNorm):
    def __init__(
        self, hidden_size: int = 0, eps: float = 0.0, normalized_shape: int = 0, **_: Any
    ) -> None:
        super().__init__(hidden_size or normalized_shape, eps=eps)


class DotProductAttention(nn.Module):
    """Of segments as `cu_seqlens` say; AssertionError for what is slow, or wrong, in some release
    from 2.9 on.
    """

    def __init__(self, num_attention_heads: int, kv_channels: int, **options: Any) -> None:
        super().__init__()
        self.scale = options["softmax_scale"] or kv_channels**-0.5
        self.num_groups = options["num_gqa_groups"]

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: object, **told: Any
    ) -> Tensor:
        from megatron.packing.model.attention.blocks import Scores, Segments
        from megatron.packing.model.attention.kernels import causal_attention

        CALLS.append(told)
        assert attention_mask is None
        assert (told["qkv_format"], told["attn_mask_type"]) == ("thd", "padding_causal")
        ends = told["cu_seqlens_q"]
        assert ends is told["cu_seqlens_kv"]
        assert ends.dtype == torch.int32
        assert ends[-1] == len(query) == len(key), (
            "rows beyond the last end are left as they were in memory"
        )
        assert told["cu_seqlens_q_padded"] is told["cu_seqlens_kv_padded"] is None, (
            "both kinds: a kernel of its own"
        )
        lengths = tuple(ends.diff().tolist())
        assert told["max_seqlen_q"] == told["max_seqlen_kv"] == max(lengths)
        assert isinstance(told["max_seqlen_q"], int), "a tensor would be read in each layer"
        assert key.shape[1] == self.num_groups
        segments, scores = Segments.square(lengths), Scores(scale=self.scale)
        return causal_attention(query, key, value, segments, scores).flatten(1)


class GroupedLinear(nn.Module):
    """Rows of each expert, which stand in order, times its own weight."""

    def __init__(self, num_gemms: int, in_features: int, out_features: int, **options: Any) -> None:
        super().__init__()
        self.num_gemms = num_gemms
        assert not options["bias"]
        assert options["tp_size"] == 1
        for number in range(num_gemms):
            weight = nn.Parameter(torch.empty(out_features, in_features))
            options["init_method"](weight)
            self.register_parameter(f"weight{number}", weight)

    def forward(self, x: Tensor, sizes: list[int], **_: Any) -> Tensor:
        GROUPS.append(sizes)
        parts = zip(x.split(sizes), self.parameters(), strict=True)
        return torch.cat([linear(rows, weight) for rows, weight in parts])


def get_cpu_offload_context(*_: object, **__: object) -> tuple[Any, None]:
    return nullcontext(), None


class Stub(ModuleType):
    """A module of Transformer Engine's that has every name: those above, and classes that nothing
    may be made of.
    """

    __version__ = "2.9.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        placeholder = Stub(name) if name.islower() else type(name, (), {})
        return globals().get(name, placeholder)


class Finder(MetaPathFinder, Loader):
    """Finds a `Stub` for each module that megatron-core asks for."""

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        is_here = name.split(".")[0] == "transformer_engine" and not name.split(".")[-1].startswith(
            "_"
        )
        return ModuleSpec(name, self, is_package=True) if is_here else None

    def create_module(self, spec: ModuleSpec) -> Stub:
        return Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


def compare(num_experts: int | None = None) -> None:
    """Build a model of each kind, with the same weights by name, and run the same packs; experts
    run together in both.
    """
    from unittest import mock

    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron.packing.batch.layout import Alignment, PackLayout
    from megatron.packing.batch.microbatches import layout_microbatches
    from megatron.packing.device import CPU
    from megatron.packing.model import get_batch, layer_spec
    from megatron.packing.model.grouped_experts import group_experts
    from megatron.packing.model.names import logical_name
    from megatron.planner.calibrate import one_process
    from megatron.sft.model import cpu_support, mcore_fixes

    if num_experts is not None:
        mcore_fixes.install()
        cpu_support.install()

    tokens = torch.arange(16)[None]
    alignment = Alignment(sequence=4, pack=16)  # padding after sequences, and after the last one
    microbatch = layout_microbatches([PackLayout.of([3, 6], alignment)])[0]
    config = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        num_query_groups=2,
        normalization="RMSNorm",
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
        num_moe_experts=num_experts,
        moe_grouped_gemm=num_experts is not None,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
    )
    losses: list[Tensor] = []
    weights: dict[Any, Tensor] = {}
    gradients: list[dict[Any, Tensor]] = []
    with one_process(CPU):
        for is_there in (True, False):
            with (
                mock.patch.object(
                    get_batch, "transformer_engine_installed", lambda there=is_there: there
                ),
                mock.patch.object(
                    layer_spec, "transformer_engine_installed", lambda there=is_there: there
                ),
            ):
                model = GPTModel(
                    config,
                    layer_spec.packed_block_spec(config),
                    32,
                    64,
                    position_embedding_type="rope",
                )
                group_experts(model)
                named = {logical_name(name): value for name, value in model.named_parameters()}
                for name, parameter in named.items():
                    parameter.data = weights.setdefault(name, parameter.data)
                model.double()
                params = get_batch.packed_seq_params(microbatch, CPU.place)
                losses.append(model(tokens, tokens, None, labels=tokens, packed_seq_params=params))
                model.zero_grad()
                losses[-1].sum().backward()
                gradients.append({name: value.grad for name, value in named.items()})
                assert (
                    "TE" in type(model.decoder.layers[0].self_attention.core_attention).__name__
                    or not is_there
                )
                assert len(weights) == len(named)
    assert len(CALLS) == config.num_layers
    assert [sum(rows) for rows in GROUPS] == (
        [] if num_experts is None else [config.moe_router_topk * tokens.numel()] * 4
    )
    torch.testing.assert_close(*losses, rtol=0, atol=1e-6)
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-6)
    print("equal", len(CALLS), len(GROUPS))


if __name__ == "__main__":
    sys.meta_path.insert(0, Finder())
    for num_experts in (None, 4):
        CALLS.clear()
        GROUPS.clear()
        compare(num_experts)
