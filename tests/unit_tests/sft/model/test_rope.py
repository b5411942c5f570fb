"""Frequencies of rotary embeddings, beside those of transformers."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.sft.model.gpt_additions import prepare_config
from megatron.sft.model.rope import inverse_frequencies
from megatron.sft.options.rope_scaling import (
    factor_of_turns,
    parse_rope_scaling,
    rope_scaling_of,
)

SCALINGS = [
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 3.0, "original_max_position_embeddings": 2048},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.5,
        "high_freq_factor": 3.0,
        "original_max_position_embeddings": 100,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 64,
        "truncate": False,
        "beta_fast": 20.0,
    },
]


LONG = {
    "rope_type": "longrope",
    "factor": 32.0,
    "short_factor": [1.0, 1.02, 1.5, 1.7],
    "long_factor": [1.0, 1.3, 12.5, 47.77],
    "original_max_position_embeddings": 4096,
}


@pytest.mark.parametrize("fields", [LONG, LONG | {"attention_factor": 1.2}, LONG | {"factor": 1}])
@pytest.mark.parametrize("seq_length", [4096, 4097])
def test_long_rope_has_the_list_and_the_factor_of_transformers(fields, seq_length):
    """The list of the other lengths is another model, which no shape or name gives away."""
    transformers = pytest.importorskip("transformers")
    function = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["longrope"]
    config = transformers.LlamaConfig(head_dim=8, rope_parameters={**fields, "rope_theta": 1e4})
    expected, factor = function(config, device="cpu", seq_len=seq_length)
    scaling = parse_rope_scaling(json.dumps(fields))
    assert torch.equal(inverse_frequencies(8, 1e4, scaling, seq_length), expected)
    assert factor_of_turns(scaling) == pytest.approx(factor, abs=0)
    assert parse_rope_scaling(scaling.to_json()) == scaling


@pytest.mark.parametrize(("dim", "base"), [(128, 5e5), (16, 1e4), (64, 1e6)])
@pytest.mark.parametrize("fields", SCALINGS)
def test_frequencies_are_those_of_transformers(fields, dim, base):
    """To the bit: an angle is a frequency times a position of up to a million."""
    transformers = pytest.importorskip("transformers")
    functions = pytest.importorskip("transformers.modeling_rope_utils").ROPE_INIT_FUNCTIONS
    config = transformers.LlamaConfig(head_dim=dim, rope_parameters={**fields, "rope_theta": base})
    expected, factor = functions[fields["rope_type"]](config, device="cpu")
    scaling = rope_scaling_of(fields, "here")
    assert scaling is not None
    found = inverse_frequencies(dim, base, scaling)
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)
    assert factor_of_turns(scaling) == pytest.approx(factor, abs=0)
    assert parse_rope_scaling(scaling.to_json()) == scaling


@pytest.mark.parametrize(
    "text",
    [
        "",
        "2",
        "{",
        '{"rope_type": "default"}',
        '{"rope_type": "linear", "factor": -1}',
        '{"rope_type": "su"}',
    ],
)
def test_what_is_no_scaling_is_refused(text):
    """In a line."""
    with pytest.raises(ValueError, match="--rope-scaling"):
        parse_rope_scaling(text)


def test_yarn_is_not_fused():
    """The fused kernel for packs takes no scale of attention scores, and megatron-core does not say
    so.
    """
    config = SimpleNamespace(apply_rope_fusion=True)
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    model: Any = SimpleNamespace(
        moe_router_topk=2, rope_scaling=json.dumps(scaling), layer_kinds=list
    )
    prepare_config(config, model)  # type: ignore[arg-type]
    assert (config.apply_rope_fusion, config.yarn_rotary_scaling_factor) == (False, 4.0)
