"""Which layers compute a model where Transformer Engine is installed."""

from types import SimpleNamespace
from typing import Any

import pytest

from megatron.packing.model import layer_spec
from megatron.packing.model.layer_spec import need_local_layers

WINDOW = {"window_size": (7, 0)}
SINKS = {"softmax_type": "learnable"}
SPLIT = {"context_parallel_size": 2}


@pytest.mark.parametrize(
    ("options", "ours", "release", "is_local"),
    [
        ({}, {}, "2.9", False),
        (SPLIT, {}, "2.9", False),
        (WINDOW, {}, "2.9", False),
        (WINDOW | SPLIT, {}, "2.9", True),
        (SINKS, {}, "2.9", False),
        (SINKS, {}, "2.7", True),
        (SINKS | SPLIT, {}, "2.9", True),
        ({"linear_attention_freq": [1, 0]}, {}, "2.9", True),
        ({}, {"attn_logit_softcapping": 50.0}, "2.9", True),
        ({}, {"qk_layernorm_over_heads": True}, "2.9", True),
        ({}, {"norm_position": "both"}, "2.9", True),
        ({}, {"residual_multiplier": 0.5}, "2.9", True),
    ],
)
def test_what_transformer_engine_does_not_compute_is_ours(
    monkeypatch, options, ours, release, is_local
):
    """It would leave a cap or a window out, or end the run in its first layer."""
    plain = {
        "window_size": None,
        "softmax_type": "vanilla",
        "context_parallel_size": 1,
        "linear_attention_freq": None,
        "num_layers": 2,
    }
    config: Any = SimpleNamespace(**plain | options)
    monkeypatch.setattr(layer_spec, "is_te_min_version", lambda least: release >= least[:3])
    model: Any = SimpleNamespace(**vars(config), **ours)
    assert need_local_layers(config, model) == is_local


def config_of(**lists: Any) -> Any:
    plain = {"window_attn_skip_freq": None, "no_rope_freq": None, "linear_attention_freq": None}
    return SimpleNamespace(num_layers=3, mtp_num_layers=2, **plain | lists)


def test_further_layers_are_of_the_kind_of_the_last():
    """They look themselves up by a number behind the lists: an IndexError, for lists that
    megatron-core asks for.
    """
    config = config_of(window_attn_skip_freq=[1, 1, 0], no_rope_freq=[0, 0, 1])
    for _ in range(2):  # once for each virtual stage
        layer_spec._list_further_layers(config)
        assert config.window_attn_skip_freq == [1, 1, 0, 0, 0]
        assert config.no_rope_freq == [0, 0, 1, 1, 1]
    config = config_of(window_attn_skip_freq=2)
    layer_spec._list_further_layers(config)
    assert (config.window_attn_skip_freq, config.no_rope_freq) == (2, None)
