"""Logical names of megatron-core's parameters."""

import pytest

from megatron.packing.model.names import (
    LogicalName,
    layer_prefix,
    linear_of,
    logical_name,
)


@pytest.mark.parametrize(
    ("name", "logical"),
    [
        ("embedding.word_embeddings.weight", LogicalName("embedding.weight")),
        (
            "decoder.layers.3.self_attention.linear_qkv.bias",
            LogicalName("attention.qkv.bias", 3),
        ),
        (
            "decoder.layers.3.self_attention.linear_qkv.layer_norm_weight",
            LogicalName("mixer_norm.weight", 3),
        ),
        (
            "decoder.layers.3.mlp.experts.local_experts.7.linear_fc1.weight",
            LogicalName("experts.fc1.weight", 3, 7),
        ),
        (
            "decoder.layers.3.mlp.experts.linear_fc1.weight7",
            LogicalName("experts.fc1.weight", 3, 7),
        ),
        ("decoder.layers.0.mlp.router.expert_bias", LogicalName("router.expert_bias", 0)),
        (
            "decoder.layers.0.mlp.shared_experts.gate_weight",
            LogicalName("shared.gate_weight", 0),
        ),
    ],
)
def test_names_of_both_kinds_of_layers(name, logical):
    """Transformer Engine's layers hold the same under other names."""
    assert logical_name(name) == logical


@pytest.mark.parametrize(
    "name",
    [
        "mtp.layers.0.eh_proj.weight",
        "decoder.layers.0.other.weight",
        "decoder.layers.0.self_attention.head_temperature",
    ],
)
def test_what_is_in_no_table(name):
    """A parameter without a place must not be taken for another: one of attention was a delta
    net's by default.
    """
    with pytest.raises(KeyError):
        logical_name(name)


def test_linear_layers():
    """Adapters stand beside these, and beside none of those that predict further tokens."""
    assert linear_of("decoder.layers.1.mlp.experts.local_experts.2.linear_fc1") == "fc1"
    assert linear_of("decoder.layers.1.self_attention.linear_qkv") == "qkv"
    assert linear_of("decoder.layers.1.self_attention.in_proj") == "in_proj"
    assert linear_of("decoder.layers.1.mlp.router") is None
    assert linear_of("mtp.layers.0.transformer_layer.mlp.linear_fc1") is None
    assert layer_prefix("decoder.layers.12.mlp.router.weight") == "decoder.layers.12."
    assert layer_prefix("decoder.final_layernorm.weight") is None
