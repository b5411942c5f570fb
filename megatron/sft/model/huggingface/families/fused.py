"""pure. Rows of families that store queries, keys and values, or gate and up, as one tensor."""

from __future__ import annotations

from megatron.packing.model.parts import attention
from megatron.sft.model.huggingface.rows import Row, joined

GATE_UP = Row(
    "mlp.fc1.weight",
    "sections",
    ("ffn", "hidden"),
    ("mlp.gate_up_proj.weight",) * 2,
    "dense",
    lambda sizes: joined(sizes["ffn"], sizes["ffn"], columns=(sizes["hidden"],)),
)
"""All gates, then all that they multiply."""
QKV = Row.of(
    attention.QKV,
    ("self_attn.qkv_proj.weight",) * 3,
    lambda sizes: joined(sizes["query"], sizes["key"], sizes["key"], columns=(sizes["hidden"],)),
)
"""All queries, then all keys, then all values."""
