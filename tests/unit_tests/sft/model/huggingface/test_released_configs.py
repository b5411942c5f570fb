"""config.json as makers of models released it, in the spelling of its day."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from megatron.sft.model.huggingface.companions import weights_of
from megatron.sft.model.huggingface.config import options_of
from megatron.sft.model.huggingface.families.registry import FAMILIES, language_model
from megatron.sft.model.huggingface.quantized.methods import (
    Method,
    read_method,
    without_quantization,
)
from megatron.sft.options.model import ModelConfig

CONFIGS = Path(__file__).parents[4] / "fixtures" / "released" / "configs"
RELEASES: dict[str, dict[str, Any]] = {
    release["repository"]: release
    for path in sorted(CONFIGS.glob("*.json"))
    for release in json.loads(path.read_text(encoding="utf-8"))
}
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def count_parameters(config: dict[str, Any], num_experts: int | None) -> int:
    """Returns the size of all tensors of the language model, with so many experts in a layer."""
    if num_experts is not None:
        config = config | {name: num_experts for name in EXPERTS if name in config}
        if "text_config" in config:
            config["text_config"] = config["text_config"] | {"num_experts": num_experts}
    options = options_of(config)
    del options["vocab_size"]
    weights = weights_of(ModelConfig(**options, seq_length=8), config)
    parts = {part.name: part for weight in weights.all() for part in weight.parts}
    return sum(math.prod(part.stored_shape) for part in parts.values())


@pytest.mark.parametrize("repository", RELEASES)
def test_a_released_config_is_read(repository: str) -> None:
    """A default that its maker leaves out, or a key of transformers 4, would else be read in
    another way than the weights were trained with; of a width the number of parameters tells.
    """
    release = RELEASES[repository]
    config = release["config"]
    options = json.loads(json.dumps(options_of(config)))
    if options["rope_scaling"] is not None:
        options["rope_scaling"] = json.loads(options["rope_scaling"])
    assert {name: options.get(name) for name in release["options"]} == release["options"]
    if options.get("num_experts") is None:
        assert count_parameters(config, None) == release["parameters"]
        return
    # Layers grow by the same for each expert: two counts of few tensors give that of many.
    chosen, all_experts = options["moe_router_topk"], options["num_experts"]
    fewest, next_count = (count_parameters(config, chosen + more) for more in (0, 1))
    assert fewest + (all_experts - chosen) * (next_count - fewest) == release["parameters"]


def test_every_family_has_a_release() -> None:
    """A family without one is known by configs that this project made up."""
    families = {
        language_model(release["config"]).family.model_type for release in RELEASES.values()
    }
    assert families == FAMILIES.keys()


def test_releases_in_fp8_have_their_blocks() -> None:
    """With other blocks than the release's, weights have the scales of other rows."""
    config = RELEASES["MiniMaxAI/MiniMax-M2"]["config"]
    assert read_method(config) == Method("fp8", (128, 128))
    assert "quantization_config" not in without_quantization(config)
