"""pure. Parameters of a Llama and its relatives, and the HuggingFace tensors that they are made of.

A family gives rows in place of those that differ, and names of its own: see `families`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from megatron.packing.model import names
from megatron.sft.model.huggingface.tensors import Sharding, View

Sizes = Mapping[str, int]


class Source(NamedTuple):
    """The tensor that a part's rows are in."""

    view: View = View()
    stored: tuple[int, ...] = ()
    """Shape of the tensor; empty if the part is all of it."""


class Row(NamedTuple):
    """One parameter, and the HuggingFace tensors that it is made of."""

    part: str
    """Logical name: see `packing.model.names`."""
    sharding: Sharding
    shape: tuple[str, ...]
    """Shape of each part, by the names of `Weights`' sizes. Sizes that differ between parts are
    joined by commas: `query,key,key`.
    """
    tensors: tuple[str, ...]
    """Behind the layer's prefix; `{e}` is the expert's number."""
    when: str = "always"
    """Models and layers that have it: see `Weights._conditions`."""
    sources: Callable[[Sizes], tuple[Source, ...]] | None = None
    """Places of the parts' rows in the tensors; None: each part is a tensor."""


MODEL_ROWS: tuple[Row, ...] = (
    Row(names.EMBEDDING, "vocabulary", ("vocab", "hidden"), ("embed_tokens.weight",)),
    Row(names.OUTPUT, "vocabulary", ("vocab", "hidden"), ("lm_head.weight",), "untied"),
    Row(names.FINAL_NORM, "whole", ("hidden",), ("norm.weight",)),
)
QKV = tuple(f"self_attn.{part}_proj" for part in "qkv")
ATTENTION_ROWS: tuple[Row, ...] = (
    Row(
        "attention.qkv.weight",
        "heads",
        ("query,key,key", "hidden"),
        tuple(f"{name}.weight" for name in QKV),
        "attention",
    ),
    Row(
        "attention.qkv.bias",
        "heads",
        ("query,key,key",),
        tuple(f"{name}.bias" for name in QKV),
        "qkv_bias",
    ),
    Row("attention.q_norm.weight", "whole", ("q_norm",), ("self_attn.q_norm.weight",), "qk_norms"),
    Row("attention.k_norm.weight", "whole", ("k_norm",), ("self_attn.k_norm.weight",), "qk_norms"),
    Row(
        "attention.proj.weight",
        "columns",
        ("hidden", "query"),
        ("self_attn.o_proj.weight",),
        "attention",
    ),
    Row("attention.proj.bias", "whole", ("hidden",), ("self_attn.o_proj.bias",), "proj_bias"),
    Row("attention.softmax_offset", "rows", ("query_heads",), ("self_attn.sinks",), "sinks"),
)
MLP_ROWS: tuple[Row, ...] = (
    Row(
        "mlp.fc1.weight",
        "sections",
        ("ffn", "hidden"),
        ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        "dense",
    ),
    Row(
        "mlp.fc1.bias",
        "sections",
        ("ffn",),
        ("mlp.gate_proj.bias", "mlp.up_proj.bias"),
        "dense_bias",
    ),
    Row("mlp.fc2.weight", "columns", ("hidden", "ffn"), ("mlp.down_proj.weight",), "dense"),
    Row("mlp.fc2.bias", "whole", ("hidden",), ("mlp.down_proj.bias",), "dense_bias"),
)
EXPERT_ROWS: tuple[Row, ...] = (
    Row("router.weight", "whole", ("experts", "hidden"), ("mlp.gate.weight",), "experts"),
    Row(
        "router.expert_bias",
        "whole",
        ("experts",),
        ("mlp.gate.e_score_correction_bias",),
        "expert_bias",
    ),
    Row(
        "shared.fc1.weight",
        "sections",
        ("shared_ffn", "hidden"),
        ("mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight"),
        "shared",
    ),
    Row(
        "shared.fc2.weight",
        "columns",
        ("hidden", "shared_ffn"),
        ("mlp.shared_expert.down_proj.weight",),
        "shared",
    ),
    Row(
        "shared.gate_weight",
        "whole",
        ("one", "hidden"),
        ("mlp.shared_expert_gate.weight",),
        "shared_gate",
    ),
    Row(
        "experts.fc1.weight",
        "sections",
        ("expert_ffn", "hidden"),
        ("mlp.experts.{e}.gate_proj.weight", "mlp.experts.{e}.up_proj.weight"),
        "experts",
    ),
    Row(
        "experts.fc2.weight",
        "columns",
        ("hidden", "expert_ffn"),
        ("mlp.experts.{e}.down_proj.weight",),
        "experts",
    ),
)
LAYER_ROWS: tuple[Row, ...] = (
    Row("mixer_norm.weight", "whole", ("hidden",), ("input_layernorm.weight",), "norms_before"),
    *ATTENTION_ROWS,
    Row(
        "mixer_norm_behind.weight",
        "whole",
        ("hidden",),
        ("post_attention_layernorm.weight",),
        "norms_behind",
    ),
    Row(
        "mlp_norm.weight",
        "whole",
        ("hidden",),
        ("post_attention_layernorm.weight",),
        "norms_before",
    ),
    Row(
        "mlp_norm_behind.weight",
        "whole",
        ("hidden",),
        ("post_feedforward_layernorm.weight",),
        "norms_behind",
    ),
    *MLP_ROWS,
    *EXPERT_ROWS,
)
"""Order of the rows is that of the parameters in a written folder."""


def joined(*sizes: int, columns: tuple[int, ...] = ()) -> tuple[Source, ...]:
    """Returns the sources of parts that stand one after the other in one tensor: parts of so many
    rows.
    """
    offsets = [sum(sizes[:number]) for number in range(len(sizes))]
    return tuple(Source(View(offset), (sum(sizes), *columns)) for offset in offsets)


def alternating(*sizes: int, groups: int, columns: tuple[int, ...] = ()) -> tuple[Source, ...]:
    """Returns the sources of parts that alternate in one tensor: in each of `groups` so many rows
    of each.
    """
    stride = sum(sizes)
    offsets = [sum(sizes[:number]) for number in range(len(sizes))]
    return tuple(
        Source(View(offset, size, stride), (groups * stride, *columns))
        for offset, size in zip(offsets, sizes)
    )
