"""Routers of experts count tokens without padding, and layers get the mask of their own pack."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megatron.packing.model.layers.routers import mask_padding
from megatron.packing.model.loss import auxiliary_losses

PADDING = torch.tensor([[False, False, True, False, False, True, True, True]])
PACK = SimpleNamespace(padding_mask=PADDING)


class Experts(BaseMoELayer):
    def __init__(self) -> None:
        torch.nn.Module.__init__(self)

    def forward(self, *arguments: Any) -> None: ...


class Layer(TransformerLayer):
    """A layer that tells which mask it was called with."""

    def __init__(self, mlp: torch.nn.Module, rank: int = 0) -> None:
        torch.nn.Module.__init__(self)
        self.mlp = mlp
        self.tp_group = SimpleNamespace(rank=lambda: rank, size=lambda: 2)

    def forward(self, hidden_states: Any, **options: Any) -> Any:
        return options.get("padding_mask")

    __call__ = torch.nn.Module.__call__


class Gpt(GPTModel, Layer):  # type: ignore[misc]
    __init__ = Layer.__init__
    forward = Layer.forward
    __call__ = torch.nn.Module.__call__


def counted(routing_map: Tensor, **options: Any) -> list[int]:
    """Tokens per expert of a router of three experts, after a call."""
    router = TopKRouter.__new__(TopKRouter)
    torch.nn.Module.__init__(router)
    router.enable_expert_bias = True
    router.local_tokens_per_expert = torch.zeros(3)
    with auxiliary_losses.installed():
        router._apply_expert_bias(routing_map, **options)
    return router.local_tokens_per_expert.int().tolist()


def test_padding_moves_no_bias() -> None:
    """Three tokens and three experts: megatron-core would mask the third expert, without a word."""
    routing_map = torch.tensor([[1, 1, 0], [0, 1, 1], [0, 1, 1]]).bool()
    padding = torch.tensor([False, False, True])
    assert counted(routing_map) == [1, 3, 2]
    assert counted(routing_map, padding_mask=padding) == [1, 2, 1]
    with torch.no_grad():  # evaluation, and the first pass of what is recomputed
        assert counted(routing_map, padding_mask=padding) == [0, 0, 0]


@pytest.mark.parametrize(
    ("length", "rank", "expected"),
    [(8, 1, PADDING), (4, 0, PADDING[:, :4]), (4, 1, PADDING[:, 4:])],
)
def test_a_layer_gets_the_mask_of_its_tokens(length: int, rank: int, expected: Tensor) -> None:
    """Of other tokens, as under sequence parallel, it would count padding and leave out others."""
    layer, hidden = Layer(Experts(), rank), torch.zeros(length, 1, 2)
    mask_padding(layer)
    for arguments, named in (((hidden,), {}), ((), {"hidden_states": hidden})):
        found = layer(*arguments, **named, packed_seq_params=PACK, padding_mask="a caller's")
        assert torch.equal(found, expected)
    assert layer(hidden, packed_seq_params=None, padding_mask="a caller's") == "a caller's"


def test_layers_without_experts_are_left_alone_and_no_mask_is_given_twice() -> None:
    """The model would cut a caller's mask on the first stage alone, and roll it for layers that
    predict further tokens.
    """
    dense, experts = Layer(torch.nn.Identity()), Layer(Experts())
    model = Gpt(torch.nn.ModuleList([dense, experts]))
    mask_padding(model)
    mask_padding(model)
    assert [len(each._forward_pre_hooks) for each in (dense, experts, model)] == [0, 1, 1]
    assert model(1, packed_seq_params=PACK, padding_mask=PADDING) is None
    assert model(1, packed_seq_params=None, padding_mask=PADDING) is PADDING


def test_a_mask_of_another_pack_is_refused() -> None:
    """A model that puts in tokens of its own, such as those of images, has no mask for them."""
    layer = Layer(Experts())
    mask_padding(layer)
    with pytest.raises(ValueError, match="has 3 tokens of a pack whose padding is known for 8"):
        layer(torch.zeros(3, 1, 2), packed_seq_params=PACK)
