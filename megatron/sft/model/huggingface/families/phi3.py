"""pure. Phi-3 and Phi-4."""

from __future__ import annotations

from typing import Any

from megatron.packing.quoting import shown
from megatron.sft.model.huggingface.families.config_fields import ConfigFields, windows_config
from megatron.sft.model.huggingface.families.family import Family
from megatron.sft.model.huggingface.families.fused import GATE_UP, QKV
from megatron.sft.options.model import ModelConfig

_ORIGINAL = "original_max_position_embeddings"
"""The length of the first training, which transformers reads beside a rope alone for this type."""


def _options(config: ConfigFields) -> dict[str, Any]:
    """Returns windows and rope, which older files call `su`; ValueError for a rope that
    transformers refuses.
    """
    values = {**config.values, _ORIGINAL: config.get(_ORIGINAL, 4096)}
    for name in ("rope_parameters", "rope_scaling"):
        rope = values.get(name)
        if not isinstance(rope, dict):
            continue
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in ("default", "longrope", "su", "yarn", None):
            raise ValueError(
                f"{config.where} has {name} of type {shown(kind)}, but transformers takes none but "
                "longrope for this model_type"
            )
        if kind in ("su", "yarn"):
            values[name] = {**rope, "rope_type": "longrope"}
    read = ConfigFields(values, config.where)
    return config.windows(config.values.get("sliding_window"), (1,)) | read.rope_options(10000.0)


def _config(model: ModelConfig) -> dict[str, Any]:
    original = int(model.original_position_embeddings)
    return {
        **windows_config(model),
        **({_ORIGINAL: original} if original else {}),
        "partial_rotary_factor": model.rotary_percent,
    }


PHI3 = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    norm_epsilon=1e-5,
    partial_rotary_factor=1.0,
    needs_key_value_heads=False,
    options=_options,
    config=_config,
    residual_dropout="resid_pdrop",
    rows=(QKV, GATE_UP),
)
