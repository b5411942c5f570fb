"""Rotary embeddings as transformers 4 reads them."""

from typing import Any

import pytest

from megatron.sft.model.huggingface.older_rope import with_older_rope

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
DEFAULT = {"rope_type": "default", "rope_theta": 5e5}


@pytest.mark.parametrize(
    ("config", "added"),
    [
        ({"rope_parameters": DEFAULT}, {"rope_theta": 5e5}),
        (
            {"rope_parameters": YARN | {"rope_theta": 1e6}},
            {"rope_theta": 1e6, "rope_scaling": YARN},
        ),
        (
            {"rope_parameters": DEFAULT | {"partial_rotary_factor": 0.5}},
            {"rope_theta": 5e5, "partial_rotary_factor": 0.5},
        ),
        (
            {
                "model_type": "gemma3_text",
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                },
            },
            {
                "rope_theta": 1e6,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
                "rope_local_base_freq": 1e4,
            },
        ),
        (
            {
                "model_type": "olmo3",
                "rope_parameters": {
                    "full_attention": YARN | {"rope_theta": 5e5},
                    "sliding_attention": DEFAULT,
                },
            },
            {"rope_theta": 5e5, "rope_scaling": YARN},
        ),
        (  # two bases have no older spelling
            {
                "model_type": "olmo3",
                "rope_parameters": {
                    "full_attention": YARN | {"rope_theta": 1e6},
                    "sliding_attention": DEFAULT,
                },
            },
            {},
        ),
        ({"model_type": "qwen3_moe", "num_local_experts": 8}, {"num_experts": 8}),
        ({"rope_theta": 1e4, "rope_scaling": None, "rope_parameters": DEFAULT}, {}),
        ({"rope_scaling": YARN}, {}),
    ],
)
def test_what_transformers_4_reads_is_added(config: dict[str, Any], added: dict[str, Any]) -> None:
    """Without it transformers 4.57 serves an exported model with another base, in silence."""
    assert with_older_rope(config) == config | added


def test_that_of_a_text_config_is_added() -> None:
    """Vision models hold the language model's rope one level deeper."""
    config = {"text_config": {"rope_parameters": DEFAULT}}
    assert with_older_rope(config)["text_config"]["rope_theta"] == 5e5
