"""pure. Writes rotary embeddings as transformers 4 reads them, beside `rope_parameters` of 5, and
the number of experts beside its new name.

Without them transformers 4.57 takes base 10,000, or that of the family, and no scaling, in silence.
Both spellings together are read alike by transformers 4.57 and 5.24 (`make served`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_WITH_KINDS = ("gemma3_text",)
"""Families whose older spelling has a base for each kind of layer."""

_EXPERTS = ("qwen3_moe",)
"""Families whose number of experts transformers 5 writes as num_local_experts, which 4 does not
read: it builds 128 of them, its default.
"""
_ONE_BASE = ("olmo3",)
"""Families whose older spelling has one base, and scales those layers alone that have no window."""


def with_older_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a config.json with `rope_theta`, `rope_scaling`, `rope_local_base_freq` and
    `partial_rotary_factor` of its `rope_parameters`, where none of the first two is written.

    Example:
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}} also gets
        {"rope_theta": 5e5}.
    """
    found = dict(config)
    if found.get("model_type") in _EXPERTS and "num_local_experts" in found:
        found.setdefault("num_experts", found["num_local_experts"])
    if isinstance(found.get("text_config"), dict):
        found["text_config"] = with_older_rope(found["text_config"])
    rope = found.get("rope_parameters")
    if not isinstance(rope, dict) or found.keys() & {"rope_theta", "rope_scaling"}:
        return found
    if not any(isinstance(value, dict) for value in rope.values()):
        return found | _older(rope)
    whole, windows = rope.get("full_attention"), rope.get("sliding_attention")
    kind = found.get("model_type")
    if kind in _ONE_BASE and whole and windows:
        bases = (whole.get("rope_theta"), windows.get("rope_theta"))
        if bases[0] == bases[1] and windows.get("rope_type", "default") == "default":
            found |= _older(whole)
    if kind in _WITH_KINDS and whole and windows:
        local = windows.get("rope_theta")
        found |= _older(whole) | ({} if local is None else {"rope_local_base_freq": local})
    return found


def _older(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the older spelling of one rope."""
    beside = ("rope_theta", "partial_rotary_factor")
    older = {name: rope[name] for name in beside if rope.get(name) is not None}
    scaling = {name: value for name, value in rope.items() if name not in beside}
    if rope.get("rope_type", "default") != "default":
        older["rope_scaling"] = scaling
    return older
