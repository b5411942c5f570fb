"""pure. Language models of Qwen2.5-VL and Qwen3-VL, dense and with experts, which are trained on
text.

Their positions along three axes are equal for text, and so turn channels as plain positions do.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.sft.model.huggingface.families.biases import attention_biases
from megatron.sft.model.huggingface.families.config_fields import ConfigFields
from megatron.sft.model.huggingface.families.family import Prefix
from megatron.sft.model.huggingface.families.mixture import (
    TRANSPOSED_STACKED_EXPERTS,
    qwen_experts,
)
from megatron.sft.model.huggingface.families.qwen2 import QWEN2, switched_windows
from megatron.sft.model.huggingface.families.qwen3 import QWEN3, QWEN3_MOE

_AXES = ("mrope_section", "mrope_interleaved")
"""Keys of a rope that tell which channels turn by which axis."""
_PREFIX = Prefix("model.language_model.", "lm_head.")


def _with_plain_rope(config: ConfigFields) -> ConfigFields:
    """Returns these fields with the rope of text; older files say `mrope`, which is `default`."""
    values = dict(config.values)
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(rope := values.get(name), dict):
            kind = rope.get("rope_type", rope.get("type"))
            plain = {key: value for key, value in rope.items() if key not in (*_AXES, "type")}
            values[name] = plain | {"rope_type": "default" if kind == "mrope" else kind}
    return ConfigFields(values, config.where)


def _qwen2_5_vl(config: ConfigFields) -> dict[str, Any]:
    windows = switched_windows(
        ConfigFields({"max_window_layers": 80, **config.values}, config.where)
    )
    rope = _with_plain_rope(config).rope_options(QWEN2_5_VL.rope_theta)
    return {"add_qkv_bias": True, **windows, **rope}


def _qwen3_vl(config: ConfigFields) -> dict[str, Any]:
    rope = _with_plain_rope(config).rope_options(QWEN3_VL.rope_theta)
    return {"qk_layernorm": True, **attention_biases(config), **rope}


def _qwen3_vl_moe(config: ConfigFields) -> dict[str, Any]:
    renormalised = ConfigFields({**config.values, "norm_topk_prob": True}, config.where)
    return _qwen3_vl(config) | qwen_experts(renormalised, "num_local_experts")


QWEN2_5_VL = replace(
    QWEN2,
    model_type="qwen2_5_vl_text",
    architecture="Qwen2_5_VLForConditionalGeneration",
    norm_epsilon=1e-5,
    rope_theta=1e6,
    options=_qwen2_5_vl,
    carried=("visual.",),
    # Released files have the names of a model of text, with a tower beside it, and all keys of
    # config.json at its top.
    within={"qwen2_5_vl": Prefix("model.", "lm_head.", "model.language_model.")},
)
QWEN3_VL = replace(
    QWEN3,
    model_type="qwen3_vl_text",
    architecture="Qwen3VLForConditionalGeneration",
    rope_theta=5e5,
    options=_qwen3_vl,
    carried=("model.visual.",),
    within={"qwen3_vl": _PREFIX},
)
QWEN3_VL_MOE = replace(
    QWEN3_MOE,
    model_type="qwen3_vl_moe_text",
    architecture="Qwen3VLMoeForConditionalGeneration",
    rope_theta=5e5,
    options=_qwen3_vl_moe,
    carried=("model.visual.",),
    within={"qwen3_vl_moe": _PREFIX},
    rows=TRANSPOSED_STACKED_EXPERTS,
)
