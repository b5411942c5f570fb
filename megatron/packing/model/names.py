"""pure. One table of what megatron-core calls the parameters of a GPTModel, for all who ask:
weights in and out, LoRA, checkpoints.

Others speak of *logical names*, which say what a parameter is. Where GPTModel's layers name it
otherwise (Transformer Engine has norms inside the linear layer behind them, and grouped experts),
the other name leads to the same logical one:

    decoder.layers.3.self_attention.linear_qkv.weight             -> layer 3, attention.qkv.weight
    decoder.layers.3.self_attention.linear_qkv.layer_norm_weight  -> layer 3, mixer_norm.weight
    decoder.layers.3.mlp.experts.linear_fc1.weight7   -> layer 3, expert 7, experts.fc1.weight
"""

from __future__ import annotations

import re
from typing import NamedTuple

from megatron.packing.model.parts import parameter_at

EMBEDDING = "embedding.weight"
OUTPUT = "output.weight"
FINAL_NORM = "final_norm.weight"
_OF_MODEL = {
    "embedding.word_embeddings.weight": EMBEDDING,
    "output_layer.weight": OUTPUT,
    "decoder.final_layernorm.weight": FINAL_NORM,
}
# megatron-core's modules in a layer, the longer first -> logical names.
_MODULES = {
    "mlp.shared_experts.linear_fc1": "shared.fc1",
    "mlp.shared_experts.linear_fc2": "shared.fc2",
    "mlp.shared_experts": "shared",
    "mlp.experts.linear_fc1": "experts.fc1",
    "mlp.experts.linear_fc2": "experts.fc2",
    "mlp.router": "router",
    "mlp.shared_norm": "shared_norm",
    "mlp.shared_norm_behind": "shared_norm_behind",
    "mlp.experts_norm": "experts_norm",
    "mlp.experts_norm_behind": "experts_norm_behind",
    "mlp.linear_fc1": "mlp.fc1",
    "mlp.linear_fc2": "mlp.fc2",
    "input_layernorm": "mixer_norm",
    "pre_mlp_layernorm": "mlp_norm",
    "self_attn_bda.norm": "mixer_norm_behind",
    "mlp_bda.norm": "mlp_norm_behind",
    "mlp_bda": "layer",
}
_ALIASES = (
    (r"self_attention\.linear_qkv\.layer_norm_weight", "input_layernorm.weight"),
    (r"mlp\.linear_fc1\.layer_norm_weight", "pre_mlp_layernorm.weight"),
    (r"mlp\.experts\.(linear_fc[12])\.weight(\d+)", r"mlp.experts.local_experts.\2.\1.weight"),
)
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.*)")
ADAPTER = ".adapter."
"""Part of the names of an adapter's parameters, behind the name of the layer that it is beside."""


class LogicalName(NamedTuple):
    """A parameter of a whole model."""

    part: str
    """Logical name, such as attention.qkv.weight."""
    layer: int | None = None
    """Number over the whole model, from 0; None outside layers."""
    expert: int | None = None
    """Number over all expert-parallel ranks, from 0; None outside experts."""


def logical_name(name: str) -> LogicalName:
    """Returns the logical name of a parameter, in which layers and experts are numbered over the
    whole model; KeyError where the table has none.
    """
    match = _LAYER.fullmatch(name)
    if match is None:
        return LogicalName(_OF_MODEL[name])
    layer, rest = int(match[1]), match[2]
    for alias, local in _ALIASES:
        rest = re.sub(f"^{alias}$", local, rest)
    expert = None
    if found := _EXPERT.fullmatch(rest):
        expert, rest = int(found[1]), f"mlp.experts.{found[2]}"
    if (parameter := parameter_at(rest)) is not None:
        return LogicalName(parameter.name, layer, expert)
    for module, logical in _MODULES.items():
        if rest.startswith(f"{module}."):
            return LogicalName(logical + rest[len(module) :], layer, expert)
    raise KeyError(name)


def linear_of(name: str) -> str | None:
    """Returns the kind of a linear layer that adapters may stand beside, by its module's name: qkv,
    proj, fc1, fc2 or one of a part; None for other modules.
    """
    match = _LAYER.fullmatch(name)
    if match is None:
        return None
    if name.endswith((".linear_fc1", ".linear_fc2")):
        return name[-3:]
    parameter = parameter_at(f"{match[2]}.weight")
    return parameter.linear if parameter is not None and parameter.takes_adapter else None


def layer_prefix(name: str) -> str | None:
    """Returns `decoder.layers.N.` of a parameter's name; None outside layers."""
    match = re.match(r"decoder\.layers\.\d+\.", name)
    return None if match is None else match[0]


def is_of_adapter(name: str) -> bool:
    """Returns whether a parameter's name is that of an adapter's, beside the layer that it belongs
    to.
    """
    return ADAPTER in name
