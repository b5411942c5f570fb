"""pure. The table of parameters: the HuggingFace tensors that each consists of, in a Llama.

Other families replace rows of this table and rename tensors: see `families`. The first row of
attention reads: the parameter `attention.qkv.weight` is split by heads over tensor-parallel ranks,
and consists of the tensors q_proj, k_proj and v_proj, of [query, hidden], [key, hidden] and [key,
hidden] numbers. Layers with attention have it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from megatron.packing.layers import Parameter, Sharding
from megatron.packing.model import names
from megatron.packing.model.parts import attention
from megatron.sft.model.huggingface.tensors import View

Sizes = Mapping[str, int]


class Source(NamedTuple):
    """Place of a part's rows in a HuggingFace tensor."""

    view: View = View()
    stored: tuple[int, ...] = ()
    """Shape of the tensor; empty if the part is the whole tensor."""


class Row(NamedTuple):
    """One parameter, and the HuggingFace tensors that it consists of."""

    part: str
    """Logical name of the parameter: see `packing.model.names`."""
    sharding: Sharding
    shape: tuple[str, ...]
    """Shape of each part, with names for sizes (see `weights.sizes_of`). If a size differs between
    parts it is listed for each, separated by commas: `query,key,key`.
    """
    tensors: tuple[str, ...]
    """Name of each tensor without the prefix of its layer; `{e}` is the number of the expert."""
    when: str = "always"
    """Condition for a layer or model to have this parameter: see `weights.conditions_of`."""
    sources: Callable[[Sizes], tuple[Source, ...]] | None = None
    """Function from sizes to the place of each part; None if each part is a tensor of its own."""

    @classmethod
    def of(
        cls,
        parameter: Parameter,
        tensors: tuple[str, ...],
        sources: Callable[[Sizes], tuple[Source, ...]] | None = None,
    ) -> Row:
        """Returns the row of a parameter that is declared in `packing.model.parts`. The layers that
        have it are said there, too: its name is the condition.
        """
        name, _, sharding, shape, _ = parameter
        return cls(name, sharding, shape, tensors, name, sources)


MODEL_ROWS: tuple[Row, ...] = (
    Row(names.EMBEDDING, "vocabulary", ("vocab", "hidden"), ("embed_tokens.weight",)),
    Row(names.OUTPUT, "vocabulary", ("vocab", "hidden"), ("lm_head.weight",), "untied"),
    Row(names.OUTPUT, "whole", ("one", "hidden"), ("score.weight",), "score"),
    Row(names.FINAL_NORM, "whole", ("hidden",), ("norm.weight",)),
)
QKV = tuple(f"self_attn.{part}_proj" for part in "qkv")
ATTENTION_ROWS: tuple[Row, ...] = (
    Row.of(attention.QKV, tuple(f"{name}.weight" for name in QKV)),
    Row.of(attention.QKV_BIAS, tuple(f"{name}.bias" for name in QKV)),
    Row.of(attention.Q_NORM, ("self_attn.q_norm.weight",)),
    Row.of(attention.K_NORM, ("self_attn.k_norm.weight",)),
    Row.of(attention.PROJ, ("self_attn.o_proj.weight",)),
    Row.of(attention.PROJ_BIAS, ("self_attn.o_proj.bias",)),
    Row.of(attention.SINKS, ("self_attn.sinks",)),
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
        "router_correction_bias",
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
    # One tensor name with two meanings. In Llama post_attention_layernorm is the norm before the
    # MLP. In families with a norm behind attention it is that norm.
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
"""Rows in the order in which an exported folder has the tensors."""


def joined(*sizes: int, columns: tuple[int, ...] = ()) -> tuple[Source, ...]:
    """Returns the places of parts that are joined in one tensor, one below the other.

    `joined(4, 2, 2)`, as queries, keys and values: rows 0 to 3, 4 to 5, and 6 to 7 of 8.

    sizes: number of rows of each part.
    """
    offsets = [sum(sizes[:number]) for number in range(len(sizes))]
    return tuple(Source(View(offset), (sum(sizes), *columns)) for offset in offsets)


def alternating(*sizes: int, groups: int, columns: tuple[int, ...] = ()) -> tuple[Source, ...]:
    """Returns the places of parts that alternate in one tensor, group by group.

    `alternating(1, 1, groups=3)`: rows 0, 2, 4 and rows 1, 3, 5 of 6.

    sizes: number of rows of each part in one group.
    """
    stride = sum(sizes)
    offsets = [sum(sizes[:number]) for number in range(len(sizes))]
    return tuple(
        Source(View(offset, size, stride), (groups * stride, *columns))
        for offset, size in zip(offsets, sizes)
    )
