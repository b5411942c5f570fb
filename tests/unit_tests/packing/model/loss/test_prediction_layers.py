"""Layers of multi-token prediction are recomputed with packs, and take embeddings of whole ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.packing.model.loss import prediction_layers
from megatron.packing.model.loss.prediction_layers import PredictionInput, PredictionRecompute


def save_all(layer: Any, forward_func: Any, *arguments: Any, **options: Any) -> Any:
    """As megatron-core 0.16 recomputes: what it is given goes to `save_for_backward`."""
    given = (*arguments, *options.values())
    if not all(value is None or isinstance(value, Tensor) for value in given):
        raise TypeError("save_for_backward can only save variables")
    return forward_func(*given)


def save_nothing(layer: Any, forward_func: Any, *arguments: Any, **options: Any) -> Any:
    """As it does with recompute_method="block"."""
    return forward_func(*arguments, **options)


def layer_of(function: Any) -> Any:
    class Layer:
        _checkpointed_forward = PredictionRecompute(function)

    return Layer()


@pytest.mark.parametrize("plain", [save_all, save_nothing])
def test_packs_are_kept_and_tensors_saved(plain: Any) -> None:
    """Packs among the saved ones end the first step in a TypeError; by position they would be
    taken for one another.
    """
    packs = object()

    def forward(
        hidden_states: Tensor, context: None, rotary: Tensor, packed_seq_params: Any
    ) -> Any:
        assert context is None
        assert packed_seq_params is packs
        return hidden_states - rotary

    found = layer_of(plain)._checkpointed_forward(
        forward,
        hidden_states=torch.tensor(3.0),
        context=None,
        rotary=torch.tensor(1.0),
        packed_seq_params=packs,
    )
    assert found == 2.0


def test_later_releases_keep_them_apart_themselves() -> None:
    """They pass no function: it would be looked for among the arguments."""
    found = layer_of(lambda layer, **options: options)._checkpointed_forward(hidden_states=1)
    assert found == {"hidden_states": 1}


def test_embeddings_of_the_whole_pack_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the embedding has cut already must stay as they are."""

    def second_half(values: Tensor, group: str) -> Tensor:
        assert group == "tp"
        return values.chunk(2)[1]

    monkeypatch.setattr(prediction_layers, "scatter_to_sequence_parallel_region", second_half)
    layer = SimpleNamespace(eh_proj=SimpleNamespace(tp_group="tp"))
    concatenate = PredictionInput(lambda _, hidden, embedded: torch.cat((embedded, hidden)))
    hidden = torch.tensor([10.0, 11.0])
    whole = torch.tensor([0.0, 1.0, 2.0, 3.0])
    assert concatenate(layer, hidden, whole).tolist() == [2.0, 3.0, 10.0, 11.0]
    assert concatenate(layer, hidden, whole[:2]).tolist() == [0.0, 1.0, 10.0, 11.0]
