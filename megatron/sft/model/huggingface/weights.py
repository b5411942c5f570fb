"""pure. Which tensors of a HuggingFace model make up which parameter of megatron-core: one table,
for both directions.

Each parameter is a stack of blocks of rows of HuggingFace tensors, of which a tensor-parallel rank
holds a part. That is said once, by `copies`: reading copies each piece one way, writing the other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Literal, NamedTuple, Protocol

from megatron.sft.options.model import ModelConfig

Layout = Literal["whole", "columns", "rows", "halves", "heads", "vocabulary"]
"""How tensor-parallel ranks share a parameter: each has all of it; columns; rows; rows of each of
two halves; rows of heads in groups, [queries, key, value] for each group; rows of the vocabulary,
padded at its end.
"""


class Row(NamedTuple):
    """One parameter of megatron-core, and the HuggingFace tensors that it is made of."""

    core: str
    """Of megatron-core's local layers; see `_ALIASES` for those of Transformer Engine."""
    layout: Layout
    shape: tuple[str, ...]
    """Of each HuggingFace tensor; names of `Weights._sizes`, the first of which may differ between
    them.
    """
    tensors: tuple[str, ...]
    when: str = "always"
    """Which models and layers have it: see `Weights._conditions`."""


_WHOLE_MODEL: tuple[Row, ...] = (
    Row(
        "embedding.word_embeddings.weight",
        "vocabulary",
        ("vocab", "hidden"),
        ("model.embed_tokens.weight",),
    ),
    Row("output_layer.weight", "vocabulary", ("vocab", "hidden"), ("lm_head.weight",), "untied"),
    Row("decoder.final_layernorm.weight", "whole", ("hidden",), ("model.norm.weight",)),
)
_QKV = tuple(f"self_attn.{part}_proj" for part in "qkv")
_LAYER: tuple[Row, ...] = (
    Row("input_layernorm.weight", "whole", ("hidden",), ("input_layernorm.weight",)),
    Row(
        "self_attention.linear_qkv.weight",
        "heads",
        ("heads", "hidden"),
        tuple(f"{name}.weight" for name in _QKV),
    ),
    Row(
        "self_attention.linear_qkv.bias",
        "heads",
        ("heads",),
        tuple(f"{name}.bias" for name in _QKV),
        "qkv_bias",
    ),
    Row(
        "self_attention.q_layernorm.weight",
        "whole",
        ("head",),
        ("self_attn.q_norm.weight",),
        "norms",
    ),
    Row(
        "self_attention.k_layernorm.weight",
        "whole",
        ("head",),
        ("self_attn.k_norm.weight",),
        "norms",
    ),
    Row(
        "self_attention.linear_proj.weight",
        "columns",
        ("hidden", "query"),
        ("self_attn.o_proj.weight",),
    ),
    Row(
        "self_attention.linear_proj.bias",
        "whole",
        ("hidden",),
        ("self_attn.o_proj.bias",),
        "biases",
    ),
    Row("pre_mlp_layernorm.weight", "whole", ("hidden",), ("post_attention_layernorm.weight",)),
    Row(
        "mlp.linear_fc1.weight",
        "halves",
        ("ffn", "hidden"),
        ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        "dense",
    ),
    Row(
        "mlp.linear_fc1.bias",
        "halves",
        ("ffn",),
        ("mlp.gate_proj.bias", "mlp.up_proj.bias"),
        "dense_bias",
    ),
    Row("mlp.linear_fc2.weight", "columns", ("hidden", "ffn"), ("mlp.down_proj.weight",), "dense"),
    Row("mlp.linear_fc2.bias", "whole", ("hidden",), ("mlp.down_proj.bias",), "dense_bias"),
    Row("mlp.router.weight", "whole", ("experts", "hidden"), ("mlp.gate.weight",), "experts"),
    Row(
        "mlp.shared_experts.linear_fc1.weight",
        "halves",
        ("shared_ffn", "hidden"),
        ("mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight"),
        "shared",
    ),
    Row(
        "mlp.shared_experts.linear_fc2.weight",
        "columns",
        ("hidden", "shared_ffn"),
        ("mlp.shared_expert.down_proj.weight",),
        "shared",
    ),
    Row(
        "mlp.shared_experts.gate_weight",
        "whole",
        ("one", "hidden"),
        ("mlp.shared_expert_gate.weight",),
        "shared_gate",
    ),
)
_EXPERT: tuple[Row, ...] = (
    Row(
        "linear_fc1.weight",
        "halves",
        ("expert_ffn", "hidden"),
        ("gate_proj.weight", "up_proj.weight"),
    ),
    Row("linear_fc2.weight", "columns", ("hidden", "expert_ffn"), ("down_proj.weight",)),
)
# Norms that Transformer Engine has inside the linear layer behind them, and its grouped experts.
_ALIASES = (
    (r"self_attention\.linear_qkv\.layer_norm_weight", "input_layernorm.weight"),
    (r"mlp\.linear_fc1\.layer_norm_weight", "pre_mlp_layernorm.weight"),
    (r"mlp\.experts\.(linear_fc[12])\.weight(\d+)", r"mlp.experts.local_experts.\2.\1.weight"),
)
# What Mixtral's files call the parts of an MoE layer.
_MIXTRAL = (
    ("mlp.gate.", "block_sparse_moe.gate."),
    ("mlp.experts.", "block_sparse_moe.experts."),
    (".gate_proj.", ".w1."),
    (".up_proj.", ".w3."),
    (".down_proj.", ".w2."),
)
_LAYER_NAME = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
_EXPERT_NAME = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.*)")


class Part(NamedTuple):
    """One HuggingFace tensor of a parameter."""

    name: str
    shape: tuple[int, ...]


class Weight(NamedTuple):
    """One parameter of the whole model, as megatron-core would have it on a single rank."""

    layout: Layout
    parts: tuple[Part, ...]
    is_expert: bool = False
    num_groups: int = 1
    """Of layout "heads"."""
    core: str = ""
    """The end of the parameter's name, as its `Row` has it."""


class Copy(NamedTuple):
    """A block of a HuggingFace tensor, and the row of a rank's parameter where it begins."""

    part: int
    rows: slice
    columns: slice
    row: int
    """Columns of the parameter are always all of its own."""


class Tensors(Protocol):
    """Which tensors of a folder make up which parameters: those of a model, or those of an
    adapter."""

    tied: tuple[str, str] | None
    """Two names that stand for the same tensor; a folder may lack the first."""

    def concerns(self, name: str) -> bool:
        """Whether a parameter's values are in such a folder at all."""

    def of_parameter(self, name: str) -> Weight:
        """The weight behind the name of a parameter that it concerns; KeyError where there is
        none."""

    def all(self) -> Iterator[Weight]:
        """Every weight of the folder."""


def is_of_adapter(name: str) -> bool:
    """Whether a parameter's name is that of an adapter's, beside the layer that it belongs to."""
    return ".adapter." in name


class Weights:
    """The tensors of one model, `is_mixtral` for the names that its experts have in Mixtral's
    files.
    """

    def __init__(self, model: ModelConfig, vocab_size: int, is_mixtral: bool = False) -> None:
        self._model = model
        self._is_mixtral = is_mixtral
        head = model.resolved_kv_channels
        self._groups = model.num_query_groups or model.num_attention_heads
        query = model.num_attention_heads * head
        self._heads = (query, self._groups * head, self._groups * head)
        self._sizes = {
            "one": 1,
            "vocab": vocab_size,
            "hidden": model.hidden_size,
            "head": head,
            "query": query,
            "ffn": model.resolved_ffn_hidden_size,
            "experts": model.num_experts or 0,
            "expert_ffn": model.moe_ffn_hidden_size or model.resolved_ffn_hidden_size,
            "shared_ffn": model.moe_shared_expert_intermediate_size or 0,
        }
        is_tied = not model.untie_embeddings_and_output_weights
        self.tied = ("lm_head.weight", "model.embed_tokens.weight") if is_tied else None

    def has_experts(self, layer: int) -> bool:
        """Whether it is an MoE layer."""
        return self._model.num_experts is not None and bool(
            (self._model.moe_layer_freq or {layer: 1})[layer]
        )

    def of_parameter(self, name: str) -> Weight:
        """The weight behind a parameter's name, in which layers and experts are numbered over the
        whole model.

        KeyError for a parameter that no HuggingFace tensor stands for.
        """
        if match := _LAYER_NAME.fullmatch(name):
            layer, rest = int(match[1]), match[2]
            for alias, local in _ALIASES:
                rest = re.sub(f"^{alias}$", local, rest)
            if expert := _EXPERT_NAME.fullmatch(rest):
                row = next(row for row in _EXPERT if row.core == expert[2])
                return self._weight(
                    row, f"model.layers.{layer}.mlp.experts.{expert[1]}.", is_expert=True
                )
            rows, prefix, conditions = _LAYER, f"model.layers.{layer}.", self._conditions(layer)
        else:
            rest, rows, prefix, conditions = name, _WHOLE_MODEL, "", self._conditions(0)
        for row in rows:
            if row.core == rest and row.when in conditions:
                return self._weight(row, prefix)
        raise KeyError(name)

    def concerns(self, name: str) -> bool:
        """Whether a parameter is the model's own, and none of an adapter."""
        return not is_of_adapter(name)

    def all(self) -> Iterator[Weight]:
        """Every weight of the model."""
        conditions = self._conditions(0)
        yield from (self._weight(row, "") for row in _WHOLE_MODEL if row.when in conditions)
        for layer in range(self._model.num_layers):
            conditions, prefix = self._conditions(layer), f"model.layers.{layer}."
            yield from (self._weight(row, prefix) for row in _LAYER if row.when in conditions)
            for expert in range(self._sizes["experts"] if self.has_experts(layer) else 0):
                yield from (
                    self._weight(row, f"{prefix}mlp.experts.{expert}.", is_expert=True)
                    for row in _EXPERT
                )

    def _conditions(self, layer: int) -> set[str]:
        model, has_experts = self._model, self.has_experts(layer)
        biases = not model.disable_bias_linear
        holds = {
            "always": True,
            "untied": self.tied is None,
            "norms": model.qk_layernorm,
            "qkv_bias": model.add_qkv_bias or biases,
            "biases": biases,
            "dense": not has_experts,
            "dense_bias": biases and not has_experts,
            "experts": has_experts,
            "shared": has_experts and model.moe_shared_expert_intermediate_size is not None,
            "shared_gate": has_experts and model.moe_shared_expert_gate,
        }
        return {name for name, it_does in holds.items() if it_does}

    def _weight(self, row: Row, prefix: str, is_expert: bool = False) -> Weight:
        parts = []
        for number, tensor in enumerate(row.tensors):
            name = prefix + tensor
            if self._is_mixtral and "mlp." in name:
                for ours, theirs in _MIXTRAL:
                    name = name.replace(ours, theirs)
            sizes = [
                self._heads[number] if size == "heads" else self._sizes[size] for size in row.shape
            ]
            parts.append(Part(name, tuple(sizes)))
        groups = self._groups if row.layout == "heads" else 1
        return Weight(row.layout, tuple(parts), is_expert, groups, row.core)


def copies(weight: Weight, rank: int, size: int, num_rows: int) -> Iterator[Copy]:
    """What number `rank` of `size` tensor-parallel ranks holds of a weight, as a parameter of
    `num_rows` rows.

    Rows that no copy fills are padding of the vocabulary.
    """
    everything = slice(None)
    if weight.layout == "columns":
        width = weight.parts[0].shape[1] // size
        yield Copy(0, slice(0, num_rows), slice(rank * width, (rank + 1) * width), 0)
        return
    if weight.layout == "halves":
        half = num_rows // len(weight.parts)
        for part in range(len(weight.parts)):
            yield Copy(part, slice(rank * half, (rank + 1) * half), everything, part * half)
        return
    begin = 0 if weight.layout == "whole" else rank * num_rows
    blocks = _blocks(weight)
    ends = [0]
    for _, _, length in blocks:
        ends.append(ends[-1] + length)
    for (part, start, _), (first, last) in zip(blocks, pairwise(ends)):
        low, high = max(first, begin), min(last, begin + num_rows)
        if low < high:
            yield Copy(
                part, slice(start + low - first, start + high - first), everything, low - begin
            )


def _blocks(weight: Weight) -> list[tuple[int, int, int]]:
    """Rows of a fused parameter in order, such as queries, keys and values by group: (part, first
    row in it, number of rows).
    """
    per_group = [part.shape[0] // weight.num_groups for part in weight.parts]
    return [
        (part, g * rows, rows)
        for g in range(weight.num_groups)
        for part, rows in enumerate(per_group)
    ]
