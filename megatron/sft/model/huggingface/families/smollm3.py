"""pure. SmolLM3, some of whose layers have no rotary embedding."""

from __future__ import annotations

from typing import Any

from megatron.sft.model.huggingface.families.biases import biases, biases_config
from megatron.sft.model.huggingface.families.config_fields import ConfigFields, windows_config
from megatron.sft.model.huggingface.families.family import Family
from megatron.sft.options.model import ModelConfig


def _options(config: ConfigFields) -> dict[str, Any]:
    has_rope = config.layers("no_rope_layers", 1)  # type: ignore[arg-type]  # 1: with rope
    if has_rope is None:
        has_rope = config.every(config.number("no_rope_layer_interval", 4))
    no_rope = tuple(1 - one for one in has_rope)
    window = config.values.get("sliding_window") if config.get("use_sliding_window") else None
    kinds = config.layers("layer_types", "sliding_attention")
    if kinds is not None and any(kinds) and not config.get("use_sliding_window"):
        # The masks of transformers have the window, its fused attention kernels have none.
        raise ValueError(
            f"{config.where} has sliding_attention in layer_types, but no use_sliding_window; "
            "write one or the other"
        )
    return {
        **biases(config),
        "no_rope_freq": no_rope if any(no_rope) else (),
        **config.windows(window, no_rope if kinds is None else kinds),
    }


def _config(model: ModelConfig) -> dict[str, Any]:
    no_rope = model.no_rope_freq or (0,) * model.num_layers
    return {
        **biases_config(model),
        **windows_config(model),
        "use_sliding_window": bool(model.window_size),
        "no_rope_layers": [1 - one for one in no_rope],
    }


SMOLLM3 = Family(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    rope_theta=2e6,
    ties_embeddings=True,
    options=_options,
    config=_config,
)
