"""Layers as data: one kind per layer, from options that have a number for each."""

from typing import Any

import pytest

from megatron.packing.layers import ExpertsShape, LayerKind, Work
from megatron.packing.model.parts.delta_net import DeltaNet
from megatron.packing.model.shape import ModelShape

SHAPE: dict[str, Any] = {
    "num_layers": 3,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "ffn_hidden_size": 24,
}
DELTA_NET: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 3,
    "linear_value_head_dim": 5,
}


def test_uniform_models_have_one_kind():
    """Flags alone make layers that are alike."""
    (kind,) = set(ModelShape(**SHAPE, num_query_groups=2, window_size=(7, 0)).layer_kinds())
    assert kind == LayerKind(
        num_attention_heads=4, num_query_groups=2, kv_channels=4, ffn_hidden_size=24, window=8
    )


def test_layers_differ_as_the_options_say():
    """A window in a layer of the delta net, or experts in a dense one, would be another model."""
    shape = ModelShape(
        **SHAPE,
        **DELTA_NET,
        num_experts=4,
        moe_ffn_hidden_size=6,
        moe_layer_freq=(0, 1, 1),
        window_size=(3, 0),
        window_attn_skip_freq=(1, 1, 0),
        linear_attention_freq=(0, 1, 0),
        attention_output_gate=True,
    )
    first, second, third = shape.layer_kinds()
    assert (first.window, first.experts, first.has_output_gate) == (4, None, True)
    assert (second.window, second.has_output_gate) == (None, False)
    assert second.mixer == DeltaNet(**DELTA_NET)
    assert (third.mixer, third.window) == (None, None)
    assert third.experts == ExpertsShape(num_experts=4, topk=2, width=6)


def test_multiply_adds():
    """Counted by hand for a hidden size of 10."""
    kind = LayerKind(num_attention_heads=4, num_query_groups=2, kv_channels=5, ffn_hidden_size=7)
    weights = 10 * (20 + 20) + 20 * 10
    # two products of 20 channels over half of the pairs
    assert kind.mixer_work(10) == Work(weights, weights, 20)
    assert kind.mlp_weights(10, is_gated=True) == (210, 210)
    linear = LayerKind(
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=5,
        mixer=DeltaNet(**DELTA_NET),
        ffn_hidden_size=7,
        experts=ExpertsShape(num_experts=3, topk=2, width=6, shared_width=1),
    )
    # queries and keys of 6 channels each, values and gates of 20, two numbers per value head
    weights = 10 * (6 + 6 + 20 + 20 + 4 + 4) + 20 * 10
    recurrence = 3 * 4 * 15 + 4 * (6 + 6 + 20)
    assert linear.mixer_work(10) == Work(weights + recurrence, weights, 0)
    assert linear.mlp_weights(10, is_gated=False) == (20 * 13 + 30, 20 * 19 + 30)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window_size": (3,)}, "--window-size 3 must be"),
        ({"window_size": (3, 1)}, "--window-size 3 1 must be"),
        ({"window_size": (-1, 0)}, "at least 0"),
        ({"window_attn_skip_freq": (1, 0, 1)}, "needs --window-size"),
        ({"window_size": (3, 0), "window_attn_skip_freq": (1, 0)}, "for each of --num-layers 3"),
        ({"window_size": (3, 0), "window_attn_skip_freq": (1, 0, 2)}, "must be a 0 or 1"),
        ({"linear_attention_freq": (1, 0, 1)}, "needs --linear-num-key-heads"),
        ({**DELTA_NET, "linear_num_value_heads": 3}, "must be a multiple of"),
    ],
)
def test_what_is_no_model_is_refused(options, message):
    """Each would fail, or be ignored, while the model is built."""
    with pytest.raises(ValueError, match=message):
        ModelShape(**SHAPE, **options)
