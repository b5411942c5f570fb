"""pure. EXAONE 4: norms behind attention and MLP; layers that see all tokens have no rotary
embedding where the others have a window.
"""

from __future__ import annotations

from typing import Any

from megatron.sft.model.huggingface.families.config_fields import ConfigFields, windows_config
from megatron.sft.model.huggingface.families.family import Family


def _options(config: ConfigFields) -> dict[str, Any]:
    window = config.values.get("sliding_window", 4096)
    kinds = config.layers("layer_types", "sliding_attention")
    if window is not None and kinds is None:
        config.require("sliding_window_pattern", *range(1, 1000), default=4)
        kinds = config.every(config.number("sliding_window_pattern", 4))
    options: dict[str, Any] = {"norm_position": "behind", "qk_layernorm": True}
    if window is not None and kinds is not None:
        options |= config.windows(window, kinds)
        options["no_rope_freq"] = () if all(kinds) else tuple(1 - one for one in kinds)
    return options


EXAONE4 = Family(
    model_type="exaone4",
    architecture="Exaone4ForCausalLM",
    norm_epsilon=1e-5,
    options=_options,
    config=windows_config,
)
